"""Files that appear whole or not at all.

A file is made under a partial name in its final directory, its space reserved, written at given positions,
cut to length, made durable and only then renamed. Every system call that the flusher makes on storage is made
here or in `recovery`.

Calls that were only interrupted, or met a stale handle of a network file system, are made again for a third of
a second (`patiently`). A symbolic link in the place of a file to be written is never followed: one that has the
final name is replaced, one that has the partial name is refused.

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
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

from datastates.errors import StorageError

BLOCK_BYTES = 4096
"""Alignment of direct I/O: a multiple of every logical block size in use (512 and 4096)."""

_LOCK_TIMEOUT_SECONDS = 5.0  # a killed owner's locks vanish once the kernel has closed its files
_RETRY_SECONDS = 0.01
_TRIES = 6  # with _RETRY_SECONDS doubled each time: a third of a second in all
_DIRECTORY_TRIES = 20  # with _RETRY_SECONDS doubled up to 0.5 s: a directory made by another host shows up
_PARTIAL_NAME = re.compile(r"\.(?P<name>.+)\.(?P<attempt>[A-Za-z0-9_-]+)\.datastates\.partial", re.DOTALL)
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PARTIAL_SUFFIX = ".datastates.partial"
_NAME_BYTES = 255 - len("..") - 64 - len(_PARTIAL_SUFFIX)  # a name has 255 bytes, an attempt at most 64
_TRANSIENT = {errno.EINTR, errno.EAGAIN, errno.ESTALE}
_HINTS = {
    errno.EMFILE: "; each file of a checkpoint stays open until it is committed: raise the limit (ulimit -n)",
    errno.EFBIG: "; the limit on the size of a file is too low (ulimit -f), or the file system allows no such size",
    errno.ELOOP: "; a symbolic link stands in its place: remove it",
}
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
        reason = (error.strerror or str(error)) + _HINTS.get(error.errno or 0, "")
        raise StorageError(f"cannot {action} {path}: {reason}", error.errno, path) from error


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def patiently(call: Callable[Parameters, Result], *arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
    """Make a system call, and again a few times while it fails with ``EINTR``, ``EAGAIN`` or ``ESTALE``.

    Python itself repeats a call that a signal interrupted; network and FUSE file systems interrupt calls without one.
    """
    delay = _RETRY_SECONDS
    for _ in range(_TRIES - 1):
        try:
            return call(*arguments, **options)
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
        time.sleep(delay)
        delay *= 2
    return call(*arguments, **options)


def is_attempt(text: str) -> bool:
    """Whether the text can be an attempt's id: letters, digits, ``_`` and ``-``, at most 64."""
    return _ATTEMPT.fullmatch(text) is not None


def partial_path(path: str, attempt: str) -> str:
    """Where the file is made: a dot-name beside it, so that no pattern for final names finds it."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{_shortened(name)}.{attempt}{_PARTIAL_SUFFIX}")


def _shortened(name: str) -> str:
    """The name, or where a partial name would get too long its beginning and its CRC-32."""
    data = os.fsencode(name)
    if len(data) <= _NAME_BYTES:
        return name
    end = f"~{zlib.crc32(data):08x}"
    return data[: _NAME_BYTES - len(end)].decode("utf-8", "ignore") + end


def partial_attempt(name: str) -> str | None:
    """The attempt in the base name of a partial file, None for any other name."""
    match = _PARTIAL_NAME.fullmatch(name)
    return match["attempt"] if match else None


def fsync(descriptor: int) -> None:
    """Wait until the device has a file; again only when interrupted.

    Any other error is final: the kernel tells of a lost write once, and the next call would succeed.
    """
    for _ in range(_TRIES - 1):
        with contextlib.suppress(InterruptedError):
            return os.fsync(descriptor)
    return os.fsync(descriptor)


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
    delay = _RETRY_SECONDS
    for attempt in range(_DIRECTORY_TRIES):
        try:
            _make_directories(path, made)
            break
        except OSError as error:
            is_last = attempt == _DIRECTORY_TRIES - 1
            found = error.filename or path  # the folder that could not be made: it, or one above it, may be a file
            is_file = error.errno == errno.EEXIST and os.path.lexists(found) and not os.path.isdir(found)
            if error.errno not in (errno.EEXIST, errno.ENOENT, *_TRANSIENT) or is_file or is_last:
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
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    while True:
        descriptor = patiently(os.open, path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
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
        return os.path.samestat(patiently(os.stat, path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove_orphan(path: str) -> bool:
    """Remove a partial file whose owner is gone. Returns whether it was removed."""
    try:
        descriptor = patiently(os.open, path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR):
            return False  # gone meanwhile, somebody else's, or no partial file at all
        raise
    try:
        if not try_lock(descriptor) or not _names(path, descriptor):
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
        match = _PARTIAL_NAME.fullmatch(entry)
        if not match or (name is not None and _shortened(name) != match["name"]):
            continue
        path = os.path.join(directory, entry)
        if (keep is None or not keep(match["attempt"])) and remove_orphan(path):
            removed.append(path)
    return removed


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


def temporary_path(path: str) -> str:
    """Where `write_atomically` makes a small file."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.tmp")


def write_atomically(path: str, data: bytes) -> None:
    """Replace a small file durably: a reader sees the old bytes or the new ones. One writer at a time."""
    directory = os.path.dirname(path)
    temporary = temporary_path(path)
    with storage_errors("write", path):
        mode = _mode_of(path)
        descriptor = _create_anew(temporary, 0o666 if mode is None else mode)
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
    """Give a durable file its final name, durably. A symbolic link of that name is replaced, not followed."""
    with storage_errors("publish", path):
        patiently(os.replace, source, path)
        make_names_durable([path])


def _mode_of(path: str) -> int | None:
    """The permissions of a file that is about to be overwritten, None where there is no such (ordinary) file."""
    try:
        mode = patiently(os.lstat, path).st_mode
    except FileNotFoundError:
        return None
    return stat.S_IMODE(mode) if stat.S_ISREG(mode) else None


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
                if _names(self.partial, self._descriptor):
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
        descriptor = _open_direct(partial, os.O_RDWR | os.O_CREAT, 0o666 if mode is None else mode)
        try:
            try:
                patiently(os.ftruncate, descriptor, 0)
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


def _open_direct(path: str, flags: int, mode: int = 0o666) -> int:
    try:
        return open_locked(path, flags | os.O_DIRECT, mode=mode)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return open_locked(path, flags, mode=mode)


def _reserve(descriptor: int, path: str, nbytes: int, check_free: bool) -> None:
    status = patiently(os.fstatvfs, descriptor)
    free = status.f_bavail * status.f_frsize
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
