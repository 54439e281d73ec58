"""Folders of checkpoints that get their names when they are whole.

A framework writes some files of a checkpoint by itself, and resumes from the folder with the highest number, whatever
is in it. So checkpoint ``N`` is made in ``.checkpoint-N.datastates.saving/checkpoint-N`` and moved into its place once
all its files are durable: the framework's own ones first, then those that are saved lazily, the commit record last.
What a crash leaves under the hidden name can be completed where that record is there, or can still be made.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator

from datastates import recovery
from datastates.deadline import Deadline
from datastates.directories import fsync_directory, make_directories
from datastates.locks import open_locked, try_lock
from datastates.manifest import read_commit
from datastates.partial_names import partial_attempt
from datastates.removal import finish_removals, remove_folder
from datastates.system_calls import fsync, patiently, storage_errors

logger = logging.getLogger(__name__)

OWNER_SECONDS = 30.0
"""So long a start waits for the flusher of a job that was killed: it finishes what it has, then ends."""

_POLL_SECONDS = 0.05
_SUFFIX = ".datastates.saving"
_LOCK_NAME = "lock"


class SavingFolder:
    """The hidden folder of one checkpoint in the making, locked by the process that makes it.

    Attributes:
        root: the hidden folder.
        path: the checkpoint's folder in it.
        target: where the checkpoint will be.
    """

    def __init__(self, directory: str, name: str) -> None:
        """Nothing is made yet.

        Args:
            directory: holds the checkpoints; absolute, without links.
            name: of the checkpoint's folder.
        """
        self.root = os.path.join(directory, f".{name}{_SUFFIX}")
        self.path = os.path.join(self.root, name)
        self.target = os.path.join(directory, name)
        self._lock = -1

    def make(self) -> None:
        """Make it, empty, and own it. Raises StorageError: it cannot be made, or another process owns it."""
        with storage_errors("make", self.root):
            make_directories(self.root)
            self._lock = open_locked(os.path.join(self.root, _LOCK_NAME), os.O_RDWR | os.O_CREAT)
            if os.path.lexists(self.path):
                shutil.rmtree(self.path)  # of an interrupted job
            make_directories(self.path)

    def make_durable(self) -> None:
        """Make all files durable that are not lazy: those of the framework, of all ranks."""
        with storage_errors("make durable", self.path):
            for parent, folders, names in os.walk(self.path):
                folders[:] = [name for name in folders if not name.startswith(".")]
                for name in names:
                    if partial_attempt(name) is None:
                        _make_file_durable(os.path.join(parent, name))
                fsync_directory(parent)

    def publish(self) -> None:
        """Put the checkpoint, which is complete, into its place, and in that of one that is there."""
        with storage_errors("publish", self.target):
            if os.path.lexists(self.target):
                remove_folder(self.target)
            patiently(os.rename, self.path, self.target)
            fsync_directory(os.path.dirname(self.target))
        self.discard()

    def discard(self) -> None:
        """Remove what there is of the hidden folder, and give it up. Waits for the flusher if it still makes files."""
        deadline = Deadline(OWNER_SECONDS)
        with storage_errors("remove", self.root):
            while os.path.lexists(self.root):
                try:
                    shutil.rmtree(self.root)
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or not deadline.left():
                        raise
                    time.sleep(_POLL_SECONDS)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def complete_interrupted(directory: str, prefix: str, timeout: float = OWNER_SECONDS) -> None:
    """Put the checkpoints into their places that an interrupted job has left durable; remove what is not complete.

    Blocks: a flusher process that has outlived its trainer may still be at work, and is waited for. What a living job
    is making is left alone.

    Args:
        directory: holds the checkpoints; there need not be one.
        prefix: of the checkpoints' names.
        timeout: seconds to wait for such processes, all in all.

    Raises:
        StorageError: the file system refuses.
    """
    if not os.path.isdir(directory):
        return
    directory, deadline = os.path.realpath(directory), Deadline(timeout)
    for entry in sorted(os.listdir(directory)):
        if entry.startswith(f".{prefix}") and entry.endswith(_SUFFIX):
            _complete(SavingFolder(directory, entry[1 : -len(_SUFFIX)]), deadline)
    finish_removals(directory)


def _complete(folder: SavingFolder, deadline: Deadline) -> None:
    with _owned(os.path.join(folder.root, _LOCK_NAME)) as is_mine:
        if not is_mine:
            logger.info("%s: a living process is saving there, it is left alone", folder.root)
            return
        while _is_at_work(folder.path):
            if not deadline.left():
                logger.warning("%s: a process of an earlier run is still at work there, it is left alone", folder.root)
                return
            time.sleep(_POLL_SECONDS)
        if os.path.isdir(folder.path) and read_commit(folder.path) is not None:
            folder.publish()
            logger.info("%s: completed, an interrupted run had left it so", folder.target)
        elif os.path.isdir(folder.path):
            folder.discard()
            logger.warning("%s was never completed, what there was of it is removed", folder.target)
        else:  # nothing was saved yet, or it has its name
            folder.discard()


def _is_at_work(path: str) -> bool:
    """Whether a flusher process still makes files there. Completes the checkpoint where only the last steps lack."""
    if not os.path.isdir(path):
        return False
    if recovery.recover(path) is recovery.Recovery.OWNED:
        return True
    return any(partial_attempt(name) is not None for _, _, names in os.walk(path) for name in names)


@contextlib.contextmanager
def _owned(path: str) -> Iterator[bool]:
    """Hold a lock file's lock, if nobody else does; where there is no such file nobody owns it."""
    try:
        descriptor = patiently(os.open, path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True
        return
    try:
        yield try_lock(descriptor) is not False
    finally:
        os.close(descriptor)


def _make_file_durable(path: str) -> None:
    descriptor = patiently(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)
