"""What the first tier remembers of carrying a checkpoint on: small files in the folder of its attempt.

::

    D/.datastates/<attempt>/chosen-<tier>.json          rank 0 has chosen to carry the attempt: the other ranks follow
    D/.datastates/<attempt>/outcome-<tier>.json         it is committed in that tier, or need not or cannot be carried
    D/.datastates/<attempt>/sent-<tier>-<rank>.jsonl    files that are in an object store, with their receipts
    D/.datastates/<attempt>/turn-<tier>-<rank>.lock     locked by the process that carries the rank's part

So that carrying goes on after a crash, and nobody has to ask a tier what it has.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from enum import Enum

from datastates.locks import try_lock
from datastates.manifest import attempt_directory, read_bytes
from datastates.storage import write_atomically
from datastates.system_calls import patiently, storage_errors
from datastates.tier_settings import TierSettings


class Outcome(Enum):
    """What became of carrying a checkpoint to a tier."""

    CARRIED = "carried"
    SKIPPED = "skipped"
    DAMAGED = "damaged"


def is_awaited(directory: str, attempt: str, tiers: Sequence[TierSettings]) -> bool:
    """Whether a further tier is still to get a checkpoint: whoever removes checkpoints from the first tier asks.

    Args:
        directory: the checkpoint's folder in the first tier.
        attempt: that it is committed with.
        tiers: all of them, the first one first.
    """
    return any(Marks(directory, attempt, tier).outcome is None for tier in tiers[1:])


class Marks:
    """The marks of one attempt for one tier. Reads and writes the first tier."""

    def __init__(self, directory: str, attempt: str, tier: TierSettings) -> None:
        self._tier = tier
        self._folder = attempt_directory(directory, attempt)

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None while it has not. A record that cannot be read counts as none: it is carried again."""
        data = read_bytes(self._path("outcome"))
        try:
            return None if data is None else Outcome(json.loads(data)["outcome"])
        except (KeyError, TypeError, ValueError):
            return None

    def settle(self, outcome: Outcome, reason: str = "") -> None:
        """Record the end, unless the attempt's folder is gone. Raises StorageError."""
        fields = {"outcome": outcome.value, "tier": self._tier.path, "at": time.time(), "reason": reason}
        if os.path.isdir(self._folder):
            write_atomically(self._path("outcome"), (json.dumps(fields) + "\n").encode("ascii"))

    @property
    def chosen_at(self) -> float | None:
        """When rank 0 chose the attempt to be carried next, None where it has not."""
        data = read_bytes(self._path("chosen"))
        try:
            return None if data is None else float(json.loads(data)["at"])
        except (KeyError, TypeError, ValueError):
            return None

    def choose(self) -> None:
        """Let the other ranks carry the attempt, too. Raises StorageError."""
        write_atomically(self._path("chosen"), (json.dumps({"at": time.time()}) + "\n").encode("ascii"))

    def forgo(self) -> None:
        """Take `choose` back. Raises StorageError."""
        path = self._path("chosen")
        with storage_errors("remove", path):
            try:
                patiently(os.unlink, path)
            except FileNotFoundError:
                return

    @contextlib.contextmanager
    def turn(self, rank: int) -> Iterator[bool]:
        """Hold the right to carry a rank's part for the body; False: another process has it.

        That is one that an earlier run has left: it goes on carrying when its trainer has ended.

        Raises:
            StorageError: the lock file cannot be made.
        """
        path = os.path.join(self._folder, f"turn-{self._tier.key}-{rank:05d}.lock")
        with storage_errors("lock", path):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = patiently(os.open, path, flags, 0o666)
        try:
            with storage_errors("lock", path):
                is_mine = try_lock(descriptor) is not False
            yield is_mine
        finally:
            os.close(descriptor)

    @property
    def is_begun(self) -> bool:
        """Whether any part of the attempt may be in the tier."""
        if self.chosen_at is not None:
            return True
        beginning = f"sent-{self._tier.key}-"
        return os.path.isdir(self._folder) and any(name.startswith(beginning) for name in os.listdir(self._folder))

    def receipts(self, rank: int) -> dict[str, str]:
        """What an object store has acknowledged of a rank's files, by name; lines that a crash has cut do not count."""
        found: dict[str, str] = {}
        for line in (read_bytes(self._sent_path(rank)) or b"").splitlines():
            try:
                name, receipt = json.loads(line)
                found[str(name)] = str(receipt)
            except (TypeError, ValueError):
                continue
        return found

    def add_receipt(self, rank: int, name: str, receipt: str) -> None:
        """Remember that a file is there. Not durable: after a loss of power it is sent again. Raises StorageError."""
        path = self._sent_path(rank)
        with storage_errors("write", path), open(path, "ab") as file:
            file.write((json.dumps([name, receipt]) + "\n").encode("ascii"))

    def _path(self, kind: str) -> str:
        return os.path.join(self._folder, f"{kind}-{self._tier.key}.json")

    def _sent_path(self, rank: int) -> str:
        return os.path.join(self._folder, f"sent-{self._tier.key}-{rank:05d}.jsonl")
