"""Reads the bytes of one file: a few large positional reads at a time, directly where that pays, never mapped.

What lies in the page cache is copied from there; the rest is read past it (``O_DIRECT``) where the file system
allows that, so that a large checkpoint neither waits for the page cache nor evicts it. Mapped files would be read
page by page, are refused by some file systems, and turn an error of the device into a signal.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from datastates.checksum import crc32, crc32_combine
from datastates.config import DIRECT_IO_BYTES
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from datastates.page_cache import cached_nbytes
from datastates.system_calls import patiently, storage_errors

TILE_BYTES = 4 << 20
"""So much is read by one call. With `NUM_THREADS` of them a virtual disk of 2.7 GB/s is read at 2.6 GB/s into
memory that nobody has touched; one call of 16 MiB at a time reaches 1.1 GB/s there (docs/loading.md)."""

NUM_THREADS = 8
"""So many reads are under way at a time; they wait for the device most of the time, also where there are few cores."""

_HUGE_PAGE_BYTES = 2 << 20
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})

Item = TypeVar("Item")
Sink = Callable[[memoryview], None]
Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call, by one thread at a time."""


def page_floor(offset: int) -> int:
    """The last multiple of a page that is not above ``offset``."""
    return offset - offset % DIRECT_IO_BYTES


def page_ceil(offset: int) -> int:
    """The first multiple of a page that is not below ``offset``."""
    return offset + -offset % DIRECT_IO_BYTES


def fresh_memory(nbytes: int) -> mmap.mmap:
    """Anonymous, page-aligned, zero-filled memory that costs nothing before it is touched.

    Large pages are asked for: touching memory by 4 KiB takes longer than reading it from a fast disk.
    It goes back to the system when the last view of it does.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE_BYTES:
        _ask_for_huge_pages(memory)
    return memory


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without large pages
            raise


@dataclass(frozen=True, slots=True)
class Tile:
    """One range of a file that is read by one call.

    Attributes:
        begin: first byte wanted.
        end: end of what is wanted; at most `TILE_BYTES` after ``begin``, except for tiles with memory.
        memory: where the bytes go: covers whole pages of the file, from `page_floor` of ``begin`` to `page_ceil`
            of ``end``. None: a buffer of the reading thread, which the sinks see.
        sinks: ``(begin, end, sink)``: the sink gets a view of these bytes of the file, valid until it returns, on
            the reading thread.
    """

    begin: int
    end: int
    memory: memoryview | None = None
    sinks: tuple[tuple[int, int, Sink], ...] = ()


def tiles_of(begin: int, end: int) -> list[Tile]:
    """``[begin, end)`` as tiles, for digests alone."""
    return [Tile(first, min(first + TILE_BYTES, end)) for first in range(begin, end, TILE_BYTES)]


class Digests:
    """CRC-32s of the pieces of a file, and of every range that pieces make up."""

    def __init__(self) -> None:
        self._pieces: dict[int, tuple[int, int]] = {}  # by begin: end and CRC-32; filled by several threads

    def add(self, begin: int, data: memoryview) -> None:
        self._pieces[begin] = begin + len(data), crc32(data)

    def of(self, begin: int, end: int) -> int | None:
        """The CRC-32 of ``[begin, end)``, None where the pieces do not make it up."""
        value = 0
        while begin < end:
            piece = self._pieces.get(begin)
            if piece is None or piece[0] > end:
                return None
            value = crc32_combine(value, piece[1], piece[0] - begin)
            begin = piece[0]
        return value


class FileReader:
    """A file that is open for reading. `read`, `fill` and `run` may be called by several threads at once."""

    def __init__(self, path: str, *, num_threads: int = NUM_THREADS) -> None:
        """Open the file.

        Raises:
            CheckpointNotFoundError: there is none.
            StorageError: it cannot be opened.
            IsADirectoryError: it is a folder.
        """
        self.path = path
        self._num_threads = num_threads
        self._descriptor = _open(path)
        try:
            self._direct = _open_direct(path, self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._local = threading.local()
        self.nbytes = os.fstat(self._descriptor).st_size

    @property
    def utf8_path(self) -> str:
        """A path to the open file for who takes only UTF-8, as torch does: names of files are any bytes."""
        try:
            self.path.encode()
        except UnicodeEncodeError:
            return f"/proc/self/fd/{self._descriptor}"
        return self.path

    def read(self, begin: int, nbytes: int) -> bytes:
        """A few bytes, through the page cache.

        Raises:
            CorruptCheckpointError: the file ends before.
            StorageError: the device or file system fails.
        """
        data = bytearray(nbytes)
        self._exact(self._descriptor, memoryview(data), begin, nbytes)
        return bytes(data)

    def fill(self, view: memoryview, begin: int, nbytes: int) -> None:
        """Read at least ``nbytes`` bytes from ``begin`` on into the front of ``view``, and at most all of it.

        View and ``begin`` should be aligned to pages and the view's length a multiple of it.

        Raises:
            CorruptCheckpointError: the file ends before.
            StorageError: the device or file system fails; names path and offset.
        """
        is_cached = self._direct >= 0 and 2 * cached_nbytes(self._descriptor, begin, nbytes) > nbytes
        if self._direct >= 0 and not is_cached:
            try:
                self._exact(self._direct, view, begin, nbytes)
                return
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
            # the file system takes O_DIRECT and refuses the read itself; other threads may be reading through it:
            # the same number becomes an ordinary descriptor
            os.dup2(self._descriptor, self._direct, inheritable=False)
        self._exact(self._descriptor, view, begin, nbytes)

    def run(
        self,
        tiles: Sequence[Tile],
        digests: Digests | None = None,
        cuts: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> None:
        """Read all tiles, several at a time; returns when all are read and their sinks have returned.

        Args:
            tiles: what to read.
            digests: takes the CRC-32s of all bytes wanted; tiles must not overlap then.
            cuts: in ascending order: no piece of the digests reaches across one.
            progress: hears of the bytes that were read.

        Raises:
            CorruptCheckpointError: the file ends before the end of a tile.
            StorageError: the device or file system fails; names path and offset.
        """
        lock = threading.Lock()
        steps = [step for tile in tiles for step in _steps(tile)]

        def read(step: Tile) -> None:
            self._read_step(step, digests, cuts)
            if progress is not None:
                with lock:
                    progress(step.end - step.begin)

        self.each(read, steps)

    def each(self, work: Callable[[Item], object], items: Iterable[Item]) -> None:
        """Call ``work`` for all items, on a few threads where there is much to do; the first failure is raised."""
        items = list(items)
        if len(items) < 2 or self._num_threads < 2:
            for item in items:
                work(item)
            return
        count = min(self._num_threads, len(items))
        with ThreadPoolExecutor(count, thread_name_prefix="datastates-read") as executor:
            futures = [executor.submit(work, item) for item in items]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                executor.shutdown(wait=True, cancel_futures=True)
                raise

    def close(self) -> None:
        """Let go of the file; idempotent."""
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_step(self, step: Tile, digests: Digests | None, cuts: Sequence[int]) -> None:
        cover = page_floor(step.begin)
        view = self._buffer() if step.memory is None else step.memory
        self.fill(view[: page_ceil(step.end) - cover], cover, step.end - cover)
        if digests is not None:
            for begin, end in _pieces(step.begin, step.end, cuts):
                digests.add(begin, view[begin - cover : end - cover])
        for begin, end, sink in step.sinks:
            sink(view[begin - cover : end - cover])

    def _buffer(self) -> memoryview:
        """The buffer of this thread: a tile that begins and ends anywhere in its pages."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(fresh_memory(TILE_BYTES + 2 * DIRECT_IO_BYTES))
        return buffer

    def _exact(self, descriptor: int, view: memoryview, begin: int, nbytes: int) -> None:
        """Fill at least ``nbytes`` of the view, more where that comes along: pages are read whole."""
        done = 0
        with storage_errors(f"read {nbytes} bytes at {begin} of", self.path):
            while done < nbytes:
                count = patiently(os.preadv, descriptor, [view[done:]], begin + done)
                if count == 0:
                    break
                done += count
        if done < nbytes:
            raise CorruptCheckpointError(
                f"{self.path}: the file ends at {begin + done}, expected {nbytes - done} more bytes; it is incomplete",
                self.path,
                offset=begin + done,
            )


def _steps(tile: Tile) -> Iterator[Tile]:
    """The single reads of a tile: those with memory may be of any length."""
    if tile.memory is None:
        yield tile
        return
    cover, begin = page_floor(tile.begin), tile.begin
    while begin < tile.end:
        end = min(page_floor(begin) + TILE_BYTES, tile.end)
        first = page_floor(begin) - cover
        yield Tile(begin, end, tile.memory[first : page_ceil(end) - cover])
        begin = end


def _pieces(begin: int, end: int, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """``[begin, end)``, cut."""
    position = bisect.bisect_right(cuts, begin)
    while position < len(cuts) and cuts[position] < end:
        yield begin, cuts[position]
        begin = cuts[position]
        position += 1
    if begin < end:
        yield begin, end


def _open(path: str) -> int:
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "a folder, expected a file", path)
    try:
        with storage_errors("open", path):
            descriptor = patiently(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise CheckpointNotFoundError(f"there is no file {path}") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StorageError(f"{path} is no ordinary file: it is a pipe, a socket or a device", errno.EINVAL, path)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # what is read here is small and scattered
    return descriptor


def _open_direct(path: str, descriptor: int) -> int:
    """A second descriptor of an open file that goes past the page cache.

    -1 where the file system has no such thing, or another file has taken the name meanwhile.
    """
    try:
        direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno in _NO_DIRECT or error.errno == errno.ENOENT:
            return -1
        with storage_errors("open", path):
            raise
    if os.path.sameopenfile(descriptor, direct):
        return direct
    os.close(direct)
    return -1
