"""Paths that a state can be saved to."""

from __future__ import annotations

import errno
import os
import stat

from datastates.errors import StorageError

MAX_PATH_BYTES = 4096
"""Source: PATH_MAX of limits.h on Linux."""


def resolved(path: str | os.PathLike[str]) -> str:
    """The one absolute name of a file: its folder without symbolic links, its own name as it is.

    Raises:
        ValueError: no file can have the name.
    """
    text = os.fspath(path)
    try:
        if b"\0" in os.fsencode(text):
            raise ValueError("it holds a NUL")
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be a path: {error}") from error
    directory, name = os.path.split(os.path.abspath(text) if not text.endswith(os.sep) else text)
    return os.path.join(os.path.realpath(directory), name) if name else os.path.realpath(directory)


def check_target(path: str) -> None:
    """Refuse to replace what is no file. Raises StorageError."""
    if len(os.fsencode(path)) >= MAX_PATH_BYTES:
        raise StorageError(f"{path[:100]}...: longer than {MAX_PATH_BYTES} bytes", errno.ENAMETOOLONG, path)
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # not there, or not reachable: the flusher says so when it makes the file
    if not stat.S_ISREG(mode):
        kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise StorageError(f"{path} is no regular file and is not replaced by one", kind, path)
