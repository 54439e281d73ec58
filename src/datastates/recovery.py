"""Bringing a checkpoint directory from one whole state to the next, and out of a crash in between.

`roll_forward` is the second phase of a commit; it may be cut anywhere and done again. `recover` does it for a
job that is gone, `clean_leftovers` removes what such a job left. Both leave everything alone that a living
process still owns.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from enum import Enum

from datastates.directories import fsync_directory, make_directories, make_names_durable
from datastates.errors import CorruptCheckpointError, StorageError
from datastates.leftovers import remove_orphan
from datastates.locks import open_locked, try_lock
from datastates.manifest import (
    ABORTED_NAME,
    COMMIT_NAME,
    LATEST_NAME,
    LOCK_NAME,
    METADATA_NAME,
    CommitRecord,
    Manifest,
    attempt_directory,
    commit_path,
    read_commit,
    read_manifest,
    verify_file,
)
from datastates.partial_names import is_attempt, partial_attempt, partial_path
from datastates.storage import temporary_path, write_atomically
from datastates.system_calls import patiently, storage_errors


class Recovery(Enum):
    """What `recover` found and did."""

    NOTHING_TO_DO = "nothing to do"
    ROLLED_FORWARD = "rolled forward"
    CLEANED = "cleaned"
    OWNED = "owned by a living process"


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


def roll_forward(directory: str, manifests: Sequence[tuple[Manifest, int]], tag: str) -> CommitRecord:
    """Give the files of a complete attempt their final names and commit them; may be repeated after a crash.

    An older checkpoint in the directory stops being one when the first file is renamed, so its record is
    withdrawn before. The new record is written (and its space taken) before that.

    Args:
        directory: the checkpoint directory.
        manifests: of all ranks, by rank, each with the CRC-32 of its bytes; all complete and of one attempt.
        tag: goes into the record.

    Raises:
        StorageError: a call failed; the attempt can be rolled forward later.
    """
    attempt = manifests[0][0].attempt
    folder = attempt_directory(directory, attempt)
    files = [file for manifest, _ in manifests for file in manifest.files]
    record = CommitRecord(
        attempt,
        tag,
        len(manifests),
        sum(file.nbytes for file in files),
        len(files),
        time.time(),
        tuple(value for _, value in manifests),
    )
    staged = os.path.join(folder, COMMIT_NAME)
    with storage_errors("make durable", folder):
        make_names_durable([folder])
    write_atomically(staged, record.to_bytes())
    with storage_errors("commit", directory):
        _withdraw(directory, attempt)
        folders = {directory}
        for file in files:
            path = os.path.join(directory, file.name)
            _rename(partial_path(path, attempt), path, file.nbytes)
            folders.add(os.path.dirname(path))
        for name in sorted(folders):
            fsync_directory(name)
        patiently(os.replace, staged, commit_path(directory))
        fsync_directory(os.path.join(directory, METADATA_NAME))
    return record


def remove_superseded(directory: str, attempt: str) -> bool:
    """Remove folders and partial files of all attempts but one, where their owners are gone.

    Returns:
        Whether anything was removed.
    """
    removed = False
    for other in attempts(directory):
        if other != attempt:
            removed |= _discard(directory, other)
    return removed


def attempts(directory: str) -> list[str]:
    """The attempts that have a folder in a checkpoint directory."""
    metadata = os.path.join(directory, METADATA_NAME)
    try:
        entries = patiently(os.scandir, metadata)
    except (FileNotFoundError, NotADirectoryError):
        return []
    with entries:
        return sorted(entry.name for entry in entries if is_attempt(entry.name) and entry.is_dir(follow_symlinks=False))


def recover(directory: str) -> Recovery:
    """Finish or undo what a crashed job left in a checkpoint directory. Idempotent.

    An attempt of which every rank's part is durable is rolled forward, unless rank 0 decided against it or the
    directory holds a committed checkpoint that it had not begun to replace; the rest is removed. ``latest`` is
    left alone: it may name a younger checkpoint by now.

    Raises:
        StorageError: the file system refuses.
    """
    result = Recovery.NOTHING_TO_DO
    with contextlib.ExitStack() as locks:
        mine = []
        for attempt in attempts(directory):
            if locks.enter_context(_all_of(directory, attempt)):
                mine.append(attempt)
            else:
                result = Recovery.OWNED
        committed = read_commit(directory)
        chosen = _choose(directory, [name for name in mine if committed is None or name != committed.attempt])
        if chosen is not None and (committed is None or chosen[0]) and result is not Recovery.OWNED:
            manifests = chosen[2]
            roll_forward(directory, manifests, manifests[0][0].tag)
            result = Recovery.ROLLED_FORWARD
    committed = read_commit(directory)
    keep = "" if committed is None else committed.attempt
    removed = remove_superseded(directory, keep) if result is not Recovery.OWNED else False
    removed |= _remove_partials(directory, None)
    return Recovery.CLEANED if removed and result is Recovery.NOTHING_TO_DO else result


def clean_leftovers(save_directory: str) -> list[str]:
    """Recover every checkpoint directory directly below `save_directory`; final files are never touched.

    A directory whose job died before it had asked for a commit holds partial files and no record: those files are
    removed, too, unless their owner lives; so is what would have become ``latest``.

    Returns:
        The directories in which something was finished or removed.

    Raises:
        StorageError: the file system refuses.
        CorruptCheckpointError: a commit record is damaged; directories that come later were not looked at.
    """
    changed = []
    with storage_errors("clean", save_directory):
        remove_orphan(temporary_path(os.path.join(save_directory, LATEST_NAME)))
        names = sorted(os.listdir(save_directory))
    for name in names:
        directory = os.path.join(save_directory, name)
        if os.path.islink(directory) or not os.path.isdir(directory):
            continue
        if os.path.isdir(os.path.join(directory, METADATA_NAME)):
            is_changed = recover(directory) in (Recovery.ROLLED_FORWARD, Recovery.CLEANED)
        else:
            with storage_errors("clean", directory):
                is_changed = _remove_partials(directory, None)
        if is_changed:
            changed.append(directory)
    return changed


_Candidate = tuple[bool, float, list[tuple[Manifest, int]]]


def _choose(directory: str, names: Sequence[str]) -> _Candidate | None:
    """The attempt to roll forward: a decided one before others, then the youngest."""
    candidates = [found for name in names if (found := _candidate(directory, name)) is not None]
    return max(candidates, key=lambda found: found[:2], default=None)


def _candidate(directory: str, attempt: str) -> _Candidate | None:
    """Whether it was decided, its time, its manifests; None when the attempt is not complete."""
    folder = attempt_directory(directory, attempt)
    if os.path.exists(os.path.join(folder, ABORTED_NAME)):
        return None
    manifests = complete_manifests(directory, attempt)
    if manifests is None:
        return None
    for manifest, _ in manifests:
        for file in manifest.files:
            path = os.path.join(directory, file.name)
            if _size(partial_path(path, attempt)) == file.nbytes:
                continue
            if _size(path) != file.nbytes or any(verify_file(directory, file)):
                return None  # what has the final name may be of another save, and of the same size
    return is_decided(directory, attempt), max(manifest.written_at for manifest, _ in manifests), manifests


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
    """The manifests of all ranks by rank, None unless all are there and none says that its rank failed."""
    try:
        first = read_manifest(directory, attempt, 0)
        if first is None:
            return None
        found = [first, *(read_manifest(directory, attempt, rank) for rank in range(1, first[0].world_size))]
    except CorruptCheckpointError:
        return None  # a damaged record proves nothing: the attempt counts as incomplete
    manifests = [entry for entry in found if entry is not None and entry[0].failed is None]
    return manifests if len(manifests) == len(found) else None


def _withdraw(directory: str, attempt: str) -> None:
    """Take back every record but that of the attempt, so that no reader pairs old and new files.

    A record that went from an attempt's folder to its place may be in both after a power loss, until its first
    folder is durable, too: that is made sure of here.
    """
    stale = [
        os.path.join(attempt_directory(directory, other), COMMIT_NAME)
        for other in attempts(directory)
        if other != attempt
    ]
    for path in [*stale, commit_path(directory)]:
        with contextlib.suppress(FileNotFoundError):
            patiently(os.unlink, path)
        with contextlib.suppress(FileNotFoundError):  # the folder is gone: its owner has just cleaned up
            fsync_directory(os.path.dirname(path))


def _rename(source: str, path: str, nbytes: int) -> None:
    try:
        patiently(os.replace, source, path)
    except FileNotFoundError as error:
        if _size(path) != nbytes:
            message = f"{path}: neither it nor its partial file has {nbytes} bytes"
            raise StorageError(message, error.errno, path) from error


def _size(path: str) -> int | None:
    try:
        return patiently(os.stat, path).st_size
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _all_of(directory: str, attempt: str) -> Iterator[bool]:
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


def _discard(directory: str, attempt: str) -> bool:
    with _all_of(directory, attempt) as is_mine:
        if not is_mine:
            return False
        _remove_partials(directory, attempt)
        with storage_errors("remove", attempt_directory(directory, attempt)):
            shutil.rmtree(attempt_directory(directory, attempt))
    return True


def _remove_partials(directory: str, attempt: str | None) -> bool:
    """Remove partial files of dead owners, of one attempt or of those that have no folder any more.

    Folders inside that are checkpoints themselves are left alone.
    """
    known = set(attempts(directory)) if attempt is None else set()
    removed = False
    for folder, folders, names in os.walk(directory):
        if METADATA_NAME in folders and folder != directory:
            folders.clear()
            continue
        if METADATA_NAME in folders:
            folders.remove(METADATA_NAME)
        for name in names:
            owner = partial_attempt(name)
            if owner is not None and (owner == attempt if attempt is not None else owner not in known):
                removed |= remove_orphan(os.path.join(folder, name))
    return removed
