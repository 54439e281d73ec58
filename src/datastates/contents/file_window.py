"""A part of an open file, as a file of its own: archives may stand behind one another."""

from __future__ import annotations

from datastates.errors import CorruptCheckpointError
from datastates.reading import FileReader


class FileWindow(FileReader):
    """``nbytes`` bytes of a file from ``begin`` on, for small reads; offsets count from there. Never closed itself."""

    def __init__(self, file: FileReader, begin: int, nbytes: int) -> None:
        """Args:
        file: open; stays the caller's.
        begin: first byte.
        nbytes: how many there are.
        """
        self.path = file.path
        self.nbytes = nbytes
        self._file = file
        self._begin = begin

    def read(self, begin: int, nbytes: int) -> bytes:
        """A few bytes.

        Raises:
            CorruptCheckpointError: the window, or the file, ends before.
            StorageError: the device or file system fails.
        """
        if begin + nbytes > self.nbytes:
            message = f"{self.path}: a part of {self.nbytes} bytes at {self._begin} ends before {begin + nbytes}"
            raise CorruptCheckpointError(message, self.path, offset=self._begin + self.nbytes)
        return self._file.read(self._begin + begin, nbytes)
