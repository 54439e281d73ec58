"""Bringing a checkpoint directory out of a crash, to one whole state or the other.

`recover` finishes a commit that was cut, `clean_leftovers` does that in all folders and removes what is left.
Both leave everything alone that a living process still owns.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from enum import Enum

from datastates.attempt_folder import attempts, complete_manifests, is_decided, whole_lock
from datastates.commit import roll_forward
from datastates.integrity import verify_file
from datastates.leftovers import remove_orphan
from datastates.manifest import (
    ABORTED_NAME,
    LATEST_NAME,
    METADATA_NAME,
    CommitRecord,
    Manifest,
    attempt_directory,
    read_commit,
)
from datastates.partial_names import partial_attempt, partial_path
from datastates.removal import finish_removals
from datastates.storage import size_of, temporary_path
from datastates.system_calls import storage_errors

RECOVERY_SECONDS = 10.0
"""So long a load waits for another process that is completing the same commit."""

_POLL_SECONDS = 0.05


class Recovery(Enum):
    """What `recover` found and did."""

    NOTHING_TO_DO = "nothing to do"
    ROLLED_FORWARD = "rolled forward"
    CLEANED = "cleaned"
    OWNED = "owned by a living process"


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
            if locks.enter_context(whole_lock(directory, attempt)):
                mine.append(attempt)
            else:
                result = Recovery.OWNED
        committed = read_commit(directory)
        chosen = _choose(directory, [name for name in mine if committed is None or name != committed.attempt])
        if chosen is not None and (committed is None or chosen[0]) and result is not Recovery.OWNED:
            manifests = chosen[2]
            first = manifests[0][0]
            roll_forward(directory, manifests, first.tag, first.written_at)  # younger ones may be committed by now
            result = Recovery.ROLLED_FORWARD
    committed = read_commit(directory)
    keep = "" if committed is None else committed.attempt
    removed = remove_superseded(directory, keep) if result is not Recovery.OWNED else False
    removed |= _remove_partials(directory, None)
    return Recovery.CLEANED if removed and result is Recovery.NOTHING_TO_DO else result


def committed_record(directory: str) -> CommitRecord | None:
    """The commit record, after completing an interrupted commit; waits while another process does so.

    None where the directory holds no complete checkpoint.

    Raises:
        StorageError: the file system refuses.
        CorruptCheckpointError: there is something else in the record's place.
    """
    deadline = time.monotonic() + RECOVERY_SECONDS
    while (record := read_commit(directory)) is None:
        found = recover(directory)
        if found is not Recovery.OWNED or time.monotonic() > deadline:
            return read_commit(directory)
        time.sleep(_POLL_SECONDS)
    return record


def clean_leftovers(save_directory: str) -> list[str]:
    """Recover every checkpoint directory directly below `save_directory`; final files are never touched.

    Directories in which nothing but our own records would be left are removed: to a person they look like checkpoints.
    A directory whose job died before it had asked for a commit holds partial files and no record: those files are
    removed, too, unless their owner lives; so is what would have become ``latest``, and what is left of a checkpoint
    whose removal was cut.

    Returns:
        The directories in which something was finished or removed.

    Raises:
        StorageError: the file system refuses.
        CorruptCheckpointError: a commit record is damaged; directories that come later were not looked at.
    """
    changed = finish_removals(save_directory)
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
            remove_empty(directory)
    return changed


def remove_empty(directory: str) -> None:
    """Remove a directory that holds nothing, or an empty folder for records; leaves any other alone."""
    with contextlib.suppress(OSError):  # not empty, or in use: it stays
        os.rmdir(os.path.join(directory, METADATA_NAME))
    with contextlib.suppress(OSError):
        os.rmdir(directory)


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
            if size_of(partial_path(path, attempt)) == file.nbytes:
                continue
            if size_of(path) != file.nbytes or any(verify_file(directory, file)):
                return None  # what has the final name may be of another save, and of the same size
    return is_decided(directory, attempt), max(manifest.written_at for manifest, _ in manifests), manifests


def _discard(directory: str, attempt: str) -> bool:
    with whole_lock(directory, attempt) as is_mine:
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
