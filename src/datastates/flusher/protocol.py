"""The messages between trainer and flusher: one typed message per packet of a ``SOCK_SEQPACKET`` socket.

A packet is one byte that names the type and the body. Bodies of frequent messages and of tables are packed
little endian, the others are JSON. Whatever does not decode exactly is a `ProtocolError`.

========================  ==========================================================================
trainer to flusher        meaning
========================  ==========================================================================
`Begin`                   files of a checkpoint will follow
`OpenFile`                a file follows: `SealTable`, `Acknowledged` tables, then its slabs in order
`FlushSlab`               a slab is ready in the host cache
`Publish`                 give each file of the attempt its final name once it is durable
`Commit`                  the attempt's files are this rank's part of a checkpoint
`Abort`                   give the attempt up
`Prefault`                reserve the pages of the host cache
`Close`                   finish what is complete, then end
------------------------  --------------------------------------------------------------------------
flusher to trainer
------------------------  --------------------------------------------------------------------------
`Written`                 slabs are in their files; their memory may be used again
`Dropped`                 a slab is not needed any more; its memory may be used again
`Durable`, `FileFailed`   the end of a file
`Settled`                 the attempt was published or committed
`AttemptFailed`           the attempt was not, or was aborted
`Prefaulted`, `PrefaultFailed`  the answers to `Prefault`
`Carried`, `CarryFailed`  what becomes of carrying a checkpoint to a further tier
`Finished`                the answer to `Close`, where checkpoints are still being carried: all else is done
========================  ==========================================================================
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, ClassVar, TypeVar

from datastates.errors import ProtocolError
from datastates.plan import PackedSeals, Seal

MAX_MESSAGE_BYTES = 128 * 1024
"""Less than the default send buffer of a Unix socket (208 KiB), so that any message can be sent."""

MAX_TABLE_ROWS = 2048
"""Rows of a table per message: 48 KiB of seals."""

_MAX_TEXT_CHARS = 4096  # texts of errors are cut to this: a message must stay below the limit above


@dataclass(frozen=True, slots=True)
class Begin:
    """An attempt at a checkpoint: from now on its other ranks are told where this one does not complete its part."""

    attempt: str
    directory: str


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file begins.

    Attributes:
        file: number of the file, never used twice by one trainer.
        path: absolute final path; bytes that are no UTF-8 as surrogates.
        num_seals: rows of the seal tables that follow.
        num_acknowledged: rows of the acknowledged tables that follow: the slabs that an earlier flusher wrote.
        is_durable: an earlier flusher made the file durable; all slabs are acknowledged.
    """

    file: int
    attempt: str
    path: str
    nbytes: int
    slab_bytes: int
    num_seals: int
    num_acknowledged: int
    is_durable: bool
    check_free: bool


@dataclass(frozen=True, slots=True)
class SealTable:
    file: int
    seals: Sequence[Seal]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Slabs that an earlier flusher wrote: pairs of index and CRC-32."""

    file: int
    slabs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FlushSlab:
    FORMAT: ClassVar[str] = "<QQQQ"
    file: int
    index: int
    cache_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Publish:
    attempt: str


@dataclass(frozen=True, slots=True)
class Commit:
    attempt: str
    directory: str
    tag: str
    update_latest: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """Give an attempt up; the other ranks are told through `directory`, where it is not empty."""

    attempt: str
    cause: str
    directory: str


@dataclass(frozen=True, slots=True)
class Prefault:
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Close:
    pass


@dataclass(frozen=True, slots=True)
class WrittenSlab:
    """A row of `Written`. Times of ``CLOCK_MONOTONIC``: of the write."""

    file: int
    index: int
    cache_offset: int
    crc32: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Written:
    """At most `MAX_TABLE_ROWS` slabs: each message wakes the trainer, which has other things to do."""

    slabs: tuple[WrittenSlab, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    FORMAT: ClassVar[str] = "<QQQ"
    file: int
    index: int
    cache_offset: int


@dataclass(frozen=True, slots=True)
class Durable:
    FORMAT: ClassVar[str] = "<Q"
    file: int


@dataclass(frozen=True, slots=True)
class FileFailed:
    file: int
    message: str
    errno: int | None
    path: str


@dataclass(frozen=True, slots=True)
class Settled:
    attempt: str
    nbytes: int
    num_files: int


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt is lost.

    Attributes:
        ranks: cause by rank, where the checkpoint as a whole failed; empty where a file of this rank did.
    """

    attempt: str
    message: str
    errno: int | None
    path: str
    ranks: dict[str, str]


@dataclass(frozen=True, slots=True)
class Prefaulted:
    nbytes: int


@dataclass(frozen=True, slots=True)
class PrefaultFailed:
    message: str
    errno: int | None


@dataclass(frozen=True, slots=True)
class Carried:
    """A checkpoint is committed in a further tier. Times of ``CLOCK_MONOTONIC``."""

    attempt: str
    path: str
    tier: str
    nbytes: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class CarryFailed:
    """A checkpoint, or none in particular (then `attempt` is empty), could not be carried.

    Attributes:
        is_final: it is not tried again.
    """

    attempt: str
    path: str
    tier: str
    message: str
    begin: float
    end: float
    is_final: bool


@dataclass(frozen=True, slots=True)
class Finished:
    pass


Request = Begin | OpenFile | SealTable | Acknowledged | FlushSlab | Publish | Commit | Abort | Prefault | Close
Answer = (
    Written
    | Dropped
    | Durable
    | FileFailed
    | Settled
    | AttemptFailed
    | Prefaulted
    | PrefaultFailed
    | Carried
    | CarryFailed
    | Finished
)
Message = Request | Answer

_TYPES: tuple[type[Any], ...] = (
    OpenFile,
    SealTable,
    Acknowledged,
    FlushSlab,
    Publish,
    Commit,
    Abort,
    Prefault,
    Close,
    Written,
    Dropped,
    Durable,
    FileFailed,
    Settled,
    AttemptFailed,
    Prefaulted,
    PrefaultFailed,
    Carried,
    CarryFailed,
    Finished,
    Begin,
)
_CODES = {kind: code for code, kind in enumerate(_TYPES, start=1)}
_ROWS = {SealTable: PackedSeals.ROW, Acknowledged: struct.Struct("<QI"), Written: struct.Struct("<QQQIdd")}
_FILE = struct.Struct("<Q")


def encode(message: Message) -> bytes:
    """The packet of a message.

    Raises:
        ProtocolError: the message is longer than a packet may be.
    """
    packet = bytes((_CODES[type(message)],)) + _body(message)
    if len(packet) > MAX_MESSAGE_BYTES:
        name = type(message).__name__
        raise ProtocolError(f"a {name} of {len(packet)} bytes, at most {MAX_MESSAGE_BYTES} can be sent")
    return packet


def decode(packet: bytes) -> Message:
    """The message of a packet.

    Raises:
        ProtocolError: the packet is of no known type, or not exactly of its type's form.
    """
    if not packet or not 1 <= packet[0] <= len(_TYPES):
        raise ProtocolError(f"a packet of unknown type: {packet[:16]!r}")
    kind, body = _TYPES[packet[0] - 1], packet[1:]
    try:
        message: Message = _parse(kind, body)
    except (ValueError, TypeError, struct.error) as error:
        raise ProtocolError(f"a malformed {kind.__name__} of {len(packet)} bytes: {error}") from error
    return message


Row = TypeVar("Row")


def batches(rows: Sequence[Row]) -> list[Sequence[Row]]:
    """The rows of a table, cut so that each part fits into a message."""
    return [rows[first : first + MAX_TABLE_ROWS] for first in range(0, len(rows), MAX_TABLE_ROWS)]


def shortened(text: str) -> str:
    """A text of an error, cut so that it fits into a message."""
    return text if len(text) <= _MAX_TEXT_CHARS else text[: _MAX_TEXT_CHARS - 4] + " ..."


def _body(message: Message) -> bytes:
    if isinstance(message, SealTable):
        return _FILE.pack(message.file) + PackedSeals.of(message.seals).packed
    if isinstance(message, Acknowledged):
        return _FILE.pack(message.file) + b"".join(starmap(_ROWS[Acknowledged].pack, message.slabs))
    if isinstance(message, Written):
        return b"".join(_ROWS[Written].pack(*dataclasses.astuple(slab)) for slab in message.slabs)
    if isinstance(message, (FlushSlab, Dropped, Durable)):
        return struct.pack(message.FORMAT, *dataclasses.astuple(message))
    return json.dumps(dataclasses.asdict(message), separators=(",", ":")).encode("ascii")


def _parse(kind: type[Any], body: bytes) -> Any:
    if kind is Written:
        return Written(tuple(WrittenSlab(*row) for row in _ROWS[Written].iter_unpack(body)))
    if kind in _ROWS:
        (file,) = _FILE.unpack_from(body)
        rows = tuple(_ROWS[kind].iter_unpack(body[_FILE.size :]))
        return SealTable(file, tuple(map(Seal._make, rows))) if kind is SealTable else Acknowledged(file, rows)
    if issubclass(kind, (FlushSlab, Dropped, Durable)):
        return kind(*struct.unpack(kind.FORMAT, body))
    fields = json.loads(body)
    if not isinstance(fields, dict):
        raise TypeError("the body is no JSON object")
    message = kind(**fields)
    for field in dataclasses.fields(kind):
        if not _is_of(getattr(message, field.name), str(field.type)):
            raise TypeError(f"{field.name} is {getattr(message, field.name)!r}, expected {field.type}")
    return message


def _is_of(value: object, annotation: str) -> bool:
    if annotation == "int":
        return type(value) is int and value >= 0
    if annotation == "int | None":
        return value is None or type(value) is int
    if annotation == "dict[str, str]":
        return isinstance(value, dict) and all(isinstance(item, str) for pair in value.items() for item in pair)
    return type(value).__name__ == annotation
