"""The bytes of a committed file, read back and compared with its checksums on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator

from datastates.checksum import crc32
from datastates.errors import CorruptCheckpointError
from datastates.manifest import FileRecord
from datastates.reading import FileReader, fresh_memory, page_ceil


def checked_pieces(directory: str, file: FileRecord) -> Iterator[memoryview]:
    """The bytes of a file in order, slab by slab, each in memory of its own that whoever takes it may keep.

    Raises:
        CheckpointNotFoundError: the file is not there.
        CorruptCheckpointError: its size is not that of its record, or a slab's checksum is wrong; nothing of that slab
            was given.
        StorageError: it cannot be read.
    """
    path = os.path.join(directory, file.name)
    with FileReader(path) as reader:
        if reader.nbytes != file.nbytes:
            message = f"{path}: {reader.nbytes} bytes found, {file.nbytes} expected by its manifest"
            raise CorruptCheckpointError(message, path, offset=min(reader.nbytes, file.nbytes))
        for begin, expected in zip(range(0, file.nbytes, file.slab_nbytes), file.crc32, strict=True):
            nbytes = min(file.slab_nbytes, file.nbytes - begin)
            view = memoryview(fresh_memory(page_ceil(nbytes)))
            reader.fill(view, begin, nbytes)
            piece = view[:nbytes]
            check_piece(path, begin, piece, expected)
            yield piece


def check_piece(path: str, begin: int, piece: memoryview | bytes, expected: int) -> None:
    """Compare a slab with its checksum. Raises CorruptCheckpointError."""
    found = crc32(piece)
    if found != expected:
        message = f"{path}: bytes {begin} to {begin + len(piece)} have CRC-32 {found:08x}, expected {expected:08x}"
        raise CorruptCheckpointError(message, path, offset=begin)
