"""Directories made so that they, and the names in them, survive a loss of power."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable

from datastates import system_calls
from datastates.system_calls import TRANSIENT, fsync, patiently

_TRIES = 20  # with RETRY_SECONDS doubled up to 0.5 s: a directory made by another host shows up


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable. A file system that refuses to (EINVAL) needs no such call."""
    descriptor = patiently(os.open, path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def make_names_durable(paths: Iterable[str], top: str = "") -> None:
    """Make the names of files or directories durable, and those of all directories that they lie in.

    Whoever made those directories may not have done so: another rank, or the trainer.

    Args:
        paths: absolute.
        top: the last directory whose names are made durable; by default the root of its file system, or the
            first on the way there that may not be read.
    """
    done: set[str] = set()
    for path in paths:
        parent = os.path.dirname(path)
        while parent not in done:
            try:
                fsync_directory(parent)
            except PermissionError:
                if parent == os.path.dirname(path):
                    raise
                break
            done.add(parent)
            if parent == top or os.path.ismount(parent):
                break
            parent = os.path.dirname(parent)


def make_directories(path: str) -> None:
    """Make a directory and its missing parents durably, with the modes that the umask asks for.

    Other processes and hosts may do the same at the same time; what they made may not be visible here yet
    (``EEXIST`` for a directory that cannot be seen, ``ESTALE``), so those are tried again for some seconds.
    """
    made: list[str] = []
    delay = system_calls.RETRY_SECONDS
    for attempt in range(_TRIES):
        try:
            _make_directories(path, made)
            break
        except OSError as error:
            is_last = attempt == _TRIES - 1
            found = error.filename or path  # the folder that could not be made: it, or one above it, may be a file
            is_file = error.errno == errno.EEXIST and os.path.lexists(found) and not os.path.isdir(found)
            if error.errno not in (errno.EEXIST, errno.ENOENT, *TRANSIENT) or is_file or is_last:
                raise
        time.sleep(delay)
        delay = min(2 * delay, 0.5)
    for directory in made:
        fsync_directory(os.path.dirname(directory))


def _make_directories(path: str, made: list[str]) -> None:
    path = path.rstrip(os.sep)
    if not path or os.path.isdir(path):
        return
    _make_directories(os.path.dirname(path), made)
    try:
        os.mkdir(path, 0o777)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    else:
        made.append(path)
