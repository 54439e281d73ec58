"""Files of somebody else's that become part of a checkpoint, byte for byte.

What a framework has swapped out to local storage belongs to the state. Such a file is a source like a tensor: its
bytes are read by the staging thread, and it must not change before the fence is closed.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref

from datastates.errors import StorageError, TornSnapshotError
from datastates.plan import FilePlan, Segment
from datastates.system_calls import patiently, storage_errors


class SideFile:
    """An open file whose bytes are read later; closed when nobody refers to it any more.

    A file that is deleted or replaced meanwhile is still the one that was opened. One that is written to is noticed by
    its size and time of modification, as far as the file system keeps them.
    """

    def __init__(self, path: str) -> None:
        """Open the file. Raises StorageError: it cannot be read, or is no regular file."""
        self.path = path
        with storage_errors("read", path):
            self._descriptor = patiently(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            weakref.finalize(self, os.close, self._descriptor)
            status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{path} is no regular file: it cannot be saved", errno.EINVAL, path)
        self.nbytes = status.st_size
        self._expected = status.st_size, status.st_mtime_ns

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Read the bytes from ``offset`` on until ``memory`` is full; blocks for storage.

        Raises:
            StorageError: the file cannot be read.
            TornSnapshotError: it was written to since it was opened.
        """
        begin, end = offset, offset + memory.nbytes
        with storage_errors("read", self.path):
            while begin < end:
                count = patiently(os.preadv, self._descriptor, [memory[begin - offset :]], begin)
                if not count:
                    break
                begin += count
            # what is read once need not crowd out what the training reads
            os.posix_fadvise(self._descriptor, offset, memory.nbytes, os.POSIX_FADV_DONTNEED)
            status = os.fstat(self._descriptor)
        if begin < end or (status.st_size, status.st_mtime_ns) != self._expected:
            message = f"{self.path} was written to between save() and its copy; call wait() before that"
            raise TornSnapshotError(message, (self.path,))


def plan_side_file(path: str) -> FilePlan:
    """The image of a file that holds what ``path`` holds. Raises StorageError."""
    source = SideFile(path)
    segments = (Segment(0, source.nbytes, source, path),) if source.nbytes else ()
    return FilePlan("raw", source.nbytes, segments)
