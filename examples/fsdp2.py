"""A training loop of FSDP2 whose checkpoints go through ``torch.distributed.checkpoint``, and cost the fence alone.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --save checkpoints --steps 20

Kill it whenever you like and give the command again, with another number of processes if you like: it goes on from the
newest complete checkpoint. On CPUs with as many processes the losses are those of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import logging
import os
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from datastates.integrations.dcp import DataStatesReader, DataStatesWriter, newest_checkpoint

WIDTH, NUM_TOKENS, LENGTH = 128, 256, 32


class Model(nn.Module):
    """A small language model: embedding, a few blocks, a head."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(num_blocks)
        )
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return self.head(hidden).clone()


class Trainer(Stateful):
    """All that a checkpoint holds: weights, the optimizer's state, and how far training is."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)  # the same weights on all ranks, before they are sharded
        self.model = Model().to(device)
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.device = device
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]

    def train_step(self) -> float:
        """One step on data that follow from the step's number and the rank."""
        self.step += 1
        generator = torch.Generator().manual_seed(1000 * self.step + distributed.get_rank())
        start = torch.randint(NUM_TOKENS, (8, 1), generator=generator)
        tokens = ((start + 3 * torch.arange(LENGTH + 1)) % NUM_TOKENS).to(self.device)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()  # the fence closes here, by itself
        self.optimizer.zero_grad()
        return loss.item()


def main() -> None:
    options = parse()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    saving = distributed.new_group(backend="gloo")  # collectives of saves must not get between those of training
    rank = distributed.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    trainer = Trainer(device)
    newest = newest_checkpoint(options.save)
    if newest is not None:
        dcp.load({"trainer": trainer}, storage_reader=DataStatesReader(newest))

    future: Future[Any] | None = None
    with DataStatesWriter(host_cache_gb=options.host_cache_gb, process_group=saving) as writer:
        while trainer.step < options.steps:
            loss = trainer.train_step()
            if rank == 0:
                print(f"step {trainer.step} loss {loss!r}", flush=True)
            if trainer.step % options.save_interval == 0 or trainer.step == options.steps:
                if future is not None:
                    future.result()  # raises what became of the one before
                where = os.path.join(options.save, f"step{trainer.step}")
                state = {"trainer": trainer}
                future = dcp.async_save(state, checkpoint_id=where, storage_writer=writer, process_group=saving)
        if future is not None:
            future.result()
    distributed.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model with FSDP2, and save it lazily.")
    parser.add_argument("--save", required=True, metavar="DIR", help="checkpoints go here, and are resumed from here")
    parser.add_argument("--save-interval", type=int, default=5, metavar="N", help="save every N steps")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="stop after this step")
    parser.add_argument(
        "--host-cache-gb", type=float, default=0.25, metavar="GB", help="host memory for saves, per rank"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
