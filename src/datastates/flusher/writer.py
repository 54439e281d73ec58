"""Slabs of the host cache to durable files: one thread hashes in file order, several write."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from datastates.attempt_folder import is_promised
from datastates.config import DIRECT_IO_BYTES
from datastates.errors import ProtocolError, StorageError
from datastates.events import now
from datastates.flusher.hasher import ImageHasher
from datastates.flusher.incoming import FileState, IncomingFile
from datastates.flusher.protocol import (
    MAX_TABLE_ROWS,
    Answer,
    Dropped,
    Durable,
    FileFailed,
    FlushSlab,
    Written,
    WrittenSlab,
    shortened,
)
from datastates.leftovers import remove_orphan
from datastates.partial_names import partial_path
from datastates.storage import create_partial, read_chunks, reopen_partial
from datastates.system_calls import storage_errors

_HELD_SHARE = 8
"""Slabs that are written are reported together, as soon as they are an eighth of the host cache: each message wakes a
thread of the trainer, which takes the GIL from the training, and seven eighths are enough to go on with."""

_READ_BYTES = 1 << 20  # of a partial file that is hashed again; keeps the process small


class WritePipeline:
    """Hashes slabs in the order of their arrival and writes several at once.

    Errors of storage end the file concerned and nothing else. Any other exception is left to ``spawn``.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        send: Callable[[Answer], bool],
        on_end: Callable[[IncomingFile], None],
        on_idle: Callable[[], None],
        spawn: Callable[[str, Callable[[], None]], None],
        num_writers: int,
    ) -> None:
        """Args:
        memory: the host cache.
        send: takes answers to the trainer, from any thread.
        on_end: told when a file is durable or has failed, on the thread that ended it.
        on_idle: told when nothing is queued any more.
        spawn: starts a thread of a given name.
        num_writers: writes in flight.
        """
        self._memory = memoryview(memory)
        self._send = send
        self._on_end = on_end
        self._on_idle = on_idle
        self._to_hash: SimpleQueue[tuple[IncomingFile, FlushSlab | None]] = SimpleQueue()
        self._to_write: SimpleQueue[tuple[IncomingFile, FlushSlab | None, int]] = SimpleQueue()
        self._lock = threading.Lock()  # protects _num_queued, _leftovers, _written
        self._written: list[WrittenSlab] = []
        self._report_lock = threading.Lock()  # keeps reports in order; the main thread never waits for it
        self._num_queued = 0
        self._leftovers: list[str] = []
        spawn("hasher", self._hash_forever)
        for index in range(num_writers):
            spawn(f"writer-{index}", self._write_forever)

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return self._num_queued == 0

    def start(self, file: IncomingFile) -> None:
        """Open a file of which all tables are here. Does not block."""
        file.start()
        self._count(1)
        self._to_write.put((file, None, 0))
        if file.acknowledged and not file.was_durable:
            self._count(1)
            self._to_hash.put((file, None))

    def add(self, file: IncomingFile, slab: FlushSlab) -> None:
        """Take a slab. Does not block.

        Raises:
            ProtocolError: it is not the next of its file, or lies outside of the host cache.
        """
        file.expect(slab)
        if slab.cache_offset + slab.nbytes > self._memory.nbytes:
            raise ProtocolError(f"{file.path}: slab {slab.index} lies outside of the host cache")
        self._count(1)
        self._to_hash.put((file, slab))

    def fail(self, file: IncomingFile, error: StorageError) -> None:
        """End a file that cannot become durable; its last user removes what there is of it. Idempotent."""
        with file.lock:
            if file.state in (FileState.FAILED, FileState.PUBLISHED):
                return
            file.state, file.error = FileState.FAILED, error
            file.num_users += 1
        self._leave(file)

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_queued += change
            is_idle = self._num_queued == 0
        if is_idle:
            self._on_idle()

    def _enter(self, file: IncomingFile) -> bool:
        """Begin to use the partial file; False when the file has failed."""
        with file.lock:
            if file.state is FileState.FAILED:
                return False
            file.num_users += 1
            return True

    def _leave(self, file: IncomingFile) -> None:
        """Stop using the partial file. The last user of a failed file removes it, then says so."""
        with file.lock:
            file.num_users -= 1
            if file.state is not FileState.FAILED or file.num_users or file.is_reported:
                return
            file.is_reported = True
            partial, file.partial = file.partial, None
            error = file.error or StorageError(f"{file.path}: failed", path=file.path)
        self._report_written()
        message = str(error)
        try:
            if partial is not None:
                partial.remove()
            else:  # what could not be created as a whole may not be gone as a whole
                with storage_errors("remove", partial_path(file.path, file.attempt)):
                    remove_orphan(partial_path(file.path, file.attempt))
        except StorageError as left:
            message += f"; {left}"
            with self._lock:
                self._leftovers.append(partial_path(file.path, file.attempt))
        if not file.was_durable:  # else the trainer knows the file as durable: its attempt fails
            self._send(FileFailed(file.id, shortened(message), error.errno, error.path))
        self._on_end(file)

    def _hash_forever(self) -> None:
        while True:
            file, slab = self._to_hash.get()
            if not self._enter(file):
                self._drop(file, slab)
                continue
            value = 0
            try:
                value = self._hash(file, slab)
            except StorageError as error:
                self.fail(file, error)
            finally:
                self._leave(file)
            if slab is None:
                self._count(-1)
            else:
                self._to_write.put((file, slab, value))

    def _hash(self, file: IncomingFile, slab: FlushSlab | None) -> int:
        hasher = file.hasher
        if hasher is None:
            raise ProtocolError(f"{file.path}: a slab before its tables")
        self._hash_acknowledged(file, hasher)
        if slab is None:
            return 0
        value = hasher.feed(self._memory[slab.cache_offset : slab.cache_offset + slab.nbytes])
        self._hash_acknowledged(file, hasher)
        return value

    def _hash_acknowledged(self, file: IncomingFile, hasher: ImageHasher) -> None:
        """Read again what an earlier flusher wrote: its checksums continue into the slabs that follow."""
        while (index := hasher.position // file.slab_bytes) in file.acknowledged and hasher.position < file.nbytes:
            file.opened.wait()
            if file.partial is None:
                return
            end = min((index + 1) * file.slab_bytes, file.nbytes)
            for chunk in read_chunks(file.partial.partial, hasher.position, end, _READ_BYTES):
                hasher.feed(chunk)

    def _write_forever(self) -> None:
        while True:
            file, slab, value = self._to_write.get()
            if not self._enter(file):
                file.opened.set()  # whoever waits for it finds that the file has failed
                self._drop(file, slab)
                continue
            is_dropped = False
            try:
                if slab is None:
                    self._open(file)
                else:
                    is_dropped = True  # unless it is written
                    self._write(file, slab, value)
                    is_dropped = False
                self._finish(file)
            except StorageError as error:
                self.fail(file, error)
            finally:
                self._leave(file)
            self._drop(file, slab if is_dropped else None)

    def _remove_leftovers(self) -> None:
        """Try again to remove partial files of lost saves, which storage had refused to."""
        with self._lock:
            paths, self._leftovers = self._leftovers, []
        for path in paths:
            try:
                remove_orphan(path)
            except OSError:  # reported with the save that it belongs to; the next save tries again
                with self._lock:
                    self._leftovers.append(path)

    def _open(self, file: IncomingFile) -> None:
        self._remove_leftovers()
        try:
            if file.was_durable and _is_published(file):
                with file.lock:
                    file.state = FileState.PUBLISHED
                self._on_end(file)
            elif file.acknowledged or file.was_durable:
                file.partial = reopen_partial(file.path, file.attempt, file.nbytes)
            else:
                file.partial = create_partial(
                    file.path,
                    file.attempt,
                    file.nbytes,
                    check_free=file.check_free,
                    keep=lambda attempt: is_promised(os.path.dirname(file.path), attempt),
                )
        finally:
            file.opened.set()

    def _write(self, file: IncomingFile, slab: FlushSlab, value: int) -> None:
        file.opened.wait()
        if file.partial is None:
            raise StorageError(f"{file.path}: could not be opened", path=file.path)
        begin = now()
        padded = -(-slab.nbytes // DIRECT_IO_BYTES) * DIRECT_IO_BYTES
        end = slab.cache_offset + slab.nbytes
        padded_end = min(slab.cache_offset + padded, self._memory.nbytes)
        self._memory[end:padded_end] = bytes(padded_end - end)
        file.partial.write(self._memory[slab.cache_offset : padded_end], slab.index * file.slab_bytes)
        with self._lock:
            self._written.append(WrittenSlab(file.id, slab.index, slab.cache_offset, value, begin, now()))
            num_held = min(self._memory.nbytes // file.slab_bytes // _HELD_SHARE, MAX_TABLE_ROWS)
            is_enough = len(self._written) >= num_held
        if is_enough:
            self._report_written()
        with file.lock:
            file.crcs[slab.index] = value
            file.num_written += 1

    def _finish(self, file: IncomingFile) -> None:
        """Make the file durable if this was its last slab."""
        with file.lock:
            is_complete = file.num_written == file.num_slabs and file.state is FileState.RECEIVING
            if not is_complete or file.is_finishing:
                return
            file.is_finishing = True
        file.opened.wait()
        if file.partial is None:
            raise StorageError(f"{file.path}: could not be opened", path=file.path)
        file.partial.make_durable()
        with file.lock:
            if file.state is not FileState.RECEIVING:
                return
            is_news, file.was_durable = not file.was_durable, True
        if is_news:
            self._report_written()
            # Before the committer may rename it: the next flusher looks for a file under its final name only where the
            # trainer knows it as durable.
            self._send(Durable(file.id))
        with file.lock:
            if file.state is not FileState.RECEIVING:
                return
            file.state = FileState.DURABLE
        self._on_end(file)

    def _report_written(self) -> None:
        """Say which slabs are in their files since the last time. A file's are all said before its end is."""
        with self._report_lock:
            with self._lock:
                slabs, self._written = tuple(self._written), []
            if slabs:
                self._send(Written(slabs))

    def _drop(self, file: IncomingFile, slab: FlushSlab | None) -> None:
        if slab is not None:
            self._send(Dropped(file.id, slab.index, slab.cache_offset))
        self._count(-1)


def _is_published(file: IncomingFile) -> bool:
    """Whether an earlier flusher has renamed the file already."""
    if os.path.exists(partial_path(file.path, file.attempt)):
        return False
    with storage_errors("look at", file.path):
        return os.path.isfile(file.path) and os.path.getsize(file.path) == file.nbytes
