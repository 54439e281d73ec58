"""Locks on files (``flock``), held by the process that has taken one for as long as it lives and wants to."""

from __future__ import annotations

import errno
import fcntl
import os
import time

from datastates import system_calls
from datastates.system_calls import patiently

_TIMEOUT_SECONDS = 5.0  # a killed owner's locks vanish once the kernel has closed its files
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def try_lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Take the lock of an open file without waiting.

    Returns:
        True when it is held now, False when another has it, None when the file system has no locks.
    """

    def lock() -> bool:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        return patiently(lock)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise


def open_locked(path: str, flags: int, *, shared: bool = False, mode: int = 0o666) -> int:
    """Open a file and hold its lock, waiting some seconds for an owner that is just ending.

    Args:
        path: no symbolic link.
        flags: of ``open``.
        shared: others may hold the lock as well.
        mode: of a new file, before the umask.

    Raises:
        OSError: ``EBUSY`` when another process still owns it; whatever ``open`` raises.
    """
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        descriptor = patiently(os.open, path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            if try_lock(descriptor, shared=shared) is not False and leads_to(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, "another process owns it")
        time.sleep(system_calls.RETRY_SECONDS)


def leads_to(path: str, descriptor: int) -> bool:
    """Whether the path still leads to the open file: its last owner may have removed it under our hands."""
    try:
        return os.path.samestat(patiently(os.stat, path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
