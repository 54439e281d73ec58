"""The directory of a zip archive, read and checked clause by clause.

Source: PKWARE APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16 (end
records), 4.5.3 (zip64).
"""

from __future__ import annotations

import bisect
import struct
from dataclasses import dataclass

from datastates.checksum import crc32
from datastates.errors import CorruptCheckpointError
from datastates.reading import FileReader

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_EOCD = struct.Struct("<4s4H2IH")
_EOCD64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")

_UINT32_MAX = 0xFFFFFFFF
_STORED = 0
_ENCRYPTED = 0x0001
_ZIP64_ID = 1
_LONGEST_COMMENT_BYTES = 65535
_WINDOW_BYTES = 64 << 10  # local headers so near each other are read together
_TAIL_BYTES = _EOCD.size + _LOCATOR64.size
_HEADER_BYTES = 512  # a local header with its name, as a rule


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One file of the archive, as its central directory describes it.

    Attributes:
        name: without the name of the archive in front.
        header_begin: offset of its local header.
        stored_nbytes: bytes in the file.
        nbytes: bytes of its content; as many where it is stored.
        crc32: of its content; 0 also where whoever wrote it did not compute it (``set_crc32_options(False)`` and
            ``skip_data`` of ``torch.serialization``).
        is_stored: neither compressed nor encrypted.
    """

    name: str
    header_begin: int
    stored_nbytes: int
    nbytes: int
    crc32: int
    is_stored: bool

    @property
    def is_checkable(self) -> bool:
        return self.is_stored and (self.crc32 != 0 or self.nbytes == 0)


class ZipDirectory:
    """The entries of an archive of ``torch.save`` by name, in the order of the file.

    Attributes:
        entries: by name, without the name of the archive in front.
        begin: offset of the central directory.
    """

    def __init__(self, file: FileReader) -> None:
        """Read the directory.

        Raises:
            CorruptCheckpointError: the file is cut or prolonged, entries are double or overlap, or lie outside.
            StorageError: the file cannot be read.
        """
        self._file = file
        self._window = b""
        self._window_begin = 0
        count, nbytes, self.begin = _find_directory(file)
        entries = list(_parse(file.read(self.begin, nbytes), count, self.begin, file.path))
        entries.sort(key=lambda entry: entry.header_begin)
        self._begins = [entry.header_begin for entry in entries]
        self.entries = {entry.name: entry for entry in entries}
        if len(self.entries) != len(entries):
            names = [entry.name for entry in entries]
            double = next(name for name in names if names.count(name) > 1)
            raise _corrupt(file.path, f"the directory names {double!r} twice", self.begin)
        self._ends = self._checked_ends(entries)

    def data_begin(self, entry: ZipEntry) -> int:
        """Offset of the content of an entry, from its local header. Quick for entries asked for in order.

        Raises:
            CorruptCheckpointError: there is no header of that entry.
        """
        last = self._begins[bisect.bisect_right(self._begins, entry.header_begin + _WINDOW_BYTES) - 1]
        header = self._near(entry.header_begin, _LOCAL.size, last - entry.header_begin + _HEADER_BYTES)
        fields = _LOCAL.unpack(header)
        if fields[0] != b"PK\3\4":
            raise self._bad_header(entry, f"begins with {fields[0]!r}")
        name_nbytes, extra_nbytes = int(fields[9]), int(fields[10])
        name = self._near(entry.header_begin + _LOCAL.size, name_nbytes, 0)
        if name.partition(b"/")[2] != entry.name.encode():
            raise self._bad_header(entry, f"is that of {name!r}")
        begin = entry.header_begin + _LOCAL.size + name_nbytes + extra_nbytes
        if begin + entry.stored_nbytes > self._ends[entry.name]:
            raise self._bad_header(entry, f"leaves no room for {entry.stored_nbytes} bytes")
        return begin

    def content(self, name: str) -> bytes:
        """The content of a small entry, compared with its checksum.

        Raises:
            CorruptCheckpointError: there is no such entry, it is compressed, or damaged.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise _corrupt(self._file.path, f"the archive has no entry {name}", self.begin)
        if not entry.is_stored:
            raise _corrupt(self._file.path, f"the entry {name} is compressed", entry.header_begin)
        begin = self.data_begin(entry)
        data = self._file.read(begin, entry.nbytes)
        if entry.is_checkable and crc32(data) != entry.crc32:
            raise _corrupt(
                self._file.path,
                f"the checksum of its entry {name!r} does not match: expected {entry.crc32:08x}, "
                f"found {crc32(data):08x}",
                begin,
            )
        return data

    def _checked_ends(self, entries: list[ZipEntry]) -> dict[str, int]:
        """By name where the next part begins, at the latest the directory: before that each entry has to end."""
        ends: dict[str, int] = {}
        following = [*(entry.header_begin for entry in entries[1:]), self.begin]
        for entry, end in zip(entries, following, strict=False):
            if entry.header_begin + _LOCAL.size + entry.stored_nbytes > end:
                raise _corrupt(
                    self._file.path,
                    f"the entry {entry.name!r} of {entry.stored_nbytes} bytes at {entry.header_begin} reaches beyond "
                    f"{end}, where the next part begins",
                    entry.header_begin,
                )
            ends[entry.name] = end
        return ends

    def _near(self, begin: int, nbytes: int, reach: int) -> bytes:
        """Bytes of the file, several small reads near each other made as one of ``reach`` bytes."""
        first = begin - self._window_begin
        if first < 0 or first + nbytes > len(self._window):
            size = max(nbytes, min(reach, self.begin - begin))
            self._window, self._window_begin, first = self._file.read(begin, size), begin, 0
        return self._window[first : first + nbytes]

    def _bad_header(self, entry: ZipEntry, what: str) -> CorruptCheckpointError:
        return _corrupt(self._file.path, f"the header of the entry {entry.name!r} {what}", entry.header_begin)


def _find_directory(file: FileReader) -> tuple[int, int, int]:
    """Number of entries, size and offset of the central directory, which must end where the end records begin."""
    for nbytes in (_TAIL_BYTES, _EOCD.size + _LONGEST_COMMENT_BYTES):  # torch writes no comment behind the record
        begin = max(file.nbytes - nbytes, 0)
        tail = file.read(begin, file.nbytes - begin)
        found = tail.rfind(b"PK\5\6")
        if found >= 0:
            break
    if found < 0 or found + _EOCD.size > len(tail):
        message = f"the archive has no end record within its {file.nbytes} bytes; the file is incomplete"
        raise _corrupt(file.path, message, file.nbytes)
    position = begin + found
    extra = file.nbytes - position - _EOCD.size
    if extra:
        message = (
            f"the archive ends at byte {position + _EOCD.size}, the file has {file.nbytes}: {extra} bytes too many"
        )
        raise _corrupt(file.path, message, position + _EOCD.size)
    record = _EOCD.unpack_from(tail, found)
    count, nbytes, offset, end = record[4], record[5], record[6], position
    locator = tail[max(found - _LOCATOR64.size, 0) : found]
    if locator.startswith(b"PK\6\7") and len(locator) == _LOCATOR64.size:
        count, nbytes, offset, end = _read_end64(file, position, locator)
    if offset + nbytes != end:
        raise _corrupt(
            file.path,
            f"the directory should end at byte {end}, its record says {offset + nbytes}; bytes are missing from or "
            f"were added to the {file.nbytes} of the file",
            end,
        )
    return count, nbytes, offset


def _read_end64(file: FileReader, position: int, locator: bytes) -> tuple[int, int, int, int]:
    """The zip64 forms of the same, and where their record begins."""
    begin = _LOCATOR64.unpack(locator)[2]
    expected = position - _LOCATOR64.size - _EOCD64.size
    if begin != expected or begin < 0:
        raise _corrupt(
            file.path,
            f"the zip64 record should begin at byte {expected}, its locator says {begin}; bytes are missing from or "
            f"were added to the {file.nbytes} of the file",
            position - _LOCATOR64.size,
        )
    record = _EOCD64.unpack(file.read(begin, _EOCD64.size))
    if record[0] != b"PK\6\6":
        raise _corrupt(file.path, f"the zip64 record begins with {record[0]!r}", begin)
    return record[7], record[8], record[9], begin


def _parse(data: bytes, count: int, begin: int, path: str) -> list[ZipEntry]:
    entries: list[ZipEntry] = []
    position = 0
    while position < len(data):
        if position + _CENTRAL.size > len(data):
            raise _corrupt(path, "the directory is cut", begin + position)
        fields = _CENTRAL.unpack_from(data, position)
        if fields[0] != b"PK\1\2":
            raise _corrupt(path, f"an entry of the directory begins with {fields[0]!r}", begin + position)
        name_end = position + _CENTRAL.size + fields[10]
        extra_end = name_end + fields[11]
        name, extra = data[position + _CENTRAL.size : name_end], data[name_end:extra_end]
        entries.append(_entry(fields, name, extra, begin + position, path))
        position = extra_end + fields[12]
    if position != len(data) or len(entries) != count:
        message = (
            f"the directory holds {len(entries)} entries in {position} bytes, its record says {count} in {len(data)}"
        )
        raise _corrupt(path, message, begin)
    return entries


def _entry(fields: tuple[int, ...], raw_name: bytes, extra: bytes, position: int, path: str) -> ZipEntry:
    try:
        name = raw_name.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _corrupt(path, f"the name {raw_name!r} of an entry is not UTF-8", position) from error
    sizes = _wide((fields[9], fields[8], fields[16]), extra, position, path)
    nbytes, stored_nbytes, header_begin = sizes
    is_stored = fields[4] == _STORED and not fields[3] & _ENCRYPTED
    if is_stored and nbytes != stored_nbytes:
        raise _corrupt(path, f"the entry {name!r} has {nbytes} bytes and takes {stored_nbytes}", position)
    return ZipEntry(name.partition("/")[2], header_begin, stored_nbytes, nbytes, fields[7], is_stored)


def _wide(narrow: tuple[int, int, int], extra: bytes, position: int, path: str) -> tuple[int, int, int]:
    """Sizes and offset, those that are too large for 32 bits from the zip64 extra field."""
    if _UINT32_MAX not in narrow:
        return narrow
    first = 0
    while first + 4 <= len(extra):
        identity, length = struct.unpack_from("<HH", extra, first)
        field = extra[first + 4 : first + 4 + length]
        first += 4 + length
        if identity == _ZIP64_ID:
            values = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            wide = [next(values, None) if value == _UINT32_MAX else value for value in narrow]
            if None not in wide:
                return wide[0] or 0, wide[1] or 0, wide[2] or 0
    raise _corrupt(path, "an entry of the directory lacks its zip64 sizes", position)


def _corrupt(path: str, what: str, offset: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path} cannot be loaded: {what}", path, offset=offset)
