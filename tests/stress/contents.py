"""What the stress jobs save: every byte follows from who saved it and when, so every byte can be checked."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

PARTS = ("model", "optimizer")
BEST = "best"  # a tag that is saved again and again
BEST_EVERY = 3
LONE = "lone"  # the folder of the files that belong to no checkpoint
_COUNTS = (300_000, 180_001, 420_013)  # elements of the largest tensor; alternate from step to step


@dataclass(frozen=True, order=True)
class Moment:
    """When a state was saved: which start of the job, which step. Later ones are greater."""

    start: int
    step: int


def tag_of(step: int) -> str:
    return BEST if step % BEST_EVERY == 0 else f"step{step}"


def file_name(rank: int, part: str) -> str:
    return f"rank{rank}-{part}.pt"


def state_of(moment: Moment, rank: int, part: str) -> dict[str, Any]:
    """1 to 2 MiB, some of it large and some small; no two states have a tensor in common."""
    count = _COUNTS[(moment.step + rank) % len(_COUNTS)]
    seed = ((moment.start * 1009 + moment.step) * 31 + rank) * 7 + (*PARTS, LONE).index(part)
    return {
        "start": moment.start,
        "step": moment.step,
        "rank": rank,
        "part": part,
        "tensors": {
            "large": torch.arange(seed, seed + count, dtype=torch.int32) * 1103515245,  # wraps around
            "small": torch.arange(seed, seed + 101, dtype=torch.int32),
            "scalar": torch.tensor(float(seed)),
        },
    }


def read_moment(paths: Iterable[str]) -> Moment:
    """The one moment at which all of these files were saved, each read by plain ``torch.load`` and compared.

    Raises:
        ValueError: a file holds other bytes than were saved, or not all are of one moment.
    """
    found = {_moment_of(path) for path in paths}
    if len(found) != 1:
        raise ValueError(f"files of {len(found)} different saves side by side: {sorted(found)}")
    return found.pop()


def _moment_of(path: str) -> Moment:
    rank, part = os.path.basename(path).removeprefix("rank").removesuffix(".pt").split("-")
    state = torch.load(path, weights_only=True)
    moment = Moment(state["start"], state["step"])
    expected = state_of(moment, int(rank), part)
    tensors, wanted = state.pop("tensors"), expected.pop("tensors")
    if state != expected or list(tensors) != list(wanted):
        raise ValueError(f"{path}: {state} found, expected {expected}")
    for fqn, tensor in wanted.items():
        if tensors[fqn].dtype != tensor.dtype or not torch.equal(tensors[fqn], tensor):
            raise ValueError(f"{path}: tensor {fqn} is not what was saved at {moment}")
    return moment
