"""When checkpoints are committed, as their records say: one after the other, also where a clock was set back.

The newest checkpoint is the one with the latest time in its record. So a rank that decides about commits dates its
part of a checkpoint later than every checkpoint that was committed beside it before; by as little as floats can tell
where the clock says less.
"""

from __future__ import annotations

import contextlib
import math
import os
import time

from datastates.errors import CorruptCheckpointError, StorageError
from datastates.manifest import METADATA_NAME, read_commit, read_latest
from datastates.system_calls import patiently


class CommitTimes:
    """Times for the commits that one process decides about. For one thread.

    All checkpoints of a folder are looked at once; from then on the one that ``latest`` names, which another process
    may have committed meanwhile.
    """

    def __init__(self) -> None:
        self._youngest: dict[str, float] = {}  # by folder of checkpoints

    def next(self, directory: str) -> float:
        """A Unix time for a checkpoint's commit: now, or just after those of all others in its parent folder.

        What cannot be read there is left out: that it is damaged must not keep another checkpoint from being saved.

        Args:
            directory: of the checkpoint.
        """
        parent = os.path.dirname(directory)
        if parent in self._youngest:
            known = max(self._youngest[parent], _of_latest(parent))
        else:
            known = max((_of(os.path.join(parent, name)) for name in _names(parent)), default=0.0)
        self._youngest[parent] = max(time.time(), math.nextafter(known, math.inf))
        return self._youngest[parent]


def _of_latest(parent: str) -> float:
    with contextlib.suppress(StorageError):
        tag = read_latest(parent)
        return _of(os.path.join(parent, tag)) if tag else 0.0
    return 0.0


def _of(directory: str) -> float:
    with contextlib.suppress(CorruptCheckpointError, StorageError):
        record = read_commit(directory) if os.path.isdir(os.path.join(directory, METADATA_NAME)) else None
        if record is not None and math.isfinite(record.committed_at):
            return record.committed_at
    return 0.0


def _names(parent: str) -> list[str]:
    with contextlib.suppress(OSError):
        return patiently(os.listdir, parent)
    return []
