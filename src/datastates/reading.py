"""Reads the bytes of one file: a few large positional reads at a time, directly where that pays, never mapped.

What lies in the page cache is copied from there; the rest is read past it (``O_DIRECT``) where the file system
allows that, so that a large checkpoint neither waits for the page cache nor evicts it. Mapped files would be read
page by page, are refused by some file systems, and turn an error of the device into a signal.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar

from datastates.checksum import crc32, crc32_combine
from datastates.config import DIRECT_IO_BYTES
from datastates.direct_memory import memory_alignment
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from datastates.fellow_readers import FellowReaders
from datastates.page_cache import cached_nbytes
from datastates.system_calls import patiently, storage_errors

TILE_BYTES = 4 << 20
"""So much is read by one call. With `NUM_THREADS` of them a virtual disk of 2.7 GB/s is read at 2.6 GB/s into
memory that nobody has touched; one call of 16 MiB at a time reaches 1.1 GB/s there (docs/loading.md)."""

NUM_THREADS = 8
"""So many reads are under way at a time; they wait for the device most of the time, also where there are few cores."""

BUFFER_BYTES = TILE_BYTES + 2 * DIRECT_IO_BYTES
"""A tile that begins and ends anywhere in its pages."""

_SMALL_BYTES = 1 << 20
_SMALL_GAP_BYTES = 64 << 10
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


def address_of(view: memoryview) -> int:
    """Where the bytes of a writable view, more than none, lie in memory; whoever owns them must outlive it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy all bytes of a writable view to the front of another without the GIL, which assigning a slice would hold."""
    if len(source) > len(target):
        raise ValueError(f"{len(source)} bytes do not fit into {len(target)}")
    if len(source):
        ctypes.memmove(address_of(target), address_of(source), len(source))


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
        end: end of what is wanted; at most `TILE_BYTES` after ``begin``, except for tiles with memory or target.
        memory: where the bytes go: covers whole pages of the file, from `page_floor` of ``begin`` to `page_ceil`
            of ``end``. None: a buffer of the reading thread, which the sinks see.
        target: where the bytes go instead: as long as what is wanted, anywhere; nothing around it is touched.
        sinks: ``(begin, end, sink)``: the sink gets a view of these bytes of the file, valid until it returns, on
            the reading thread.
    """

    begin: int
    end: int
    memory: memoryview | None = None
    sinks: tuple[tuple[int, int, Sink], ...] = ()
    target: memoryview | None = None


def tiles_of(begin: int, end: int) -> list[Tile]:
    """``[begin, end)`` as tiles, for digests alone."""
    return [Tile(first, min(first + TILE_BYTES, end)) for first in range(begin, end, TILE_BYTES)]


def merged(tiles: Iterable[Tile]) -> list[Tile]:
    """Tiles for sinks in file order, small neighbours together: one read for many small tensors."""
    made: list[Tile] = []
    for tile in sorted(tiles, key=lambda one: (one.begin, one.end)):
        last = made[-1] if made else None
        if (
            last is not None
            and last.sinks
            and tile.sinks
            and tile.end - tile.begin < _SMALL_BYTES
            and tile.begin - last.end < _SMALL_GAP_BYTES
            and max(tile.end, last.end) - last.begin <= TILE_BYTES
        ):
            made[-1] = Tile(last.begin, max(tile.end, last.end), None, last.sinks + tile.sinks)
        else:
            made.append(tile)
    return made


class Buffers(Protocol):
    """Memory that tiles without their own are read into. Called by several threads at once."""

    def take(self) -> memoryview:
        """`BUFFER_BYTES` that begin at a page, the calling thread's until it gives them back; may block."""

    def give(self, buffer: memoryview, /) -> None:
        """The sinks have returned, or failed."""


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

    def __init__(self, path: str, *, num_threads: int = NUM_THREADS, num_local_ranks: int = 1) -> None:
        """Open the file.

        Args:
            path: of an ordinary file.
            num_threads: so many reads are under way at a time.
            num_local_ranks: so many processes of this machine may read the same file, this one among them. While
                several do, all read through the page cache: the disk reads each page once, for the first who wants it.

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
        self._memory_alignment = DIRECT_IO_BYTES
        if self._direct >= 0:
            self._memory_alignment = memory_alignment(self._direct, DIRECT_IO_BYTES)
        self._local = threading.local()
        self._num_local_ranks = num_local_ranks
        self._fellows: FellowReaders | None = None
        self._fellows_lock = threading.Lock()  # protects the making of it
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
        if self._is_direct(begin, nbytes):
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

    def fill_anywhere(self, target: memoryview, begin: int) -> None:
        """Read the bytes from ``begin`` on into memory of any alignment; nothing around it is touched.

        What goes past the page cache takes a buffer of the calling thread where the memory does not lie as direct reads
        need it, which on Linux 6.1 and later is seldom. At most `TILE_BYTES` from the page of ``begin`` on.

        Raises:
            CorruptCheckpointError: the file ends before.
            StorageError: the device or file system fails; names path and offset.
        """
        end = begin + len(target)
        if not self._is_direct(begin, len(target)):
            self._exact(self._descriptor, target, begin, len(target))
            return
        first, last = page_ceil(begin), page_floor(end)
        if first < last and (address_of(target) - begin) % self._memory_alignment == 0:
            self.fill(target[first - begin : last - begin], first, last - first)
            edges = (begin, first), (last, end)
        else:
            edges = (begin, end), (end, end)
        for edge_begin, edge_end in edges:
            if edge_begin < edge_end:
                cover, buffer = page_floor(edge_begin), self._buffer()
                self.fill(buffer[: page_ceil(edge_end) - cover], cover, edge_end - cover)
                copy_bytes(target[edge_begin - begin :], buffer[edge_begin - cover : edge_end - cover])

    def _is_direct(self, begin: int, nbytes: int) -> bool:
        """Whether to read past the page cache: it can be done, serves nobody else, and not most of it is there."""
        if self._direct < 0 or (self._num_local_ranks > 1 and self._are_fellows_expected()):
            return False
        return 2 * cached_nbytes(self._descriptor, begin, nbytes) <= nbytes

    def _are_fellows_expected(self) -> bool:
        with self._fellows_lock:
            if self._fellows is None:
                self._fellows = FellowReaders(self._descriptor, self._num_local_ranks)
        return self._fellows.are_expected()

    def run(
        self,
        tiles: Sequence[Tile],
        digests: Digests | None = None,
        cuts: Sequence[int] = (),
        progress: Progress | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        """Read all tiles, several at a time; returns when all are read and their sinks have returned.

        Args:
            tiles: what to read.
            digests: takes the CRC-32s of all bytes wanted; tiles must not overlap then.
            cuts: in ascending order: no piece of the digests reaches across one.
            progress: hears of the bytes that were read.
            buffers: for the tiles that have no memory; None: one for each reading thread.

        Raises:
            CorruptCheckpointError: the file ends before the end of a tile.
            StorageError: the device or file system fails; names path and offset.
        """
        lock = threading.Lock()
        steps = [step for tile in tiles for step in _steps(tile)]

        def read(step: Tile) -> None:
            self._read_step(step, digests, cuts, buffers)
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
        if self._fellows is not None:
            self._fellows.close()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_step(self, step: Tile, digests: Digests | None, cuts: Sequence[int], buffers: Buffers | None) -> None:
        if step.target is not None:
            self.fill_anywhere(step.target, step.begin)
            self._hand_on(step, step.target, step.begin, digests, cuts)
        elif step.memory is not None:
            self._fill_pages(step, step.memory, digests, cuts)
        elif buffers is None:
            self._fill_pages(step, self._buffer(), digests, cuts)
        else:
            buffer = buffers.take()
            try:
                self._fill_pages(step, buffer, digests, cuts)
            finally:
                buffers.give(buffer)

    def _fill_pages(self, step: Tile, view: memoryview, digests: Digests | None, cuts: Sequence[int]) -> None:
        cover = page_floor(step.begin)
        self.fill(view[: page_ceil(step.end) - cover], cover, step.end - cover)
        self._hand_on(step, view, cover, digests, cuts)

    @staticmethod
    def _hand_on(step: Tile, view: memoryview, cover: int, digests: Digests | None, cuts: Sequence[int]) -> None:
        """Digests and sinks see what was read; the view begins at ``cover`` of the file."""
        if digests is not None:
            for begin, end in _pieces(step.begin, step.end, cuts):
                digests.add(begin, view[begin - cover : end - cover])
        for begin, end, sink in step.sinks:
            sink(view[begin - cover : end - cover])

    def _buffer(self) -> memoryview:
        """The buffer of this thread."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(fresh_memory(BUFFER_BYTES))
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
    """The single reads of a tile: those with memory or a target may be of any length."""
    cover, begin = page_floor(tile.begin), tile.begin
    if tile.memory is None and tile.target is None:
        yield tile
        return
    while begin < tile.end:
        end = min(page_floor(begin) + TILE_BYTES, tile.end)
        if tile.target is not None:
            yield Tile(begin, end, target=tile.target[begin - tile.begin : end - tile.begin])
        elif tile.memory is not None:
            yield Tile(begin, end, tile.memory[page_floor(begin) - cover : page_ceil(end) - cover])
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
