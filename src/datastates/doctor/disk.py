"""What the disk under a folder can do, measured by a short write like that of a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from datastates.config import GIB, MAX_SLAB_BYTES, MIB
from datastates.doctor.findings import Finding, good, warning, wrong
from datastates.errors import StorageError
from datastates.figures import figure
from datastates.system_calls import fsync, patiently, storage_errors, write_all

MEASURED_BYTES = 1 * GIB
"""So much is written at most: enough to fill a disk's own cache of writes, and seconds even for a slow disk."""

MEASURED_SECONDS = 5.0
"""No write is begun after this time."""

_FEWEST_SLABS = 4
_SHARE_OF_FREE = 4  # a measurement takes at most this part of the free space


@dataclass(frozen=True, slots=True)
class DiskMeasurement:
    """One measured write.

    Attributes:
        nbytes: that were written and made durable.
        seconds: from the first write to the end of fsync.
        fsync_seconds: of that, the fsync.
        is_direct: whether the file system took direct I/O (``O_DIRECT``).
        free_nbytes: what the file system has room for.
    """

    directory: str
    nbytes: int
    seconds: float
    fsync_seconds: float
    is_direct: bool
    free_nbytes: int

    @property
    def nbytes_per_second(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9)


def measure_disk(
    directory: str,
    *,
    num_writers: int = 3,
    max_nbytes: int = MEASURED_BYTES,
    max_seconds: float = MEASURED_SECONDS,
) -> DiskMeasurement:
    """Write, with fsync, as a checkpoint is written: slabs of 16 MiB, direct where possible, several at once.

    The file has no name while it is written (where that is not possible, it loses its name before the first
    byte), so nothing of it stays, even if this process is killed. Blocks for about ``max_seconds`` and the fsync.

    Args:
        directory: where; it must be there.
        num_writers: writes in flight.
        max_nbytes: the most to write; at most a quarter of the free space is taken anyway.
        max_seconds: no write begins after that.

    Raises:
        StorageError: the folder is not there or cannot be written, or has less room than four slabs.
    """
    with storage_errors("measure", directory):
        status = patiently(os.statvfs, directory)
        free = status.f_bavail * status.f_frsize
        num_slabs = min(max_nbytes, free // _SHARE_OF_FREE) // MAX_SLAB_BYTES
        if num_slabs < _FEWEST_SLABS:
            message = f"{directory}: {free // MIB} MiB are free, too few for a measurement"
            raise StorageError(message, errno.ENOSPC, directory)
        descriptor = _open_nameless(directory)
        try:
            nbytes, seconds, fsync_seconds, is_direct = _write(descriptor, num_slabs, num_writers, max_seconds)
        finally:
            os.close(descriptor)
    return DiskMeasurement(directory, nbytes, seconds, fsync_seconds, is_direct, free)


def disk_findings(measured: DiskMeasurement) -> Iterator[Finding]:
    """What a measurement says about the folder."""
    rate = measured.nbytes_per_second / GIB
    how = "direct" if measured.is_direct else "buffered"
    message = f"{measured.directory}: {rate:.2f} GiB/s durable ({measured.nbytes / GIB:.2g} GiB, {how}, with fsync)"
    if measured.is_direct:
        yield good("disk", message)
    else:
        advice = "expect writes to pass through the page cache; a local or parallel file system avoids that"
        yield warning("disk", f"{message}; this file system refuses O_DIRECT", advice)


def room_findings(measured: DiskMeasurement, node_nbytes: int) -> Iterator[Finding]:
    """Whether checkpoints of this many bytes find room: two, since the older one stays until the younger is durable."""
    free, what = measured.free_nbytes, f"{figure(measured.free_nbytes / GIB)} GiB free"
    size = f"{figure(node_nbytes / GIB)} GiB"
    if free < node_nbytes:
        yield wrong("room", f"{what}, one checkpoint takes {size}", "make room, or save elsewhere")
    elif free < 2 * node_nbytes:
        message = f"{what}, room for one checkpoint of {size} only"
        yield warning("room", message, "make room for two: the older one stays until the younger is durable")
    else:
        yield good("room", f"{what}, room for {free // max(node_nbytes, 1)} checkpoints of {size}")


def _open_nameless(directory: str) -> int:
    """A file without a name, in whatever way the file system allows. Source: open(2), O_TMPFILE."""
    for direct in (os.O_DIRECT, 0):
        try:
            return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC | direct, 0o600)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                raise
    path = os.path.join(directory, f".datastates-doctor-{os.getpid()}-{time.monotonic_ns()}")
    try:
        return _open_and_unlink(path, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return _open_and_unlink(path, 0)


def _open_and_unlink(path: str, direct: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # Linux makes the file before it refuses O_DIRECT
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct, 0o600)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _write(descriptor: int, num_slabs: int, num_writers: int, max_seconds: float) -> tuple[int, float, float, bool]:
    """Bytes written, seconds, seconds of them for fsync, and whether it was direct."""
    slab = memoryview(mmap.mmap(-1, MAX_SLAB_BYTES))  # direct I/O needs memory that begins with a page
    slab[:] = os.urandom(MIB) * (MAX_SLAB_BYTES // MIB)  # what can be compressed would flatter some file systems
    _reserve(descriptor, num_slabs * MAX_SLAB_BYTES)
    is_direct = _settle_mode(descriptor, slab[:MIB])
    begin = time.perf_counter()

    def write(index: int) -> int:
        if time.perf_counter() - begin > max_seconds:
            return 0
        write_all(descriptor, slab, index * MAX_SLAB_BYTES)
        return MAX_SLAB_BYTES

    with ThreadPoolExecutor(num_writers, "datastates-doctor") as writers:
        nbytes = sum(writers.map(write, range(num_slabs)))
    written = time.perf_counter()
    fsync(descriptor)
    end = time.perf_counter()
    return nbytes, end - begin, end - written, is_direct


def _reserve(descriptor: int, nbytes: int) -> None:
    try:
        patiently(os.posix_fallocate, descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _settle_mode(descriptor: int, view: memoryview) -> bool:
    """Whether direct writes work; switches to buffered ones where the first is refused."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    try:
        write_all(descriptor, view, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return False
    return True
