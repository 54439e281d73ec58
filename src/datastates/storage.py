"""Files that appear whole or not at all.

A file is made under a partial name in its final directory, its space reserved, written at given positions,
cut to length, made durable and only then renamed. It is locked by the process that makes it, until it is published
or that process ends. A symbolic link in the place of a file to be written is never followed: one that has the final
name is replaced, one that has the partial name is refused. What is not promised: that a rename is atomic on storage
that copies instead, and anything about other names in the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator

from datastates.directories import fsync_directory, make_directories, make_names_durable
from datastates.errors import StorageError
from datastates.leftovers import remove_leftovers
from datastates.locks import leads_to, open_locked, try_lock
from datastates.partial_names import partial_path
from datastates.spares import take_spare
from datastates.system_calls import fsync, patiently, storage_errors, umask, write_all

_STAT_BLOCK_BYTES = 512  # of ``st_blocks``, whatever the file system's own blocks. Source: inode(7)

NEW_FILE_MODE = 0o666  # & ~umask, as other programs make files

_LARGE_BYTES = 64 << 20  # to free so much and more takes tens of milliseconds

_NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EBADF}


def temporary_path(path: str) -> str:
    """Where `write_atomically` makes a small file."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.tmp")


def write_atomically(path: str, data: bytes, writer: str = "") -> None:
    """Replace a small file durably: a reader sees the old bytes or the new ones.

    One writer at a time, unless each gives a name of its own: it becomes part of the temporary file's.
    """
    directory = os.path.dirname(path)
    temporary = temporary_path(path + writer)
    with storage_errors("write", path):
        mode = _mode_of(path)
        descriptor = _create_anew(temporary, NEW_FILE_MODE if mode is None else mode)
        try:
            try_lock(descriptor)  # until it has its name, so that nobody takes it for a leftover
            _set_mode(descriptor, mode)
            write_all(descriptor, data, 0)
            fsync(descriptor)
            patiently(os.replace, temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                patiently(os.unlink, temporary)
            raise
        finally:
            os.close(descriptor)
        fsync_directory(directory)


def _create_anew(path: str, mode: int) -> int:
    """Create a temporary file; what has its name (of a writer that died, or a link to elsewhere) is removed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return patiently(os.open, path, flags, mode)
    except FileExistsError:
        patiently(os.unlink, path)
    return patiently(os.open, path, flags, mode)


def publish(source: str, path: str) -> None:
    """Give a durable file its final name, durably. A symbolic link of that name is replaced, not followed.

    The space of a large file that had the name is given back on a thread of its own: that takes longer than the rest.
    """
    with storage_errors("publish", path):
        replaced = _open_large(path)
        try:
            patiently(os.replace, source, path)
            make_names_durable([path])
        finally:
            if replaced is not None:
                threading.Thread(target=os.close, args=(replaced,), name="release", daemon=True).start()


def _open_large(path: str) -> int | None:
    """Hold a file whose last name is about to go, so that its space stays taken; None where it is not worth it."""
    try:
        status = patiently(os.lstat, path)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size >= _LARGE_BYTES:
            return patiently(os.open, path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # then there is nothing to hold
        return None
    return None


def _mode_of(path: str) -> int | None:
    """The permissions of a file that is about to be overwritten, None where there is no such (ordinary) file."""
    try:
        mode = patiently(os.lstat, path).st_mode
    except FileNotFoundError:
        return None
    return stat.S_IMODE(mode) if stat.S_ISREG(mode) else None


def _mode_of_new_files() -> int | None:
    """None where the system does not tell."""
    mask = umask()
    return None if mask is None else NEW_FILE_MODE & ~mask


def _set_mode(descriptor: int, mode: int | None) -> None:
    """An overwritten file keeps its permissions; a new one has what ``open`` gave it (0666 & ~umask)."""
    if mode is not None and mode != stat.S_IMODE(os.fstat(descriptor).st_mode):
        patiently(os.fchmod, descriptor, mode)


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

        Direct I/O needs offset, length and memory aligned to `config.DIRECT_IO_BYTES`; a file's last slab is padded.
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
            patiently(os.ftruncate, self._descriptor, self.nbytes)
            fsync(self._descriptor)

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
                if leads_to(self.partial, self._descriptor):
                    patiently(os.unlink, self.partial)
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


def create_partial(
    path: str,
    attempt: str,
    nbytes: int,
    *,
    check_free: bool = True,
    keep: Callable[[str], bool] | None = None,
) -> PartialFile:
    """Begin a file: directories made, leftovers of dead owners removed, space reserved.

    Its space may be that of a removed checkpoint's file (see `spares`): then its old bytes are in it until each of them
    has been written.

    Args:
        path: the final path.
        attempt: goes into the partial name.
        nbytes: final size.
        check_free: refuse at once when the file system says that it has less room than that.
        keep: says of an attempt that its leftovers may still be needed.

    Raises:
        StorageError: with ``ENOSPC`` when there is no room, before any byte is written.
    """
    partial = partial_path(path, attempt)
    directory, name = os.path.split(path)
    with storage_errors("create", partial):
        make_directories(directory)
        remove_leftovers(directory, name, keep)
        mode = _mode_of(path)
        spare_mode = _mode_of_new_files() if mode is None else mode
        is_reused = spare_mode is not None and take_spare(path, partial, nbytes, spare_mode)
        descriptor = _open_direct(partial, os.O_RDWR | os.O_CREAT, NEW_FILE_MODE if mode is None else mode)
        try:
            try:
                patiently(os.ftruncate, descriptor, nbytes if is_reused else 0)
                _set_mode(descriptor, mode)
                _reserve(descriptor, partial, nbytes, check_free)
            except BaseException:
                patiently(os.unlink, partial)
                raise
        except BaseException:
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


def size_of(path: str) -> int | None:
    """The size of a file, None where there is none."""
    try:
        return patiently(os.stat, path).st_size
    except FileNotFoundError:
        return None


def _open_direct(path: str, flags: int, mode: int = 0o666) -> int:
    try:
        return open_locked(path, flags | os.O_DIRECT, mode=mode)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return open_locked(path, flags, mode=mode)


def _reserve(descriptor: int, path: str, nbytes: int, check_free: bool) -> None:
    status = patiently(os.fstatvfs, descriptor)
    free = status.f_bavail * status.f_frsize + os.fstat(descriptor).st_blocks * _STAT_BLOCK_BYTES
    message = f"no space for {path}: {nbytes} bytes needed, {free} free, {max(nbytes - free, 0)} missing"
    if check_free and status.f_blocks and free < nbytes:
        raise StorageError(message, errno.ENOSPC, path)
    if not nbytes:
        return
    try:
        patiently(os.posix_fallocate, descriptor, 0, nbytes)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StorageError(message, errno.ENOSPC, path) from error
        if error.errno == errno.EDQUOT:
            raise StorageError(
                f"the quota leaves no room for {path}: {nbytes} bytes needed", error.errno, path
            ) from error
        if error.errno not in _NO_PREALLOCATION:
            raise
