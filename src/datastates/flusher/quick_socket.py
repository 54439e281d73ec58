"""Socket calls that keep the GIL: they do not wait, and giving it away would cost more than the call.

Where training is busy with Python, a thread that lets go of the GIL waits five milliseconds to get it back, and slows
training down each time.
"""

from __future__ import annotations

import ctypes
import os
import socket

_libc = ctypes.PyDLL(None, use_errno=True)
_send, _recv = _libc.send, _libc.recv
for _call in (_send, _recv):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


def send_at_once(descriptor: int, packet: bytes) -> None:
    """Send one packet without waiting.

    Raises:
        BlockingIOError: there is no room for it now.
        OSError: BrokenPipeError or ConnectionError where nobody reads any more.

    Source: send(2).
    """
    _checked(_send(descriptor, packet, len(packet), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL))


class Inbox:
    """Receives packets into one buffer, again and again. Not thread safe."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: what a longer packet is cut to."""
        self._buffer = ctypes.create_string_buffer(max_bytes)

    def receive(self, descriptor: int) -> bytes:
        """The next packet, without waiting; empty at the end.

        Raises:
            BlockingIOError: there is none now.
            OSError: ConnectionResetError where the other side has died without reading all.

        Source: recv(2).
        """
        length = _checked(_recv(descriptor, self._buffer, len(self._buffer), socket.MSG_DONTWAIT))
        return ctypes.string_at(self._buffer, length)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)
