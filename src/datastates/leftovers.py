"""Partial files whose owner is gone: a file belongs to nobody when its lock can be taken.

Where a file system knows no locks, nothing is ever taken for a leftover.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from datastates.locks import leads_to, try_lock
from datastates.partial_names import partial_attempt, partial_path
from datastates.system_calls import patiently


def remove_orphan(path: str) -> bool:
    """Remove a partial file whose owner is gone. Returns whether it was removed."""
    try:
        descriptor = patiently(os.open, path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR):
            return False  # gone meanwhile, somebody else's, or no partial file at all
        raise
    try:
        if not try_lock(descriptor) or not leads_to(path, descriptor):
            return False
        patiently(os.unlink, path)
        return True
    finally:
        os.close(descriptor)


def remove_leftovers(directory: str, name: str | None = None, keep: Callable[[str], bool] | None = None) -> list[str]:
    """Remove partial files of dead owners from one directory.

    Args:
        directory: where to look; its sub-directories are not entered.
        name: only leftovers of this final name; all when None.
        keep: says of an attempt that its files are not to be touched here.

    Returns:
        The paths removed.
    """
    removed = []
    for entry in patiently(os.listdir, directory):
        attempt = partial_attempt(entry)
        if attempt is None or (name is not None and entry != partial_path(name, attempt)):
            continue
        path = os.path.join(directory, entry)
        if (keep is None or not keep(attempt)) and remove_orphan(path):
            removed.append(path)
    return removed
