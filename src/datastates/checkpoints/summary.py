"""What a checkpoint says of itself: a small file that rank 0 saves beside the states, of the same format.

It is a file of the checkpoint like the others: there when the checkpoint is committed, and covered by its checksums.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datastates import reader
from datastates.errors import CorruptCheckpointError, ForeignObjectError

FORMAT = "datastates-checkpoint"
VERSION = 1
SUFFIXES = (".pt", ".safetensors")


@dataclass(frozen=True, slots=True)
class Shared:
    """Where a replicated entry lies.

    Attributes:
        ranks: the ranks whose files hold a part of it, rank 0 first.
        fingerprint: of the names, dtypes and shapes of its tensors, where several ranks have saved it. Each rank's file
            has its own: they must be equal.
    """

    ranks: tuple[int, ...]
    fingerprint: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a checkpoint says of itself.

    Attributes:
        step: of the training.
        serial: higher than that of any checkpoint that was in the folder when it was saved: the order of the saves,
            over all runs, whatever their steps and clocks were.
        world_size: how many ranks saved it.
        suffix: of the names of its files: ``".pt"`` or ``".safetensors"``.
        entries: names of what rank 0 saved.
        replicated: those of them that are the same on all ranks.
        metrics: the values given to ``save()``.
    """

    step: int
    serial: int
    world_size: int
    suffix: str
    entries: tuple[str, ...]
    replicated: Mapping[str, Shared] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def file_name(self, rank: int) -> str:
        """The file with a rank's state, relative to the checkpoint's folder."""
        return file_name(rank, self.suffix)

    def to_state(self) -> dict[str, Any]:
        """As it is saved: plain data."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "serial": self.serial,
            "world_size": self.world_size,
            "suffix": self.suffix,
            "entries": list(self.entries),
            "replicated": {
                name: {"ranks": list(shared.ranks), "fingerprint": shared.fingerprint}
                for name, shared in self.replicated.items()
            },
            "metrics": dict(self.metrics),
        }

    @classmethod
    def from_state(cls, state: Any, path: str) -> Summary:
        """Read what `to_state` has given. Raises CorruptCheckpointError."""
        try:
            if state["format"] != FORMAT or state["version"] != VERSION:
                raise ValueError(f"format {state['format']!r}, version {state['version']!r}")
            return cls(
                int(state["step"]),
                int(state["serial"]),
                int(state["world_size"]),
                str(state["suffix"]),
                tuple(map(str, state["entries"])),
                {str(name): _shared(entry) for name, entry in state["replicated"].items()},
                {str(name): float(value) for name, value in state["metrics"].items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{path}: not the summary of a checkpoint: {error!r}", path) from error


def summary_name(suffix: str) -> str:
    """The file of the summary, relative to the checkpoint's folder."""
    return f"checkpoint{suffix}"


def file_name(rank: int, suffix: str) -> str:
    """The file with a rank's state, relative to the checkpoint's folder."""
    return f"rank-{rank:05d}{suffix}"


def read_summary(directory: str) -> Summary | None:
    """The summary of a checkpoint, None where its folder has none: somebody else's.

    Raises:
        CorruptCheckpointError: there is something else in its place.
        StorageError: it cannot be read.
    """
    paths = [os.path.join(directory, summary_name(suffix)) for suffix in SUFFIXES]
    path = next((path for path in paths if os.path.exists(path)), None)
    if path is None:
        return None
    try:
        return Summary.from_state(reader.load(path), path)
    except ForeignObjectError as error:
        raise CorruptCheckpointError(f"{path}: not the summary of a checkpoint: {error}", path) from error


def _shared(entry: Mapping[str, Any]) -> Shared:
    return Shared(tuple(map(int, entry["ranks"])), int(entry["fingerprint"]))
