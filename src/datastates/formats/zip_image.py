"""A stored (uncompressed) zip archive as a byte image, with the CRC-32 of every entry.

Each entry is a local header, its data, and a data descriptor behind it; CRCs of entries that are copied later
are seals in the descriptor and in the central directory.
Source: PKWARE APPNOTE 6.3.10, sections 4.3 and 4.5.3; layout and flags as in the archives of ``torch.save``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from datastates.checksum import crc32
from datastates.formats.image import Block, ImageBuilder

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
_MIN_PADDING = 4  # an extra field is at least its own id and length


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    header_offset: int
    data_begin: int
    nbytes: int
    crc: int | None  # None: a seal
    flags: int


class ZipImage:
    """Lays entries into an image one after the other; `finish` adds the central directory."""

    def __init__(self, image: ImageBuilder) -> None:
        self._image = image
        self._entries: list[_Entry] = []

    def add(self, name: str, block: Block, alignment: int) -> None:
        """Append an entry whose data begins at a multiple of ``alignment`` (at most 32 KiB)."""
        image, encoded, nbytes = self._image, name.encode(), block.nbytes
        header_offset = image.nbytes
        is_large = nbytes >= _UINT32_MAX
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if is_large else b""
        unpadded = header_offset + _LOCAL.size + len(encoded) + len(extra) + _MIN_PADDING
        padding = -unpadded % alignment
        flags = _UTF8 | _HAS_DESCRIPTOR if nbytes else _UTF8
        size, version = (_UINT32_MAX, _VERSION_ZIP64) if is_large else (0, _VERSION)
        extra += b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        local = _LOCAL.pack(b"PK\3\4", version, flags, 0, 0, 0, 0, size, size, len(encoded), len(extra))
        image.literal(local + encoded + extra)
        entry = _Entry(encoded, header_offset, image.nbytes, nbytes, _known_crc(block), flags)
        image.block(block)
        self._entries.append(entry)
        if nbytes:
            self._descriptor(entry, is_large)

    def finish(self) -> None:
        """Append the central directory and the end records, with zip64 forms only where they are needed."""
        image, begin, count = self._image, self._image.nbytes, len(self._entries)
        for entry in self._entries:
            self._central(entry)
        nbytes = image.nbytes - begin
        if count >= _UINT16_MAX or begin >= _UINT32_MAX or nbytes >= _UINT32_MAX:
            position = image.nbytes
            version = _VERSION_ZIP64
            image.literal(_EOCD64.pack(b"PK\6\6", 44, version, version, 0, 0, count, count, nbytes, begin))
            image.literal(_LOCATOR64.pack(b"PK\6\7", 0, position, 1))
        count16 = min(count, _UINT16_MAX)
        sizes = min(nbytes, _UINT32_MAX), min(begin, _UINT32_MAX)
        image.literal(_EOCD.pack(b"PK\5\6", 0, 0, count16, count16, *sizes, 0))

    def _descriptor(self, entry: _Entry, is_large: bool) -> None:
        self._image.literal(b"PK\7\x08")
        self._crc(entry)
        self._image.literal(struct.pack("<QQ" if is_large else "<II", entry.nbytes, entry.nbytes))

    def _central(self, entry: _Entry) -> None:
        size, offset, extra = entry.nbytes, entry.header_offset, b""
        if size >= _UINT32_MAX:
            extra, size = struct.pack("<QQ", size, size), _UINT32_MAX
        if offset >= _UINT32_MAX:
            extra, offset = extra + struct.pack("<Q", offset), _UINT32_MAX
        version = _VERSION_ZIP64 if extra else _VERSION
        if extra:
            extra = struct.pack("<HH", 1, len(extra)) + extra
        self._image.literal(_CENTRAL_HEAD.pack(b"PK\1\2", version, version, entry.flags, 0, 0, 0))
        self._crc(entry)
        tail = _CENTRAL_TAIL.pack(size, size, len(entry.name), len(extra), 0, 0, 0, 0, offset)
        self._image.literal(tail + entry.name + extra)

    def _crc(self, entry: _Entry) -> None:
        if entry.crc is None:
            self._image.seal(entry.data_begin, entry.data_begin + entry.nbytes)
        else:
            self._image.literal(entry.crc.to_bytes(4, "little"))


def _known_crc(block: Block) -> int | None:
    return crc32(block.source) if block.is_literal else None
