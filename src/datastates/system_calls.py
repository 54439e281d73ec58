"""Single calls on storage, made again for a third of a second while they are only interrupted.

Interrupted is also a call that met a stale handle of a network file system. What fails for good is told with what was
done to which path (`storage_errors`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from datastates.errors import StorageError

RETRY_SECONDS = 0.01
"""So long a call that is made again waits at first; longer each time."""

TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN, errno.ESTALE})
"""Errors that the next try may not meet."""

_TRIES = 6  # with RETRY_SECONDS doubled each time: a third of a second in all

_HINTS = {
    errno.EMFILE: "; each file of a checkpoint stays open until it is committed: raise the limit (ulimit -n)",
    errno.EFBIG: "; the limit on the size of a file is too low (ulimit -f), or the file system allows no such size",
    errno.ELOOP: "; a symbolic link stands in its place: remove it",
}


@contextlib.contextmanager
def storage_errors(action: str, path: str) -> Iterator[None]:
    """Turn an `OSError` of the body into a `StorageError` that says what was done to which path."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = (error.strerror or str(error)) + _HINTS.get(error.errno or 0, "")
        raise StorageError(f"cannot {action} {path}: {reason}", error.errno, path) from error


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def patiently(call: Callable[Parameters, Result], *arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
    """Make a system call, and again a few times while it fails with ``EINTR``, ``EAGAIN`` or ``ESTALE``.

    Python itself repeats a call that a signal interrupted; network and FUSE file systems interrupt calls without one.
    """
    delay = RETRY_SECONDS
    for _ in range(_TRIES - 1):
        try:
            return call(*arguments, **options)
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
        time.sleep(delay)
        delay *= 2
    return call(*arguments, **options)


def fsync(descriptor: int) -> None:
    """Wait until the device has a file; again only when interrupted.

    Any other error is final: the kernel tells of a lost write once, and the next call would succeed.
    """
    for _ in range(_TRIES - 1):
        with contextlib.suppress(InterruptedError):
            return os.fsync(descriptor)
    return os.fsync(descriptor)


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at the given offset, however few each call takes.

    Raises:
        OSError: whatever the system says; ``EIO`` when a call makes no progress.
    """
    view = memoryview(data)
    while view.nbytes:
        written = patiently(os.pwrite, descriptor, view, offset)
        if written <= 0:
            raise OSError(errno.EIO, f"a write of {view.nbytes} bytes at {offset} made no progress")
        view = view[written:]
        offset += written


def umask() -> int | None:
    """The bits that new files of this process do not get; None where the system does not tell.

    ``os.umask`` tells only by setting another, which a thread that makes a file at that moment would see.
    Source: proc_pid_status(5), since Linux 4.7.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), None)
    except OSError:
        return None
