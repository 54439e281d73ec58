"""Whether other processes of this machine read the same file at the same time, without a word to any of them.

Each reader binds a name made of the file's identity in the abstract namespace of Unix sockets, and looks whether others
are bound. The kernel forgets a name with its process: nothing can be stale, nobody waits for anybody, and nothing is
written anywhere. Source: unix(7), "Abstract sockets".
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time

GRACE_SECONDS = 0.25
"""So long a reader takes it that others are about to come: the ranks of a job do not begin in the same moment."""

MOST_READERS = 128
"""So many are looked for, each by a call of a microsecond or so per read: a launcher may name all ranks of the job."""

_CANNOT_TELL = frozenset({errno.EPERM, errno.EACCES, errno.EAFNOSUPPORT, errno.EMFILE, errno.ENFILE, errno.ENOBUFS})


class FellowReaders:
    """The other readers of one file. Thread safe."""

    def __init__(self, descriptor: int, limit: int) -> None:
        """Make this reader known.

        Args:
            descriptor: of the file; not kept.
            limit: so many readers there are at most, this one among them; more, and more than `MOST_READERS`, find no
                place and are not seen.
        """
        status = os.fstat(descriptor)
        identity = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
        self._prefix = f"\0datastates-read/{os.getuid()}/{'.'.join(f'{part:x}' for part in identity)}/"
        self._limit = min(limit, MOST_READERS)
        self._begin = time.monotonic()
        self._lock = threading.Lock()  # protects what follows
        self._socket: socket.socket | None = None
        self._place = -1
        self._take_place()

    def are_expected(self) -> bool:
        """Whether somebody else reads the file, or may be about to begin with it; does not block."""
        if time.monotonic() - self._begin < GRACE_SECONDS:
            return True
        with self._lock:
            own = self._socket
            if own is None:
                return False
            # a datagram socket may be connected again and again; that tells who is there, and sends nothing
            return any(own.connect_ex(self._name(place)) == 0 for place in range(self._limit) if place != self._place)

    def close(self) -> None:
        """Read no more; idempotent."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    def _name(self, place: int) -> str:
        return self._prefix + str(place)

    def _take_place(self) -> None:
        """Bind the first free name; without one, or where there are no sockets, nobody is seen and nobody sees us."""
        try:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError as error:
            if error.errno in _CANNOT_TELL:
                return
            raise
        for place in range(self._limit):
            try:
                made.bind(self._name(place))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                made.close()
                if error.errno in _CANNOT_TELL:
                    return
                raise
            self._socket, self._place = made, place
            return
        made.close()
