"""Items of a distributed checkpoint on their way from a file into the tensors that a planner names."""

from __future__ import annotations

import ctypes
import io
import math
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import ReadItem

from datastates.checksum import crc32
from datastates.contents.file_window import FileWindow
from datastates.contents.parts import PICKLE_NAME, STORAGE_PREFIX
from datastates.contents.stub_pickle import read_pickle
from datastates.contents.tensor_calls import Window, window_of
from datastates.contents.zip_directory import ZipDirectory
from datastates.conversion.distributed_reading import check_archive
from datastates.copying import is_flat
from datastates.errors import CorruptCheckpointError
from datastates.formats.torch_names import torch_name
from datastates.formats.zip_image import DESCRIPTOR_BEGIN
from datastates.integrations.dcp_blocks import GAP_BYTES, Block, blocks_of, strides_of
from datastates.integrations.dcp_image import frame_of
from datastates.plan import SEAL_NBYTES
from datastates.reading import TILE_BYTES, FileReader, Sink, Tile

SMALL_BYTES = 256 << 10
"""An item of at most this many bytes is read whole, together with its neighbours."""

_SIGNATURE_BYTES = len(DESCRIPTOR_BEGIN)


@dataclass(slots=True)
class Item:
    """An item of the checkpoint, and what is wanted of it.

    Attributes:
        fqn: its name.
        begin: offset of its archive in the file.
        nbytes: length of the archive.
        dtype: of the tensor; None for an object.
        shape: of the chunk.
        wanted: parts of the chunk, each with the tensor that it goes to.
        objects: who wants the object.
        heads: what is before the elements in archives of torch, by dtype and shape; shared by all items.
        data: of an object, when it has been read.
    """

    fqn: str
    begin: int
    nbytes: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    wanted: list[tuple[ReadItem, torch.Tensor]] = field(default_factory=list)
    objects: list[ReadItem] = field(default_factory=list)
    heads: dict[tuple[torch.dtype | None, tuple[int, ...]], bytes] = field(default_factory=dict)
    data: bytes = b""

    @property
    def is_small(self) -> bool:
        return self.dtype is None or self.nbytes <= SMALL_BYTES

    @property
    def data_nbytes(self) -> int:
        """Length of the chunk's elements."""
        return 0 if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize

    def read_whole(self, file: FileReader, view: memoryview, check: bool) -> None:
        """Take all bytes of the archive.

        Raises:
            CorruptCheckpointError: it is malformed or, with ``check``, one of its checksums is wrong.
        """
        if self.dtype is None:
            self.data = bytes(view)
            if check:
                self._check(file)
            return
        frame = frame_of(self.dtype, self.shape)
        first, last = len(frame.head), len(frame.head) + frame.data_nbytes
        if len(view) == frame.nbytes and view[:first] == frame.head:
            if check and view[last:] != frame.tail_of(crc32(view[first:last])):
                raise self.damage(file, self.begin + first, self.begin + last)
            self._deliver(view[first:last])
        elif (foreign := self._foreign_head(file, view)) is not None:
            first, last = len(foreign), len(foreign) + self.data_nbytes
            found = crc32(view[first:last])
            if check and view[last + _SIGNATURE_BYTES :][:SEAL_NBYTES] != found.to_bytes(SEAL_NBYTES, "little"):
                raise self.damage(file, self.begin + first, self.begin + last)
            self._deliver(view[first:last])
        else:
            self._load_whole(file, view, check)

    def _deliver(self, data: memoryview) -> None:
        """Copy the chunk's elements to where they are wanted."""
        assert self.dtype is not None  # noqa: S101 - objects are read whole
        for request, target in self.wanted:
            for block in blocks_of(self.shape, request.storage_offsets, request.lengths, self.dtype.itemsize):
                _Sink(self, request, target, block)(data[block.begin * self.dtype.itemsize :])

    def _load_whole(self, file: FileReader, view: memoryview, check: bool) -> None:
        """A tensor that does not lie there as its row-major elements, as torch loads it."""
        self.data = bytes(view)
        if check:
            self._check(file)
        tensor = self._loaded(file)
        for request, target in self.wanted:
            is_whole = tuple(request.lengths) == self.shape
            target.copy_(tensor if is_whole else tensor[_slices(request.storage_offsets, request.lengths)])

    def data_begin(self, file: FileReader, check: bool) -> tuple[int, int | None] | None:
        """Offset of the tensor's row-major elements in the file, and their CRC-32 where it is known.

        None where they do not lie there as such: torch's own reader has to read them.

        Raises:
            CorruptCheckpointError: the archive is malformed.
        """
        assert self.dtype is not None  # noqa: S101 - objects are read whole
        frame = frame_of(self.dtype, self.shape)
        begin = self.begin + len(frame.head)
        if self.nbytes == frame.nbytes and file.read(self.begin, len(frame.head)) == frame.head:
            crc = frame.crc_in(file.read(begin + frame.data_nbytes, frame.tail_nbytes))
            if crc is None and check:
                raise self.damage(file, begin + frame.data_nbytes, self.begin + self.nbytes)
            return begin, crc
        return self._foreign_begin(file)

    def tiles(self, begin: int) -> Iterator[Tile]:
        """The reads of what is wanted, given where the tensor's elements begin."""
        assert self.dtype is not None  # noqa: S101 - objects are read whole
        size = self.dtype.itemsize
        for request, target in self.wanted:
            for block in blocks_of(self.shape, request.storage_offsets, request.lengths, size):
                ends = begin + block.begin * size, begin + block.end * size
                yield Tile(*ends, sinks=((*ends, _Sink(self, request, target, block)),))

    def damage(self, file: FileReader, begin: int, end: int) -> CorruptCheckpointError:
        """The error for bytes whose checksum is wrong."""
        message = f"{file.path}: {self.fqn} is damaged: bytes {begin} to {end} do not have the checksum beside them"
        return CorruptCheckpointError(f"{message}; load another checkpoint", file.path, self.fqn, begin)

    def _check(self, file: FileReader) -> None:
        try:
            with io.BytesIO(self.data) as stream:
                check_archive(stream)
        except zipfile.BadZipFile as error:
            raise self.damage(file, self.begin, self.begin + self.nbytes) from error

    def _loaded(self, file: FileReader) -> torch.Tensor:
        try:
            tensor = torch.load(io.BytesIO(self.data), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise self._malformed(file, error) from error
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != self.shape:
            raise self._malformed(file, f"it holds a {type(tensor).__name__} of another shape")
        self.data = b""
        return tensor

    def _foreign_head(self, file: FileReader, view: memoryview) -> bytes | None:
        """What stands before the elements in an archive of torch; their CRC-32 stands behind them, in a descriptor.

        The same for all chunks of a dtype and shape, so that it is found out once.
        Source: ``FileSystemWriter`` streams its archives, and PKWARE APPNOTE 6.3.10, section 4.3.9.
        """
        kind = self.dtype, self.shape
        head = self.heads.get(kind)
        if head is None or view[: len(head)] != head:
            place = self._foreign_begin(file)
            if place is None or place[1] is None:
                return None
            head = self.heads[kind] = bytes(view[: place[0] - self.begin])
        last = len(head) + self.data_nbytes
        return head if view[last : last + _SIGNATURE_BYTES] == DESCRIPTOR_BEGIN else None

    def _foreign_begin(self, file: FileReader) -> tuple[int, int | None] | None:
        try:
            directory = ZipDirectory(FileWindow(file, self.begin, self.nbytes))
            window = window_of(read_pickle(directory.content(PICKLE_NAME)))
            entry = None if window is None else directory.entries.get(STORAGE_PREFIX + window.storage.key)
            if window is None or entry is None or not entry.is_stored or not self._is_whole(window):
                return None
            begin = self.begin + directory.data_begin(entry)
        except (pickle.UnpicklingError, ValueError) as error:
            if isinstance(error, CorruptCheckpointError):
                raise
            raise self._malformed(file, error) from error
        is_exact = entry.nbytes == window.nbytes and entry.is_checkable
        return begin + window.begin, entry.crc32 if is_exact else None

    def _is_whole(self, window: Window) -> bool:
        is_alike = window.shape == self.shape and window.dtype == torch_name(self.dtype)
        return is_alike and window.is_raw and window.is_contiguous

    def _malformed(self, file: FileReader, what: object) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{file.path}: {self.fqn} cannot be read: {what!s:.200}", file.path, self.fqn)


def merged_tiles(file: FileReader, items: Sequence[Item], check: bool) -> list[Tile]:
    """Tiles that read small items whole, neighbours together; objects too large for a tile are left out."""
    tiles: list[Tile] = []
    for item in sorted(items, key=lambda one: one.begin):
        if item.nbytes > TILE_BYTES:
            continue
        end = item.begin + item.nbytes
        sink = (item.begin, end, _whole_sink(file, item, check))
        last = tiles[-1] if tiles else None
        if last is not None and item.begin - last.end < GAP_BYTES and end - last.begin <= TILE_BYTES:
            tiles[-1] = Tile(last.begin, max(end, last.end), sinks=(*last.sinks, sink))
        else:
            tiles.append(Tile(item.begin, end, sinks=(sink,)))
    return tiles


def _whole_sink(file: FileReader, item: Item, check: bool) -> Sink:
    def take(view: memoryview) -> None:
        item.read_whole(file, view, check)

    return take


class _Sink:
    """Copies a box of elements from what was read to where it belongs; on any thread."""

    def __init__(self, item: Item, request: ReadItem, target: torch.Tensor, block: Block) -> None:
        self._item = item
        self._target = target[_slices(block.offsets, block.lengths)] if block.lengths else target
        self._block = block
        self._rank = len(request.lengths)

    def __call__(self, view: memoryview) -> None:
        dtype, target = self._item.dtype, self._target
        assert dtype is not None  # noqa: S101 - objects are read whole
        nbytes = (self._block.end - self._block.begin) * dtype.itemsize
        view = view[:nbytes]
        is_one_range = nbytes == math.prod(self._block.lengths) * dtype.itemsize
        if is_one_range and target.dtype is dtype and target.device.type == "cpu" and is_flat(target):
            memory = (ctypes.c_char * nbytes).from_address(target.data_ptr())
            memoryview(memory).cast("B")[:] = view
            return
        raw = torch.frombuffer(view if _is_aligned(view, dtype) else bytearray(view), dtype=torch.uint8)
        source = raw.view(dtype).as_strided(self._block.lengths, strides_of(self._item.shape))
        target.copy_(source)


def _is_aligned(view: memoryview, dtype: torch.dtype) -> bool:
    address = ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0
    return address % dtype.itemsize == 0


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + length) for begin, length in zip(offsets, lengths, strict=True))
