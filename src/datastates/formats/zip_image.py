"""A stored (uncompressed) zip archive as a byte image, with the CRC-32 of every entry.

Each entry is a local header, its data, and a data descriptor behind it; CRCs of entries that are copied later
are seals in the descriptor and in the central directory.
Source: PKWARE APPNOTE 6.3.10, sections 4.3 and 4.5.3; layout and flags as in the archives of ``torch.save``.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from datastates.checksum import crc32
from datastates.formats.image import Block, Image

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL_HEAD = struct.Struct("<4s6H")
_CENTRAL_TAIL = struct.Struct("<2I5H2I")
_EOCD64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_EOCD = struct.Struct("<4s4H2IH")

_UINT16_MAX = 0xFFFF
_UINT32_MAX = 0xFFFFFFFF
_UTF8 = 0x0800
_HAS_DESCRIPTOR = 0x0008
_VERSION = 20
_VERSION_ZIP64 = 45

DESCRIPTOR_BEGIN = b"PK\7\x08"
DESCRIPTOR_NBYTES = 16  # its begin, the CRC, and two sizes

_MIN_PADDING = 4  # an extra field is at least its own id and length


@dataclass(frozen=True, slots=True)
class Entry:
    """What the central directory says of an entry."""

    name: bytes
    header_offset: int
    data_begin: int
    nbytes: int
    crc: int | None  # None: a seal
    flags: int


class ZipImage:
    """Lays entries into an image one after the other; `finish` adds the central directory.

    Attributes:
        entries: those laid so far, in order.
    """

    def __init__(self, image: Image) -> None:
        self.entries: list[Entry] = []
        self._image = image

    def add(self, name: str, block: Block, alignment: int, begin: int | None = None) -> None:
        """Append an entry whose data begins at a multiple of ``alignment`` (at most 32 KiB), or at ``begin``.

        Raises:
            ValueError: the header does not end at ``begin``, or leaves more than an extra field can fill.
        """
        image, encoded, nbytes = self._image, name.encode(), block.nbytes
        header_offset = image.nbytes
        is_large = nbytes >= _UINT32_MAX
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if is_large else b""
        unpadded = header_offset + _LOCAL.size + len(encoded) + len(extra) + _MIN_PADDING
        padding = -unpadded % alignment if begin is None else begin - unpadded
        if not 0 <= padding <= _UINT16_MAX - len(extra) - _MIN_PADDING:
            raise ValueError(f"{name}: {padding} bytes of padding do not fit into its header")
        flags = _UTF8 | _HAS_DESCRIPTOR if nbytes else _UTF8
        extra += _padding(padding)
        image.literal(_local(flags, is_large, len(encoded), len(extra)) + encoded + extra)
        entry = Entry(encoded, header_offset, image.nbytes, nbytes, _known_crc(block), flags)
        image.block(block)
        self.entries.append(entry)
        if nbytes:
            self._descriptor(entry, is_large)

    def finish(self) -> None:
        """Append the central directory and the end records."""
        begin = self._image.nbytes
        for entry in self.entries:
            write_central(self._image, entry)
        write_end(self._image, len(self.entries), begin, self._image.nbytes - begin)

    def _descriptor(self, entry: Entry, is_large: bool) -> None:
        self._image.literal(DESCRIPTOR_BEGIN)
        _write_crc(self._image, entry)
        self._image.literal(struct.pack("<QQ" if is_large else "<II", entry.nbytes, entry.nbytes))


@functools.lru_cache
def _local(flags: int, is_large: bool, name_nbytes: int, extra_nbytes: int) -> bytes:
    """The fixed part of a local header."""
    size, version = (_UINT32_MAX, _VERSION_ZIP64) if is_large else (0, _VERSION)
    return _LOCAL.pack(b"PK\3\4", version, flags, 0, 0, 0, 0, size, size, name_nbytes, extra_nbytes)


@functools.lru_cache
def _padding(nbytes: int) -> bytes:
    """An extra field of so many bytes behind its own id and length."""
    return b"FB" + nbytes.to_bytes(2, "little") + b"Z" * nbytes


@functools.lru_cache
def _central_head(version: int, flags: int) -> bytes:
    return _CENTRAL_HEAD.pack(b"PK\1\2", version, version, flags, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class SmallEntries:
    """Entries behind one another, each but for its data and its CRC-32, as `ZipImage.add` would lay them.

    Attributes:
        headers: local header of each; its data follows.
        descriptors: what follows the data and ``DESCRIPTOR_BEGIN`` and the CRC.
        records: what follows ``central_begin`` and the CRC in the central directory.
        end: where the next entry begins.
    """

    headers: list[bytes]
    descriptors: list[bytes]
    records: list[bytes]
    end: int

    #: What every record in the central directory begins with, up to the CRC.
    central_begin: ClassVar[bytes] = _CENTRAL_HEAD.pack(b"PK\1\2", _VERSION, _VERSION, _UTF8 | _HAS_DESCRIPTOR, 0, 0, 0)


def small_entries(names: Sequence[str], sizes: Sequence[int], begin: int, alignment: int) -> SmallEntries | None:
    """Lay out many entries fast; None where one of them, or its offset, needs the zip64 form, or all would be none."""
    encoded = [name.encode() for name in names]
    overhead = _LOCAL.size + _MIN_PADDING + alignment + DESCRIPTOR_NBYTES
    if not encoded or begin + sum(sizes) + sum(map(len, encoded)) + overhead * len(encoded) >= _UINT32_MAX:
        return None
    headers, descriptors, records = [], [], []
    flags, pack_tail = _UTF8 | _HAS_DESCRIPTOR, _CENTRAL_TAIL.pack
    around: dict[tuple[int, int], tuple[bytes, bytes]] = {}  # what is before and behind the name in a header
    behind = {nbytes: struct.pack("<II", nbytes, nbytes) for nbytes in set(sizes)}
    position = begin
    for name, nbytes in zip(encoded, sizes, strict=True):
        length = len(name)
        unpadded = position + _LOCAL.size + length + _MIN_PADDING
        padding = -unpadded % alignment
        parts = around.get((length, padding))
        if parts is None:
            local = _local(flags, False, length, padding + _MIN_PADDING)
            parts = around[length, padding] = local, _padding(padding)
        headers.append(parts[0] + name + parts[1])
        descriptors.append(behind[nbytes])
        records.append(pack_tail(nbytes, nbytes, length, 0, 0, 0, 0, 0, position) + name)
        position = unpadded + padding + nbytes + DESCRIPTOR_NBYTES
    return SmallEntries(headers, descriptors, records, position)


def write_central(image: Image, entry: Entry) -> None:
    """Append the record of an entry in the central directory."""
    size, offset, extra = entry.nbytes, entry.header_offset, b""
    if size >= _UINT32_MAX:
        extra, size = struct.pack("<QQ", size, size), _UINT32_MAX
    if offset >= _UINT32_MAX:
        extra, offset = extra + struct.pack("<Q", offset), _UINT32_MAX
    version = _VERSION_ZIP64 if extra else _VERSION
    if extra:
        extra = struct.pack("<HH", 1, len(extra)) + extra
    image.literal(_central_head(version, entry.flags))
    _write_crc(image, entry)
    tail = _CENTRAL_TAIL.pack(size, size, len(entry.name), len(extra), 0, 0, 0, 0, offset)
    image.literal(tail + entry.name + extra)


def write_end(image: Image, count: int, begin: int, nbytes: int) -> None:
    """Append the records behind a central directory, with zip64 forms only where they are needed.

    Args:
        image: ends with the directory.
        count: how many entries it has.
        begin: its offset.
        nbytes: its length.
    """
    if count >= _UINT16_MAX or begin >= _UINT32_MAX or nbytes >= _UINT32_MAX:
        position, version = image.nbytes, _VERSION_ZIP64
        image.literal(_EOCD64.pack(b"PK\6\6", 44, version, version, 0, 0, count, count, nbytes, begin))
        image.literal(_LOCATOR64.pack(b"PK\6\7", 0, position, 1))
    count16 = min(count, _UINT16_MAX)
    sizes = min(nbytes, _UINT32_MAX), min(begin, _UINT32_MAX)
    image.literal(_EOCD.pack(b"PK\5\6", 0, 0, count16, count16, *sizes, 0))


def _write_crc(image: Image, entry: Entry) -> None:
    if entry.crc is None:
        image.seal(entry.data_begin, entry.data_begin + entry.nbytes)
    else:
        image.literal(entry.crc.to_bytes(4, "little"))


def _known_crc(block: Block) -> int | None:
    return crc32(block.source) if block.is_literal else None
