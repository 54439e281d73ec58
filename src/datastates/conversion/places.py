"""Where a conversion may put its result, and results that are one file."""

from __future__ import annotations

import errno
import os
import time

from datastates.errors import StorageError
from datastates.storage import create_partial
from datastates.universal.building import Conversion, Progress
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.writing import OutFile, write

_ATTEMPT = "conversion"


def check_place(source: str, out: str, force: bool) -> None:
    """Refuse a place that is taken, that the source lies in, or that lies in the source.

    Args:
        source: absolute path of what is converted.
        out: absolute path of the result.
        force: what is there may be replaced.

    Raises:
        StorageError: it is refused.
    """
    inner, outer = os.path.realpath(source), os.path.realpath(out)
    if inner == outer or inner.startswith(outer + os.sep):
        raise StorageError(f"{out} is, or holds, the source {source}: choose another place", errno.EINVAL, out)
    if outer.startswith(inner + os.sep):
        raise StorageError(f"{out} lies in the source {source}: choose another place", errno.EINVAL, out)
    if os.path.lexists(out) and not force:
        raise StorageError(
            f"{out} is there already: choose another place, or replace it with force=True (--force)", errno.EEXIST, out
        )


def write_one(
    file: OutFile, path: str, files: MappedFiles, *, force: bool, num_items: int, progress: Progress | None
) -> Conversion:
    """Write one file that appears whole or not at all, durable. Blocks.

    Args:
        file: what to write; its name is not used, its ``nbytes`` is about how much it will be.
        path: where, absolute.
        files: has loaded all sources.
        force: replace what is there.
        num_items: of what it consists, for the result.
        progress: called with the bytes written so far and those in all.

    Raises:
        StorageError: there is no room, a folder or (without ``force``) a file is there already, or storage refuses.
        CorruptCheckpointError: a source is damaged.
    """
    begin = time.monotonic()
    if os.path.isdir(path):
        raise StorageError(f"{path} is a folder, expected the name of a file", errno.EISDIR, path)
    files.locate()
    partial = create_partial(path, _ATTEMPT, file.nbytes)
    try:
        advance = _Advance(file.nbytes, progress)
        folder, name = os.path.split(partial.partial)
        named = OutFile(name, file.state, file.joined, file.format, file.copy_of, file.data)
        partial.nbytes = write(named, folder, files, advance).nbytes
        partial.make_durable()
        files.check_unchanged()
        if not force and os.path.lexists(path):
            raise StorageError(f"{path} has come there meanwhile: choose another place", errno.EEXIST, path)
        partial.publish()
    finally:
        partial.remove()
    return Conversion(path, num_items, 0, partial.nbytes, time.monotonic() - begin)


class _Advance:
    """From bytes written just now to bytes written so far."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done = 0
        self._total = total
        self._progress = progress

    def __call__(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._total)  # headers are not in the total
        if self._progress is not None:
            self._progress(self._done, self._total)
