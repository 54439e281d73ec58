"""A tiny language model and what it learns, for the jobs that train with Hugging Face's Trainer."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 64, 16


class Sentences(torch.utils.data.Dataset):
    """Random tokens, the same in every run."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def make_model() -> LlamaForCausalLM:
    """A tiny one, with a random start and dropout, so that a random state that is not resumed shows in the loss."""
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            attention_dropout=0.1,
        )
    )
