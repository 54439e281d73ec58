"""Names of attempts, on which the ranks of a run agree without talking."""

from __future__ import annotations

import os
import threading
import zlib
from collections import Counter


class AttemptNames:
    """Names for the attempts of one rank, equal to those of the same checkpoint on other ranks alone. Thread safe.

    The name of a checkpoint's attempt counts the attempts at this very tag: a rank that has missed a checkpoint takes
    part in the next one again.
    """

    def __init__(self, run_id: str, rank: int) -> None:
        """Args:
        run_id: equal on all ranks of this run, unlike in any other run.
        rank: of this process.
        """
        self._run_id = run_id
        self._rank = rank
        self._lock = threading.RLock()  # protects the counts; a signal handler may save, too
        self._num_attempts: Counter[str] = Counter()
        self._num_lone_files = 0

    def of_checkpoint(self, tag: str) -> str:
        """The name of the next attempt at a checkpoint."""
        with self._lock:
            self._num_attempts[tag] += 1
            return f"{self._run_id}-{zlib.crc32(os.fsencode(tag)):08x}-{self._num_attempts[tag]:04d}"

    def of_lone_file(self) -> str:
        """The name of the next attempt at a file that belongs to no checkpoint."""
        with self._lock:
            self._num_lone_files += 1
            return f"{self._run_id}-r{self._rank}-{self._num_lone_files:06d}"
