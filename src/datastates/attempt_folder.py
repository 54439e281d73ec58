"""The folder of an attempt: how far the attempt has come, as its records and its lock tell."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from datastates.directories import make_directories
from datastates.errors import CorruptCheckpointError
from datastates.locks import open_locked, try_lock
from datastates.manifest import (
    ABORTED_NAME,
    COMMIT_NAME,
    LOCK_NAME,
    METADATA_NAME,
    RANK_NAME,
    Manifest,
    attempt_directory,
    read_commit,
    read_manifest,
)
from datastates.partial_names import is_attempt
from datastates.system_calls import patiently, storage_errors

MAX_DEPTH = 3
"""So many folders up from a file its checkpoint's folder is looked for."""


class AttemptLock:
    """A flusher's share in an attempt: as long as one is held, nobody else finishes or removes the attempt."""

    def __init__(self, directory: str, attempt: str) -> None:
        """Make the attempt's folder and take the lock. Raises StorageError."""
        folder = attempt_directory(directory, attempt)
        with storage_errors("lock", folder):
            while True:
                make_directories(folder)
                # another process may remove the folder of a crashed attempt between the two calls
                with contextlib.suppress(FileNotFoundError):
                    self._descriptor = open_locked(os.path.join(folder, LOCK_NAME), os.O_RDWR | os.O_CREAT, shared=True)
                    return

    def release(self) -> None:
        """Give the share back; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextlib.contextmanager
def whole_lock(directory: str, attempt: str) -> Iterator[bool]:
    """Hold the whole lock of an attempt for the body, if its owners are gone."""
    path = os.path.join(attempt_directory(directory, attempt), LOCK_NAME)
    try:
        descriptor = patiently(os.open, path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:
        yield False
        return
    try:
        yield bool(try_lock(descriptor))
    finally:
        os.close(descriptor)


def attempts(directory: str) -> list[str]:
    """The attempts that have a folder in a checkpoint directory."""
    metadata = os.path.join(directory, METADATA_NAME)
    try:
        entries = patiently(os.scandir, metadata)
    except (FileNotFoundError, NotADirectoryError):
        return []
    with entries:
        return sorted(entry.name for entry in entries if is_attempt(entry.name) and entry.is_dir(follow_symlinks=False))


def has_attempts(directory: str) -> bool:
    """Whether this package has ever begun a checkpoint in this very folder, complete or not."""
    try:
        with os.scandir(os.path.join(directory, METADATA_NAME)) as entries:
            return any(entry.is_dir() or entry.name == COMMIT_NAME for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:  # links that lead to each other: nothing is there
            return False
        raise


def checkpoint_of(path: str) -> str | None:
    """The folder of the checkpoint that a file may belong to."""
    directory = os.path.dirname(path)
    for _ in range(MAX_DEPTH):
        if has_attempts(directory):
            return directory
        directory = os.path.dirname(directory)
    return None


def is_promised(directory: str, attempt: str) -> bool:
    """Whether a rank has completed its part of an attempt, which may thus still be committed.

    Args:
        directory: the checkpoint's folder, or one inside of it.
        attempt: not of a living process.
    """
    for _ in range(MAX_DEPTH):
        folder = attempt_directory(directory, attempt)
        if os.path.isdir(folder):
            names = os.listdir(folder)
            return ABORTED_NAME not in names and any(name.startswith("rank-") for name in names)
        directory = os.path.dirname(directory)
    return False


def is_decided(directory: str, attempt: str) -> bool:
    """Whether rank 0 has decided to commit the attempt, or has done so."""
    if os.path.exists(os.path.join(attempt_directory(directory, attempt), COMMIT_NAME)):
        return True
    try:
        record = read_commit(directory)
    except CorruptCheckpointError:
        return False  # whatever stands in its place, nobody has decided anything with it
    return record is not None and record.attempt == attempt


def complete_manifests(directory: str, attempt: str) -> list[tuple[Manifest, int]] | None:
    """The manifests by rank of all ranks, or where nodes share no directory of all on this node.

    None unless all are there and none says that its rank failed.
    """
    try:
        first = _first_manifest(directory, attempt)
        if first is None:
            return None
        found = [first, *(read_manifest(directory, attempt, rank) for rank in first[0].ranks[1:])]
    except CorruptCheckpointError:
        return None  # a damaged record proves nothing: the attempt counts as incomplete
    manifests = [entry for entry in found if entry is not None and entry[0].failed is None]
    return manifests if len(manifests) == len(found) else None


def _first_manifest(directory: str, attempt: str) -> tuple[Manifest, int] | None:
    """That of the lowest rank that has one, if it is the first of all that take part here."""
    try:
        names = patiently(os.listdir, attempt_directory(directory, attempt))
    except FileNotFoundError:
        return None
    ranks = [int(found[1]) for found in map(RANK_NAME.fullmatch, names) if found is not None]
    first = read_manifest(directory, attempt, min(ranks)) if ranks else None
    return first if first is not None and first[0].ranks[0] == first[0].rank == min(ranks) else None


def last_seen(directory: str, attempt: str, rank: int) -> str:
    """What a rank of the same run has saved last beside a checkpoint that it is missing from, as the end of a sentence.

    Empty when nothing is found. For messages only: reads all folders beside the checkpoint's.
    """
    run = attempt.rsplit("-", 2)[0] + "-"
    found: list[tuple[float, str]] = []
    with contextlib.suppress(OSError, CorruptCheckpointError), os.scandir(os.path.dirname(directory)) as folders:
        for folder in folders:
            if folder.path == directory or not has_attempts(folder.path):
                continue
            for other in os.listdir(os.path.join(folder.path, METADATA_NAME)):
                entry = read_manifest(folder.path, other, rank) if other.startswith(run) else None
                if entry is not None:
                    found.append((entry[0].written_at, entry[0].tag or folder.name))
    return f"; the last checkpoint that it took part in is {max(found)[1]!r}" if found else ""
