"""The work of a conversion: items written by several threads into a folder that appears when all of them are done."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from datastates.errors import StorageError
from datastates.system_calls import storage_errors
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.result_folder import ResultFolder
from datastates.universal.writing import OutFile, write

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and those in all."""

_MAX_WORKERS = 8  # more only wait for the same disk
_BYTES_PER_FILE = 4096  # of headers and of the file system


@dataclass(frozen=True)
class Item:
    """What is finished as one.

    Attributes:
        key: names it in the journal.
        nbytes: about how much it writes.
        make: gives its files.
        copy_of: the file that it copies byte by byte; None where it is made of files that were loaded.
    """

    key: str
    nbytes: int
    make: Callable[[], Iterator[OutFile]]
    copy_of: str | None = None


def copy_item(name: str, path: str) -> Item:
    """A file of the result that is a copy of the one at ``path``."""
    return Item(name, os.path.getsize(path), lambda: iter([OutFile(name, copy_of=path)]), path)


@dataclass(frozen=True)
class Conversion:
    """What was done.

    Attributes:
        path: the result.
        num_items: parameters and files.
        num_kept: those of them that an earlier, killed conversion had finished.
        nbytes: of all files written now.
        seconds: all that it took.
    """

    path: str
    num_items: int
    num_kept: int
    nbytes: int
    seconds: float


def build(
    items: Sequence[Item],
    path: str,
    origin: str,
    files: MappedFiles,
    num_workers: int | None,
    progress: Progress | None,
    *,
    replace: bool = False,
) -> Conversion:
    """Write all items into a folder that gets its final name when they are durable. Blocks.

    Args:
        items: what to write. Large ones are begun first.
        path: the folder, absolute.
        origin: what is made of what; with the names, sizes and times of the sources it tells whether something that a
            dead process has begun can be continued.
        files: has loaded all sources but those that are copied.
        num_workers: threads; None: as many as there are processors, at most 8.
        progress: see `Progress`.
        replace: what is at ``path`` is replaced.

    Raises:
        StorageError: there is no room, something is at ``path`` already, or storage refuses.
        CorruptCheckpointError: a source is damaged.
    """
    begin = time.monotonic()
    files.locate()
    if num_workers is None:
        num_workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
    sources = files.fingerprint(item.copy_of for item in items if item.copy_of is not None)
    with ResultFolder(path, f"{origin}: {sources}", replace=replace) as result:
        _check_room(result.directory, sum(item.nbytes + _BYTES_PER_FILE for item in items))
        work = _Work(result, files, sum(item.nbytes for item in items), progress)
        ordered = sorted(items, key=lambda item: -item.nbytes)
        with ThreadPoolExecutor(num_workers, "datastates-convert") as pool:
            futures = [pool.submit(work.do, item) for item in ordered]
            try:
                for future in as_completed(futures):  # the first failure ends them all
                    future.result()
            except BaseException:
                work.stop()
                pool.shutdown(cancel_futures=True)
                raise
        files.check_unchanged()
        result.publish()
    work.finish()
    return Conversion(path, len(items), work.num_kept, work.nbytes, time.monotonic() - begin)


class _Work:
    """What the workers share."""

    def __init__(self, result: ResultFolder, files: MappedFiles, total: int, progress: Progress | None) -> None:
        self.num_kept = 0
        self.nbytes = 0
        self._result = result
        self._files = files
        self._total = total
        self._done = 0
        self._progress = progress
        self._mutex = threading.Lock()  # protects the counts, and that progress is told in order
        self._stopped = False

    def do(self, item: Item) -> None:
        if self._stopped:
            return
        if self._result.is_finished(item.key):
            with self._mutex:
                self.num_kept += 1
            self._advance(item.nbytes)
            return
        written = [write(file, self._result.directory, self._files, self._advance) for file in item.make()]
        self._result.record(item.key, written)
        with self._mutex:
            self.nbytes += sum(file.nbytes for file in written)

    def stop(self) -> None:
        """Begin no further item, and end those that are being written."""
        self._stopped = True

    def finish(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total)

    def _advance(self, nbytes: int) -> None:
        if self._stopped:
            raise InterruptedError("the conversion was stopped")
        if self._progress is None:
            return
        with self._mutex:
            self._done = min(self._done + nbytes, self._total)  # headers are not in the total
            self._progress(self._done, self._total)


def _check_room(directory: str, nbytes: int) -> None:
    with storage_errors("look at", directory):
        status = os.statvfs(directory)
        taken = sum(
            os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(directory) for name in names
        )
    free = status.f_bavail * status.f_frsize + taken
    if status.f_blocks and free < nbytes:
        message = f"no space for {directory}: {nbytes} bytes needed, {free} free, {nbytes - free} missing"
        raise StorageError(message, errno.ENOSPC, directory)
