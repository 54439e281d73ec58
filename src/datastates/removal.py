"""Removing a whole checkpoint: it is there, or it is not, whenever the removal is cut.

The folder is renamed to a hidden name first, which no tool takes for a checkpoint, and then removed. Links are
never followed out of it. What a crash has left under a hidden name is removed by the next `finish_removals`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil

from datastates.attempt_folder import attempts, whole_lock
from datastates.directories import fsync_directory
from datastates.errors import StorageError
from datastates.manifest import commit_path
from datastates.spares import keep_spares
from datastates.system_calls import patiently, storage_errors

_SUFFIX = ".datastates.removed"


def remove_checkpoint(directory: str, *, spare: bool = False) -> None:
    """Remove a checkpoint's folder with all that is in it. Blocks until the files are gone.

    Args:
        directory: the checkpoint.
        spare: keep the space of its large files for the next saves to the folder that it is in, which then are faster
            (see `spares`). As much of the disk as one checkpoint takes stays in use until `spares.remove_spares`.

    Raises:
        StorageError: it is a link, or a living job still saves to it, or the file system refuses.
    """
    with contextlib.ExitStack() as locks:
        for attempt in attempts(directory):
            if not locks.enter_context(whole_lock(directory, attempt)):
                message = f"{directory} is being saved to by a living job; it is left alone"
                raise StorageError(message, errno.EBUSY, directory)
        remove_folder(directory, spare=spare)


def remove_folder(path: str, *, spare: bool = False) -> None:
    """Remove a folder of which nobody owns a part any more. Raises StorageError as `remove_checkpoint` does."""
    if os.path.islink(path):
        raise StorageError(f"{path} is a link; remove what it points to, or the link, by hand", errno.ENOTDIR, path)
    parent, name = os.path.split(os.path.abspath(path))
    hidden = os.path.join(parent, f".{name}{_SUFFIX}")
    with storage_errors("remove", path):
        _remove_tree(hidden)
        # where a rename copies file by file (object stores), what it leaves when it is cut must not look complete
        record = commit_path(path)
        with contextlib.suppress(FileNotFoundError):
            patiently(os.rename, record, record + _SUFFIX)
        try:
            patiently(os.rename, path, hidden)
        except OSError:
            with contextlib.suppress(FileNotFoundError):  # what is refused has changed nothing
                patiently(os.rename, record + _SUFFIX, record)
            raise
        fsync_directory(parent)
        if spare:
            keep_spares(hidden, parent)
        _remove_tree(hidden)


def finish_removals(parent: str) -> list[str]:
    """Remove what interrupted removals have left in a folder. Returns the paths of what they removed."""
    with storage_errors("clean", parent):
        names = [name for name in os.listdir(parent) if name.startswith(".") and name.endswith(_SUFFIX)]
        for name in names:
            _remove_tree(os.path.join(parent, name))
    return [os.path.join(parent, name[1 : -len(_SUFFIX)]) for name in names]


def _remove_tree(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
