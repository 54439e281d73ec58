"""Pins: a checkpoint that is pinned is never deleted, nor replaced by another of its step.

A pin is an empty file inside of the checkpoint's folder. Whoever makes one makes it whole, so any number of ranks and
processes may pin at the same time, and a copy of the checkpoint is pinned, too.
"""

from __future__ import annotations

import contextlib
import os

from datastates.directories import fsync_directory
from datastates.manifest import METADATA_NAME, PINNED_NAME
from datastates.system_calls import patiently, storage_errors


def is_pinned(directory: str) -> bool:
    """Whether the checkpoint in a folder is pinned."""
    return os.path.lexists(_pin_path(directory))


def pin(directory: str) -> None:
    """Pin a committed checkpoint, durably; idempotent. Raises StorageError."""
    path = _pin_path(directory)
    with storage_errors("pin", path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(patiently(os.open, path, flags, 0o666))
        fsync_directory(os.path.dirname(path))


def unpin(directory: str) -> None:
    """Take the pin away, durably; idempotent. Raises StorageError."""
    path = _pin_path(directory)
    with storage_errors("unpin", path):
        with contextlib.suppress(FileNotFoundError):
            patiently(os.unlink, path)
        fsync_directory(os.path.dirname(path))


def _pin_path(directory: str) -> str:
    return os.path.join(directory, METADATA_NAME, PINNED_NAME)
