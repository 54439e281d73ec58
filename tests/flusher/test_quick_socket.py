"""Socket calls that do not wait."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from datastates.flusher.quick_socket import Inbox, send_at_once

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield left, right
    left.close()
    right.close()


def test_packets_keep_their_bounds(pair: Pair) -> None:
    inbox = Inbox(100)
    for packet in (b"one", b"\0two\0", b"x" * 100):
        send_at_once(pair[0].fileno(), packet)
    assert [inbox.receive(pair[1].fileno()) for _ in range(3)] == [b"one", b"\0two\0", b"x" * 100]
    send_at_once(pair[0].fileno(), b"y" * 101)
    assert inbox.receive(pair[1].fileno()) == b"y" * 100, "cut, as with a buffer of that size"


def test_nothing_waits(pair: Pair) -> None:
    with pytest.raises(BlockingIOError):
        Inbox(10).receive(pair[1].fileno())
    with pytest.raises(BlockingIOError):
        for _ in range(100_000):
            send_at_once(pair[0].fileno(), b"z" * 1000)


def test_the_other_side_is_gone(pair: Pair) -> None:
    send_at_once(pair[0].fileno(), b"last")
    pair[0].close()
    inbox = Inbox(10)
    assert inbox.receive(pair[1].fileno()) == b"last"
    assert inbox.receive(pair[1].fileno()) == b""
    with pytest.raises(BrokenPipeError):
        send_at_once(pair[1].fileno(), b"no")
