"""Train a small classifier in a plain PyTorch loop: saved lazily, killed at any time, resumed to the last bit.

::

    python examples/plain_pytorch.py --directory run --steps 200
    torchrun --standalone --nproc-per-node 2 examples/plain_pytorch.py --directory run --steps 200

The same command starts and resumes. With several processes the model is trained by data parallelism, and each process
writes a part of it. SIGTERM and SIGUSR1 make it save and end.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from datastates import Checkpointer

NUM_EXAMPLES, NUM_FEATURES, NUM_CLASSES = 4096, 64, 8


class Batches:
    """Endless batches of a made-up data set, in a new order for each pass; its place in them can be saved."""

    def __init__(self, batch: int, rank: int, num_ranks: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(NUM_EXAMPLES, NUM_FEATURES, generator=generator)
        self.labels = (self.inputs @ torch.randn(NUM_FEATURES, NUM_CLASSES, generator=generator)).argmax(1)
        self.batch = batch
        self.rank, self.num_ranks = rank, num_ranks
        self.num_drawn = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        per_pass = NUM_EXAMPLES // (self.batch * self.num_ranks)
        while True:
            number, place = divmod(self.num_drawn, per_pass)
            order = torch.randperm(NUM_EXAMPLES, generator=torch.Generator().manual_seed(number))
            begin = (place * self.num_ranks + self.rank) * self.batch
            chosen = order[begin : begin + self.batch]
            self.num_drawn += 1
            yield self.inputs[chosen], self.labels[chosen]

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_drawn = state["num_drawn"]


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, width),
        nn.BatchNorm1d(width),  # has buffers that a forward pass changes
        nn.ReLU(),
        nn.Dropout(0.1),  # draws random numbers
        nn.Linear(width, NUM_CLASSES),
    )


def train(options: argparse.Namespace, rank: int, num_ranks: int) -> None:
    model = make_model(options.width)
    network = DistributedDataParallel(model) if num_ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(options.batch, rank, num_ranks)
    torch.manual_seed(1 + rank)
    state = {"model": model, "optimizer": optimizer, "batches": batches}

    with (
        Checkpointer(
            options.directory,
            keep_last=2,
            host_cache_gb=options.host_cache_gb,
            replicated={"model", "optimizer"},
        ) as checkpointer,
        checkpointer.preemption() as preemption,
    ):
        first = checkpointer.resume(state) or 0
        for step, (inputs, labels) in zip(range(first + 1, options.steps + 1), batches, strict=False):
            loss = nn.functional.cross_entropy(network(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # waits for copies of the last save that are not done yet
            print(f"rank {rank} step {step} loss {loss.item().hex()}", flush=True)
            is_last = step == options.steps or preemption.requested
            if is_last or step % options.save_interval == 0:
                checkpointer.save(step, state)
            if is_last:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="examples per process and step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--host-cache-gb", type=float, default=0.25)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        distributed.init_process_group("gloo")
    try:
        train(options, int(os.environ.get("RANK", "0")), num_ranks)
    finally:
        if num_ranks > 1:
            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
