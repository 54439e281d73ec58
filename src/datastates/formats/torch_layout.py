"""The layout of a torch file, kept from one save to the next of an equally built state.

In such a file everything but the pickle, the bytes of the tensors and their checksums depends only on how many bytes
each tensor has and on which of them are eager. A `Layout` is that file with holes; filling them is a few joins.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch

from datastates.checksum import crc32
from datastates.contents.parts import PICKLE_NAME, STORAGE_PREFIX
from datastates.formats.image import Block, ImageBuilder, Literal
from datastates.formats.zip_image import (
    DESCRIPTOR_BEGIN,
    SmallEntries,
    ZipImage,
    small_entries,
    write_central,
    write_end,
)
from datastates.plan import SEAL_NBYTES, FilePlan, PackedSeals, Seal, Segment
from datastates.segment_table import Literals, SegmentTable, Windows, address_of
from datastates.state import Captured

NAME = "torch"


@dataclass(frozen=True, slots=True)
class Source:
    """Where the bytes of one tensor come from, its fqn and its version; see `plan.Segment`."""

    bytes: Literal | Captured | torch.Tensor
    fqn: str
    version: int = -1


ALIGNMENT = 64  # what torch.load assumes at least for mapped tensors
_PAGE_ALIGNMENT = 4096
_LARGE_BYTES = 1 << 20

#: "1" would promise that storages lie in the order of their keys at one alignment, from which torch.load
#: computes offsets without reading headers. Ours lie eager before lazy, so torch.load must look them up.
#: Source: the comment on ``.format_version`` in ``torch.serialization._save``.
_FORMAT_VERSION = b"0"
_ARCHIVE_VERSION = b"3\n"

_CRC = struct.Struct("<I")

#: So much longer the pickle may grow, by numbers of more digits, before everything behind it moves.
_PICKLE_SLACK_BYTES = 512


class Layout:
    """A torch file without its pickle and without the bytes and checksums of its tensors; immutable.

    Order: pickle and small records, storages whose bytes are there at once, those that are copied later, closing
    records, central directory. It is filled as long as the pickle has about the length that it had.
    """

    def __init__(
        self, pickled: bytes, eager: dict[str, int], empty: Sequence[str], lazy: dict[str, int], num_pending: int = 0
    ) -> None:
        """Lay out a file whose pickle has about this length.

        Args:
            pickled: the state's pickle.
            eager: how many bytes the storages have that are there at once, by key.
            empty: keys of storages without bytes.
            lazy: likewise of those that are copied later.
            num_pending: how many of these, the first ones, may change before the fence.
        """
        self._first_data = -(-(_Prefix(pickled).nbytes + _PICKLE_SLACK_BYTES) // _PAGE_ALIGNMENT) * _PAGE_ALIGNMENT
        prefix = _Prefix(pickled, self._first_data)
        head = _Template(prefix.nbytes)
        archive = ZipImage(head)
        add_opening_records(archive)
        small = small_entries(list(map(storage_name, eager)), list(eager.values()), head.nbytes, ALIGNMENT)
        if small is not None:
            head.append_entries(small)
        for key, nbytes in [*([] if small else eager.items()), *((key, 0) for key in empty)]:
            archive.add(storage_name(key), _place(nbytes), alignment_of(nbytes))
        head.is_eager = False
        for key, nbytes in lazy.items():
            archive.add(storage_name(key), _place(nbytes), alignment_of(nbytes))
        add_closing_records(archive, pickled)
        head.end()
        tail = _Template(head.nbytes + len(prefix.directory), head.eager_begins)
        num_entries = len(prefix.archive.entries) + len(archive.entries)
        if small is not None:
            tail.append_records(small)
            num_entries += len(eager)
        for entry in archive.entries:
            write_central(tail, entry)
        write_end(tail, num_entries, head.nbytes, tail.nbytes - head.nbytes)
        tail.end()
        self._nbytes = tail.nbytes
        self._seals = PackedSeals.of([*head.seals, *tail.seals])
        self._head, (self._tail,) = head.runs[0], tail.runs
        between = [b"".join(run) for run in head.runs[1:]]
        self._closing = between.pop() if between else b""
        self._between = b"".join(between)
        self._between_ends = list(accumulate(map(len, between)))
        self._set_columns(head.lazy_ranges)
        self._eager_end = sum(head.lazy_ranges[num_pending - 1]) if num_pending else 0

    def _set_columns(self, lazy_ranges: list[tuple[int, int]]) -> None:
        """Keep what a `SegmentTable` says of each segment, but for the addresses that change from save to save."""
        cuts = [0, *chain.from_iterable((begin, begin + nbytes) for begin, nbytes in lazy_ranges)]
        self._begins, self._lengths = cuts, [end - begin for begin, end in pairwise([*cuts, self._nbytes])]
        self._vector = array("Q", bytes(16 * len(cuts)))
        self._vector[1::2] = array("Q", self._lengths)
        begins, at = [0, *self._between_ends][: len(self._between_ends)], address_of(self._between)
        self._vector[4:-4:4] = array("Q", [at + begin for begin in begins])

    def fill(
        self, pickled: bytes, captured: Sequence[bytes | bytearray], sources: Windows | Sequence[Source]
    ) -> FilePlan | None:
        """The plan of a file, None where the pickle has outgrown its place.

        Args:
            pickled: the state's pickle.
            captured: the bytes of the eager storages, in order.
            sources: the others, in order; those of the host by column.
        """
        literals = self._literals(pickled, captured)
        if literals is None:
            return None
        segments = self._table(literals, sources) if isinstance(sources, Windows) else self._rows(literals, sources)
        return FilePlan(NAME, self._nbytes, segments, self._seals, self._eager_end)

    def _literals(self, pickled: bytes, captured: Sequence[bytes | bytearray]) -> Literals | None:
        try:
            prefix = _Prefix(pickled, self._first_data)
        except ValueError:
            return None
        crcs = list(map(_CRC.pack, map(crc32, captured)))
        head: list[bytes | bytearray] = [*self._head]
        tail: list[bytes | bytearray] = [prefix.directory, *self._tail]
        head[1::4], head[3::4], tail[2::2] = captured, crcs, crcs
        if not self._closing:
            return Literals(b"".join([prefix.data, *head, *tail]), b"", (), b"")
        first, last = b"".join([prefix.data, *head]), b"".join([self._closing, *tail])
        return Literals(first, self._between, self._between_ends, last)

    def _table(self, literals: Literals, windows: Windows) -> Sequence[Segment]:
        if not self._closing:
            return (Segment(0, self._nbytes, literals.first),)
        vector = self._vector[:]
        vector[2::4] = array("Q", windows.addresses)
        vector[0], vector[-2] = address_of(literals.first), address_of(literals.last)
        return SegmentTable(self._begins, self._lengths, literals, windows, vector)

    def _rows(self, literals: Literals, sources: Sequence[Source]) -> Sequence[Segment]:
        segments = []
        for index, (begin, nbytes) in enumerate(zip(self._begins, self._lengths, strict=True)):
            number, is_late = divmod(index, 2)
            source = sources[number] if is_late else Source(literals[number], "")
            segments.append(Segment(begin, nbytes, source.bytes, source.fqn, source.version))
        return tuple(segments)


@functools.lru_cache
def _place(nbytes: int) -> Block:
    """A block whose bytes come later."""
    return Block(nbytes, torch.empty(0, device="meta") if nbytes else b"", "")


class _Prefix:
    """The entries whose bytes depend on the pickle's length, and what the central directory says of them."""

    def __init__(self, pickled: bytes, first_data: int | None = None) -> None:
        """``first_data``: where the data of the last of them shall lie; ValueError where it cannot."""
        image, directory = ImageBuilder(), ImageBuilder()
        self.archive = ZipImage(image)
        add_first_records(self.archive, pickled, first_data)
        for entry in self.archive.entries:
            write_central(directory, entry)
        self.nbytes = image.nbytes
        self.data = b"".join(segment.source for segment in image.segments())  # type: ignore[misc]
        self.directory = b"".join(segment.source for segment in directory.segments())  # type: ignore[misc]


class _Template:
    """An image with holes: lists of bytes, in which every second one is an empty place for bytes that come later.

    Attributes:
        nbytes: length of the image so far.
        is_eager: whether the tensors that are added now are eager: holes; a lazy one begins a new list.
        eager_begins: offsets of the eager tensors that were not added by `append_entries`.
        lazy_ranges: offset and length of the lazy ones.
        runs: the lists.
        seals: those of lazy tensors.
    """

    def __init__(self, nbytes: int, eager_begins: set[int] | None = None) -> None:
        self.nbytes = nbytes
        self.is_eager = True
        self.eager_begins: set[int] = set() if eager_begins is None else eager_begins
        self.lazy_ranges: list[tuple[int, int]] = []
        self.runs: list[list[bytes]] = [[]]
        self.seals: list[Seal] = []
        self._literals: list[Literal] = []

    def literal(self, data: Literal) -> None:
        self._literals.append(data)
        self.nbytes += len(data)

    def block(self, block: Block) -> None:
        if block.is_literal:
            self.literal(block.source)  # type: ignore[arg-type]
        elif self.is_eager:
            self.eager_begins.add(self.nbytes)
            self._hole(block.nbytes)
        else:
            self.lazy_ranges.append((self.nbytes, block.nbytes))
            self.nbytes += block.nbytes
            self.end()
            self.runs.append([])

    def seal(self, begin: int, end: int) -> None:
        if begin in self.eager_begins:
            self._hole(SEAL_NBYTES)
        else:
            self.seals.append(Seal(self.nbytes, begin, end))
            self.literal(bytes(SEAL_NBYTES))

    def append_entries(self, small: SmallEntries) -> None:
        """Many eager entries at once."""
        ends = [b"", *small.descriptors[:-1]]
        statics = [end + header for end, header in zip(ends, small.headers, strict=True)]
        self._append(statics, 4)
        self.runs[-1][2 - 4 * len(statics) :: 4] = [DESCRIPTOR_BEGIN] * len(statics)
        self._literals = [*small.descriptors[-1:]]
        self.nbytes = small.end

    def append_records(self, small: SmallEntries) -> None:
        """What the central directory says of them."""
        begin = small.central_begin
        self._append([record + begin for record in [b"", *small.records[:-1]]], 2)
        self._literals = [*small.records[-1:]]
        self.nbytes += sum(map(len, small.records)) + len(small.records) * (len(begin) + SEAL_NBYTES)

    def _append(self, statics: list[bytes], step: int) -> None:
        """Append bytes, each followed by ``step - 1`` empty places, behind the literals so far."""
        parts = [b""] * (step * len(statics))
        parts[::step] = statics
        parts[0] = b"".join([*self._literals, statics[0]])
        self.runs[-1] += parts

    def end(self) -> None:
        """Put what was appended last into the list."""
        self.runs[-1].append(b"".join(self._literals))
        self._literals.clear()

    def _hole(self, nbytes: int) -> None:
        self.end()
        self.runs[-1].append(b"")
        self.nbytes += nbytes


def add_first_records(archive: ZipImage, pickled: bytes, begin: int | None = None) -> None:
    """The state's pickle and what follows it; ``begin``: where that shall lie, ValueError where it cannot."""
    _add(archive, PICKLE_NAME, pickled)
    archive.add("archive/.format_version", Block(len(_FORMAT_VERSION), _FORMAT_VERSION, ""), ALIGNMENT, begin)


def add_opening_records(archive: ZipImage) -> None:
    """The records between the first ones and the storages."""
    _add(archive, ".storage_alignment", str(ALIGNMENT).encode())
    _add(archive, "byteorder", sys.byteorder.encode())


def add_closing_records(archive: ZipImage, pickled: bytes) -> None:
    """The records behind the storages. The last has forty digits: any, torch needs them for usage statistics only."""
    number = int.from_bytes(hashlib.blake2b(pickled, digest_size=16).digest(), "little")
    _add(archive, "version", _ARCHIVE_VERSION)
    _add(archive, ".data/serialization_id", b"%040d" % number)


def storage_name(key: str) -> str:
    return f"archive/{STORAGE_PREFIX}{key}"


def alignment_of(nbytes: int) -> int:
    """A large tensor begins at a page, so that direct reads land in its memory."""
    return _PAGE_ALIGNMENT if nbytes >= _LARGE_BYTES else ALIGNMENT


def _add(archive: ZipImage, name: str, data: bytes) -> None:
    archive.add(f"archive/{name}", Block(len(data), data, ""), ALIGNMENT)
