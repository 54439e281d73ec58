"""Hugging Face's Trainer, without DeepSpeed, with lazily saved checkpoints: one call, and nothing else.

    python examples/huggingface_trainer.py --out runs/trainer --steps 40

Give the same command again, with more steps, and it goes on from the last complete checkpoint.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from datastates.integrations.transformers import last_checkpoint, use_datastates


class Sentences(torch.utils.data.Dataset):
    """Random tokens: this is about checkpoints."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for the checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(7)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape, **heads))
    args = TrainingArguments(
        options.out,
        max_steps=options.steps,
        save_steps=10,
        save_total_limit=2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = use_datastates(Trainer(model, args, train_dataset=Sentences()), host_cache_gb=0.25)
    trainer.train(resume_from_checkpoint=last_checkpoint(options.out))
    print(f"step {trainer.state.global_step}")


if __name__ == "__main__":
    main()
