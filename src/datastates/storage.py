"""Files that appear whole or not at all.

A file is made under a partial name in its final directory, its space reserved, written at given positions,
cut to length, made durable and only then renamed. Every system call that the flusher makes on storage is made
here or in `recovery`.

A partial file is locked (``flock``) by the process that makes it, for as long as that process lives: a
leftover of which the lock can be taken belongs to nobody. Where a file system knows no locks, nothing is ever
taken for a leftover. What is not promised: that a rename is atomic on storage that copies instead, and
anything about other names in the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator

from datastates.errors import StorageError

BLOCK_BYTES = 4096
"""Alignment of direct I/O: a multiple of every logical block size in use (512 and 4096)."""

_LOCK_TIMEOUT_SECONDS = 5.0  # a killed owner's locks vanish once the kernel has closed its files
_RETRY_SECONDS = 0.01
_DIRECTORY_TRIES = 20  # with _RETRY_SECONDS doubled up to 0.5 s: a directory made by another host shows up
_PARTIAL_NAME = re.compile(r"\.(?P<name>.+)\.(?P<attempt>[A-Za-z0-9_-]+)\.datastates\.partial", re.DOTALL)
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EBADF}


@contextlib.contextmanager
def storage_errors(action: str, path: str) -> Iterator[None]:
    """Turn an `OSError` of the body into a `StorageError` that says what was done to which path."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot {action} {path}: {reason}", error.errno, path) from error


def is_attempt(text: str) -> bool:
    """Whether the text can be an attempt's id: letters, digits, ``_`` and ``-``, at most 64."""
    return _ATTEMPT.fullmatch(text) is not None


def partial_path(path: str, attempt: str) -> str:
    """Where the file is made: a dot-name beside it, so that no pattern for final names finds it."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{attempt}.datastates.partial")


def partial_attempt(name: str) -> str | None:
    """The attempt in the base name of a partial file, None for any other name."""
    match = _PARTIAL_NAME.fullmatch(name)
    return match["attempt"] if match else None


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable. A file system that refuses to (EINVAL) needs no such call."""
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def make_directories(path: str) -> None:
    """Make a directory and its missing parents durably, with the modes that the umask asks for.

    Other processes and hosts may do the same at the same time; what they made may not be visible here yet
    (``EEXIST`` for a directory that cannot be seen, ``ESTALE``), so those are tried again for some seconds.
    """
    delay = _RETRY_SECONDS
    for attempt in range(_DIRECTORY_TRIES):
        try:
            return _make_directories(path)
        except OSError as error:
            is_last = attempt == _DIRECTORY_TRIES - 1
            is_file = error.errno == errno.EEXIST and os.path.lexists(path) and not os.path.isdir(path)
            if error.errno not in (errno.EEXIST, errno.ESTALE, errno.ENOENT) or is_file or is_last:
                raise
        time.sleep(delay)
        delay = min(2 * delay, 0.5)
    return None


def _make_directories(path: str) -> None:
    if not path or os.path.isdir(path):
        return
    parent = os.path.dirname(path.rstrip(os.sep))
    _make_directories(parent)
    try:
        os.mkdir(path, 0o777)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    fsync_directory(parent)


def try_lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Take the lock of an open file without waiting.

    Returns:
        True when it is held now, False when another has it, None when the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def open_locked(path: str, flags: int, *, shared: bool = False) -> int:
    """Open a file and hold its lock, waiting some seconds for an owner that is just ending.

    Raises:
        OSError: ``EBUSY`` when another process still owns it; whatever ``open`` raises.
    """
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    while True:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            if try_lock(descriptor, shared=shared) is not False and _names(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, "another process owns it")
        time.sleep(_RETRY_SECONDS)


def _names(path: str, descriptor: int) -> bool:
    """Whether the path still leads to the open file: its last owner may have removed it under our hands."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove_orphan(path: str) -> bool:
    """Remove a partial file whose owner is gone. Returns whether it was removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        if not try_lock(descriptor) or not _names(path, descriptor):
            return False
        os.unlink(path)
        return True
    finally:
        os.close(descriptor)


def remove_leftovers(directory: str, name: str | None = None) -> list[str]:
    """Remove partial files of dead owners from one directory.

    Args:
        directory: where to look; its sub-directories are not entered.
        name: only leftovers of this final name; all when None.

    Returns:
        The paths removed.
    """
    removed = []
    for entry in os.listdir(directory):
        match = _PARTIAL_NAME.fullmatch(entry)
        if match and name in (None, match["name"]):
            path = os.path.join(directory, entry)
            if remove_orphan(path):
                removed.append(path)
    return removed


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at the given offset, however few each call takes.

    Raises:
        OSError: whatever the system says; ``EIO`` when a call makes no progress.
    """
    view = memoryview(data)
    while view.nbytes:
        try:
            written = os.pwrite(descriptor, view, offset)
        except (InterruptedError, BlockingIOError):
            time.sleep(_RETRY_SECONDS)
            continue
        if written <= 0:
            raise OSError(errno.EIO, f"a write of {view.nbytes} bytes at {offset} made no progress")
        view = view[written:]
        offset += written


def write_atomically(path: str, data: bytes) -> None:
    """Replace a small file durably: a reader sees the old bytes or the new ones. One writer at a time."""
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.tmp")
    with storage_errors("write", path):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            try:
                _keep_mode(path, descriptor)
                write_all(descriptor, data, 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        fsync_directory(directory)


def publish(source: str, path: str) -> None:
    """Give a durable file its final name, durably."""
    with storage_errors("publish", path):
        os.replace(source, path)
        fsync_directory(os.path.dirname(path))


def _keep_mode(path: str, descriptor: int) -> None:
    """An overwritten file keeps its permissions; a new one has what ``open`` gave it (0666 & ~umask)."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    if mode != stat.S_IMODE(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, mode)


class PartialFile:
    """A file being made under its partial name, locked by this process.

    `write` may be called by several threads at once. Direct I/O is used where file system, positions and
    memory allow it, buffered I/O otherwise; the first refusal (``EINVAL``) decides for the whole file.
    """

    def __init__(self, path: str, partial: str, nbytes: int, descriptor: int) -> None:
        self.path = path
        self.partial = partial
        self.nbytes = nbytes
        self.is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        self._descriptor = descriptor

    def write(self, view: memoryview, offset: int) -> None:
        """Write all bytes; on return they are in the file, though not durable.

        Direct I/O needs offset, length and memory aligned to `BLOCK_BYTES`; a file's last slab is padded.
        """
        with storage_errors(f"write {view.nbytes} bytes at {offset} to", self.partial):
            was_direct = self.is_direct
            try:
                write_all(self._descriptor, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._use_buffered()
                write_all(self._descriptor, view, offset)

    def make_durable(self) -> None:
        """Cut the file to its length and wait until the device has it."""
        with storage_errors("make durable", self.partial):
            os.ftruncate(self._descriptor, self.nbytes)
            os.fsync(self._descriptor)

    def publish(self) -> None:
        """Give the durable file its final name, durably, and let go of it."""
        publish(self.partial, self.path)
        self.close()

    def remove(self) -> None:
        """Give the file up; where it was published meanwhile, only let go of it. Idempotent."""
        if self._descriptor < 0:
            return
        try:
            with storage_errors("remove", self.partial), contextlib.suppress(FileNotFoundError):
                if _names(self.partial, self._descriptor):
                    os.unlink(self.partial)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the file and its lock; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _use_buffered(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.is_direct = False


def create_partial(path: str, attempt: str, nbytes: int, *, check_free: bool = True) -> PartialFile:
    """Begin a file: directories made, leftovers of dead owners removed, space reserved.

    Args:
        path: the final path.
        attempt: goes into the partial name.
        nbytes: final size.
        check_free: refuse at once when the file system says that it has less room than that.

    Raises:
        StorageError: with ``ENOSPC`` when there is no room, before any byte is written.
    """
    partial = partial_path(path, attempt)
    directory, name = os.path.split(path)
    with storage_errors("create", partial):
        make_directories(directory)
        remove_leftovers(directory, name)
        descriptor = _open_direct(partial, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(descriptor, 0)
            _keep_mode(path, descriptor)
            _reserve(descriptor, partial, nbytes, check_free)
        except BaseException:
            os.unlink(partial)
            os.close(descriptor)
            raise
    return PartialFile(path, partial, nbytes, descriptor)


def reopen_partial(path: str, attempt: str, nbytes: int) -> PartialFile:
    """Take over the partial file of a process that died. Its bytes are left as they are."""
    partial = partial_path(path, attempt)
    with storage_errors("open again", partial):
        return PartialFile(path, partial, nbytes, _open_direct(partial, os.O_RDWR))


def read_chunks(path: str, begin: int, end: int, chunk_bytes: int) -> Iterator[memoryview]:
    """The bytes ``[begin, end)`` of a file, at most ``chunk_bytes`` at a time, each valid until the next.

    Raises:
        StorageError: the file cannot be read, or ends before ``end``.
    """
    buffer = memoryview(bytearray(min(chunk_bytes, end - begin)))
    with storage_errors("read", path), open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while begin < end:
            count = file.readinto(buffer[: end - begin])
            if not count:
                raise StorageError(f"{path} ends at {begin}, expected {end} bytes", errno.EIO, path)
            yield buffer[:count]
            begin += count


def _open_direct(path: str, flags: int) -> int:
    try:
        return open_locked(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return open_locked(path, flags)


def _reserve(descriptor: int, path: str, nbytes: int, check_free: bool) -> None:
    status = os.fstatvfs(descriptor)
    free = status.f_bavail * status.f_frsize
    message = f"no space for {path}: {nbytes} bytes needed, {free} free"
    if check_free and status.f_blocks and free < nbytes:
        raise StorageError(message, errno.ENOSPC, path)
    if not nbytes:
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StorageError(message, errno.ENOSPC, path) from error
        if error.errno not in _NO_PREALLOCATION:
            raise
