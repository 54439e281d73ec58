"""The byte image of a checkpoint file, known before any byte of a tensor moves.

A format turns a state into a `FilePlan`: which bytes stand where. Nothing here reads a tensor, touches a
file, or knows a format. The image is cut into slabs of the *file*, not of tensors, so a tensor may be larger
than the host cache, and thousands of small ones share one slab.
"""

from __future__ import annotations

import bisect
import struct
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, overload

if TYPE_CHECKING:
    import torch


SEAL_NBYTES = 4
"""Length of a `Seal` in the file."""


class Readable(Protocol):
    """Bytes that lie in a file of somebody else's, or on their way from a device, until they are staged."""

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``offset`` on; blocks for storage.

        Raises:
            DataStatesError: they cannot be read, or are not those of the save any more.
        """


class Segment(NamedTuple):
    """A byte range of the file and where its bytes come from. A tuple, since a save makes tens of thousands.

    Attributes:
        begin: offset of the first byte from the start of the file.
        nbytes: length, more than zero.
        source: the literal bytes, or a tensor of which the row-major elements are the bytes. A tensor source
            is a detached alias: it keeps the memory alive but follows no rebinding of ``.data``. It may have
            any strides; ``begin`` is a multiple of its item size. Its device is any but ``meta``. Or what reads
            them from elsewhere.
        fqn: dotted name of the leaf for messages; empty for headers and the like.
        version: ``tensor._version`` at ``save()``, -1 where it has none (literal bytes, inference tensors).
    """

    begin: int
    nbytes: int
    source: bytes | bytearray | memoryview | torch.Tensor | Readable
    fqn: str = ""
    version: int = -1

    @property
    def end(self) -> int:
        return self.begin + self.nbytes

    @property
    def is_literal(self) -> bool:
        return isinstance(self.source, (bytes, bytearray, memoryview))


class Columns(Sequence[Segment]):
    """Segments that are kept column by column, and made one by one when they are asked for; a slice is `Columns`, too.

    Whoever makes them answers for what `FilePlan` checks of others.

    Attributes:
        begins: offset of each.
        lengths: bytes of each.
    """

    begins: Sequence[int]
    lengths: Sequence[int]

    @property
    @abstractmethod
    def literal_nbytes(self) -> int:
        """How many bytes the literal ones have together."""

    def __len__(self) -> int:
        return len(self.begins)

    @overload
    def __getitem__(self, index: int) -> Segment: ...

    @overload
    def __getitem__(self, index: slice) -> Columns: ...

    @abstractmethod
    def __getitem__(self, index: int | slice) -> Segment | Columns: ...


class Seal(NamedTuple):
    """Four bytes that the flusher fills in, once it has seen the bytes they cover.

    The CRC-32 (zlib's polynomial, little endian) of the file's bytes ``[begin, end)`` is stored at ``offset``.
    ``offset >= end`` always, so that a flusher that meets the slabs in file order needs no second pass. No
    range may cover another seal's four bytes.
    """

    offset: int
    begin: int
    end: int


class PackedSeals(Sequence[Seal]):
    """Seals in the form in which they are sent, for those who plan the same tens of thousands again and again."""

    ROW = struct.Struct("<QQQ")

    def __init__(self, packed: bytes) -> None:
        """``packed``: a `ROW` for each."""
        self.packed = packed

    @classmethod
    def of(cls, seals: Sequence[Seal]) -> PackedSeals:
        return seals if isinstance(seals, PackedSeals) else cls(b"".join([cls.ROW.pack(*seal) for seal in seals]))

    def __len__(self) -> int:
        return len(self.packed) // self.ROW.size

    @overload
    def __getitem__(self, index: int) -> Seal: ...

    @overload
    def __getitem__(self, index: slice) -> PackedSeals: ...

    def __getitem__(self, index: int | slice) -> Seal | PackedSeals:
        rows, size = range(len(self))[index], self.ROW.size
        if isinstance(rows, int):
            return Seal(*self.ROW.unpack_from(self.packed, rows * size))
        if rows.step != 1:
            raise ValueError(f"rows {index} do not follow each other")
        return PackedSeals(self.packed[rows.start * size : rows.stop * size])


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a segment that falls into one slab."""

    segment: Segment
    segment_begin: int
    slab_begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """One slab of the image: ``[begin, begin + nbytes)`` of the file and the segments that reach into it.

    Bytes that no segment covers are zero. Segments are in ascending order and do not overlap.
    """

    index: int
    begin: int
    nbytes: int
    segments: Sequence[Segment]

    @property
    def end(self) -> int:
        return self.begin + self.nbytes

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of its segments that lie in it."""
        return tuple(map(self.piece, self.segments))

    def piece(self, segment: Segment) -> Piece:
        """The part of one of its segments that lies in it."""
        begin, end = max(segment.begin, self.begin), min(segment.end, self.end)
        return Piece(segment, begin - segment.begin, begin - self.begin, end - begin)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """All bytes of one file.

    Attributes:
        format: name of the format, ``"torch"`` or ``"safetensors"``, or ``"raw"`` for a copy of another file.
        nbytes: size of the file.
        segments: ascending, disjoint, none empty. Gaps between them are zero bytes.
        seals: ascending by offset.
        eager_end: every segment whose source may change before the fence lies in ``[0, eager_end)``;
            ``save()`` returns only when the image is staged up to here. Zero when all such bytes are literal.
    """

    format: str
    nbytes: int
    segments: Sequence[Segment]
    seals: Sequence[Seal] = ()
    eager_end: int = 0
    _begins: Sequence[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.segments, Columns):
            object.__setattr__(self, "_begins", self.segments.begins)
            return
        object.__setattr__(self, "_begins", [segment.begin for segment in self.segments])
        end = 0
        for begin, nbytes, _, fqn, _ in self.segments:
            if begin < end or nbytes <= 0:
                raise ValueError(f"segment {fqn!r} at {begin} overlaps the one before or is empty")
            end = begin + nbytes
        if end > self.nbytes or self.eager_end > self.nbytes:
            raise ValueError(f"segments end at {end}, beyond the file's {self.nbytes} bytes")

    @property
    def literal_nbytes(self) -> int:
        """How many bytes the plan itself holds."""
        if isinstance(self.segments, Columns):
            return self.segments.literal_nbytes
        return sum([segment.nbytes for segment in self.segments if segment.is_literal])

    def num_slabs(self, slab_bytes: int) -> int:
        return -(-self.nbytes // slab_bytes)

    def slab(self, index: int, slab_bytes: int) -> SlabPlan:
        """The slab with the given index when the file is cut every ``slab_bytes``."""
        begin = index * slab_bytes
        end = min(begin + slab_bytes, self.nbytes)
        if not 0 <= begin < end:
            raise IndexError(f"slab {index} of a file of {self.num_slabs(slab_bytes)} slabs")
        first = max(bisect.bisect_right(self._begins, begin) - 1, 0)
        segments = self.segments[first : bisect.bisect_left(self._begins, end)]
        if segments and _first_end(segments) <= begin:
            segments = segments[1:]
        return SlabPlan(index, begin, end - begin, segments)

    def slabs(self, slab_bytes: int) -> Iterator[SlabPlan]:
        for index in range(self.num_slabs(slab_bytes)):
            yield self.slab(index, slab_bytes)


def _first_end(segments: Sequence[Segment]) -> int:
    return segments.begins[0] + segments.lengths[0] if isinstance(segments, Columns) else segments[0].end
