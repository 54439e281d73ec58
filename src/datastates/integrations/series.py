"""The folders of checkpoints that a framework makes, one beside the other, with a checkpoint of DeepSpeed in each."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import time
from dataclasses import dataclass

from datastates import recovery
from datastates.attempt_folder import has_attempts
from datastates.deadline import Deadline
from datastates.errors import CorruptCheckpointError, DataStatesError
from datastates.manifest import LATEST_NAME, read_commit
from datastates.storage import write_atomically
from datastates.tier_settings import TierSettings
from datastates.tiers.first_tier import name_below
from datastates.tiers.marks import is_awaited

logger = logging.getLogger(__name__)

OWNER_SECONDS = 30.0
"""So long a start waits for the flusher of a job that was killed: it finishes what it has, then ends."""

_POLL_SECONDS = 0.05

_TAGS = ("global_step*", "pytorch_model", "pytorch_model_[0-9]*")
_RANDOM_STATES = ("rng_state*.pth", "random_states_*.pkl")
_LAST_FILES = ("trainer_state.json", "random_states_0.pkl")  # written after the call that saves with DeepSpeed


@dataclass(frozen=True)
class Series:
    """The checkpoints of one folder, and which of them shall stay.

    Attributes:
        folder: holds one folder per checkpoint.
        prefix: of their names; the rest is a number.
        limit: how many complete ones to keep, at least 1.
        protected: folders that must stay, though they count.
        tiers: where checkpoints are carried to: nothing goes from the first one before the others have it.
    """

    folder: str
    prefix: str
    limit: int
    protected: frozenset[str] = frozenset()
    tiers: tuple[TierSettings, ...] = ()

    def numbers(self) -> dict[str, int]:
        """The number of each checkpoint's folder, by its path."""
        pattern = re.compile(rf"{re.escape(self.prefix)}(\d+)")
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                match = pattern.fullmatch(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    found[os.path.join(self.folder, entry.name)] = int(match[1])
        return found

    def is_awaited(self, path: str) -> bool:
        """Whether a further tier is still to get the DeepSpeed part of one of these checkpoints."""
        return any(_is_awaited(part, self.tiers) for part in _parts(path))


def is_complete(folder: str) -> bool:
    """Whether training can go on from a checkpoint's folder, as far as its files tell. Reads no tensor.

    True as well for a folder without a DeepSpeed part, if none was meant to be there (``save_only_model``).
    """
    if not any(os.path.exists(os.path.join(folder, name)) for name in _LAST_FILES):
        return False
    parts = _parts(folder)
    if not parts:
        return not _found(folder, _RANDOM_STATES)
    return os.path.exists(os.path.join(folder, LATEST_NAME)) and all(_is_committed(path) for path in parts)


def is_of_datastates(folder: str, prefix: str) -> bool:
    """Whether this package has ever begun to save to one of the checkpoints in a folder."""
    numbers = Series(os.path.realpath(folder), prefix, 1).numbers()
    return any(has_attempts(part) for path in numbers for part in _parts(path))


def youngest_complete(folder: str, prefix: str) -> str | None:
    """The path of the complete checkpoint with the highest number, None where there is none.

    Completes first what an interrupted job has left durable. Says of each younger one that it was passed over.
    """
    numbers = Series(os.path.realpath(folder), prefix, 1).numbers()
    for path in sorted(numbers, key=lambda path: numbers[path], reverse=True):
        finish_interrupted(path)
        if is_complete(path):
            return path
        logger.warning("%s was never completed, an older checkpoint is taken", path)
    return None


def finish_interrupted(folder: str, timeout: float = OWNER_SECONDS) -> bool:
    """Complete or remove what an interrupted job has left in a checkpoint's folder, as far as storage allows.

    Blocks: a flusher process that has outlived its trainer may still be at work there, and is waited for.

    Returns:
        Whether a living process still owns a part of it after ``timeout`` seconds: then it may become complete yet.
    """
    deadline = Deadline(timeout)
    try:
        while any(recovery.recover(path) is recovery.Recovery.OWNED for path in _parts(folder)):
            if not deadline.left():
                return True
            time.sleep(_POLL_SECONDS)
        recovery.clean_leftovers(folder)
        _name_latest(folder)
    except (DataStatesError, OSError) as error:
        logger.warning("%s: what an interrupted run left could not be cleaned up: %s", folder, error)
    return False


def _name_latest(folder: str) -> None:
    """Write the ``latest`` that a commit lacks which was finished by `recovery`: it leaves that file alone."""
    parts = _parts(folder)
    record = read_commit(parts[0]) if len(parts) == 1 else None
    path = os.path.join(folder, LATEST_NAME)
    if record is not None and not os.path.exists(path):
        write_atomically(path, os.fsencode(record.tag))


def _parts(folder: str) -> list[str]:
    """The folders of DeepSpeed's checkpoints in a checkpoint's folder."""
    return [path for path in _found(folder, _TAGS) if os.path.isdir(path)]


def _found(folder: str, patterns: tuple[str, ...]) -> list[str]:
    return [path for pattern in patterns for path in glob.glob(os.path.join(glob.escape(folder), pattern))]


def _is_awaited(directory: str, tiers: tuple[TierSettings, ...]) -> bool:
    if not tiers or name_below(tiers[0].path, directory) is None:
        return False
    try:
        record = read_commit(directory)
    except CorruptCheckpointError:
        return False
    return record is not None and is_awaited(directory, record.attempt, tiers)


def _is_committed(directory: str) -> bool:
    """Whether a folder of DeepSpeed's files is complete: by our record, or of another engine, which keeps none."""
    if has_attempts(directory):
        try:
            return read_commit(directory) is not None
        except CorruptCheckpointError:
            return False
    return any(name.endswith("_states.pt") for name in os.listdir(directory))
