"""Every message survives the wire; anything else is an error."""

from __future__ import annotations

import pytest

from datastates.errors import ProtocolError
from datastates.flusher.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_TABLE_ROWS,
    Abort,
    Acknowledged,
    AttemptFailed,
    Begin,
    Close,
    Commit,
    Dropped,
    Durable,
    FileFailed,
    FlushSlab,
    Message,
    OpenFile,
    Prefault,
    Prefaulted,
    PrefaultFailed,
    Publish,
    SealTable,
    Settled,
    Written,
    WrittenSlab,
    batches,
    decode,
    encode,
    shortened,
)
from datastates.plan import Seal

MESSAGES: list[Message] = [
    Begin("a-1", "/d"),
    OpenFile(1, "a-1", "/tmp/\udcff.bin", 2**40, 2**24, 3, 4, True, False),
    SealTable(2**40, tuple(Seal(i + 9, i, i + 1) for i in range(MAX_TABLE_ROWS))),
    SealTable(1, ()),
    Acknowledged(1, tuple((i, 2**32 - 1) for i in range(MAX_TABLE_ROWS))),
    FlushSlab(1, 2, 3, 4),
    Publish("a-1"),
    Commit("a-1", "/d", "tag", True),
    Abort("a-1", "why", ""),
    Prefault(5),
    Close(),
    Written((WrittenSlab(1, 2, 3, 4, 0.25, 1.5), WrittenSlab(2**63, 5, 6, 2**32 - 1, 0.5, 2.5))),
    Written(tuple(WrittenSlab(1, index, 3, 4, 0.25, 1.5) for index in range(MAX_TABLE_ROWS))),
    Dropped(1, 2, 3),
    Durable(1),
    FileFailed(1, "message\n", None, "/p"),
    Settled("a-1", 10, 2),
    AttemptFailed("a-1", "m", 28, "/p", {"1": "c"}),
    Prefaulted(1),
    PrefaultFailed("m", 12),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    packet = encode(message)
    assert len(packet) <= MAX_MESSAGE_BYTES
    assert decode(packet) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_cut_packet(message: Message) -> None:
    packet = encode(message)
    if len(packet) > 9 or not isinstance(message, SealTable):
        with pytest.raises(ProtocolError):
            decode(packet[:-1])


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\x00",
        b"\xff{}",
        encode(Publish("a"))[:1] + b"[]",
        encode(Publish("a"))[:1] + b'{"attempt":1}',
        encode(Publish("a"))[:1] + b'{"attempt":"a","more":1}',
        encode(Publish("a"))[:1] + b"{}",
        encode(Prefault(1))[:1] + b'{"chunk_bytes":-1}',
        encode(Prefault(1))[:1] + b'{"chunk_bytes":true}',
        encode(Close()) + b"x",
        encode(Durable(1)) + b"x",
    ],
)
def test_malformed(packet: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(packet)


def test_too_long() -> None:
    with pytest.raises(ProtocolError, match="can be sent"):
        encode(Publish("a" * MAX_MESSAGE_BYTES))
    assert len(shortened("x" * MAX_MESSAGE_BYTES)) <= 4096


def test_batches() -> None:
    rows = tuple(range(MAX_TABLE_ROWS + 1))
    assert batches(rows) == [rows[:-1], rows[-1:]]
    assert batches(()) == []
