"""What the trainer's side knows of work in flight, and what each answer of the flusher changes in it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from datastates.errors import ClosedError, CommitError, FlusherDiedError, ProtocolError, StorageError
from datastates.events import EventLog, now
from datastates.flusher.protocol import (
    AttemptFailed,
    Carried,
    CarryFailed,
    Dropped,
    Durable,
    FileFailed,
    Message,
    Prefault,
    Prefaulted,
    PrefaultFailed,
    Request,
    Settled,
    Written,
    WrittenSlab,
)
from datastates.flusher.work import Attempt, FlushFile
from datastates.recent_names import RecentNames

logger = logging.getLogger(__name__)

PREFAULT_BYTES = 64 << 20
"""Per call, so that a large cache does not keep a lock of the kernel for seconds."""


class Ledger:
    """Attempts and files in flight. Not thread safe: its owner holds a lock around every call.

    Whatever calls back into the user's code (futures, free slabs, events) is not done but put into a list,
    which the owner's thread takes and runs without the lock.
    """

    def __init__(self, rank: int, on_slab_free: Callable[[int], None], events: EventLog) -> None:
        self.attempts: dict[str, Attempt] = {}
        self.settled = RecentNames()
        self.prefaults: list[Future[None]] = []
        self.has_progress = False
        self._rank = rank
        self._on_slab_free = on_slab_free
        self._events = events
        self._files: dict[int, FlushFile] = {}
        self._numbers = itertools.count(1)
        self._deferred: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"{len(self.attempts)} attempts and {len(self._files)} files in flight"

    @property
    def is_pending(self) -> bool:
        """Whether a flusher process is needed to go on."""
        return bool(self.prefaults) or any(attempt.is_pending for attempt in self.attempts.values())

    def next_number(self) -> int:
        """Of a file; no two are the same, though a signal handler may save while this is called."""
        return next(self._numbers)

    def attempt(self, name: str) -> Attempt:
        """The attempt of that name, begun now if need be. Raises ValueError if it is settled."""
        if name in self.settled:
            raise ValueError(f"attempt {name} is settled already")
        return self.attempts.setdefault(name, Attempt(name, now()))

    def add(self, attempt: Attempt, file: FlushFile) -> None:
        attempt.files.append(file)
        self._files[file.number] = file

    def free(self, cache_offset: int) -> None:
        self._deferred.append(lambda: self._on_slab_free(cache_offset))

    def take_deferred(self) -> list[Callable[[], object]]:
        actions, self._deferred = self._deferred, []
        return actions

    def work(self) -> Iterator[Request]:
        """Everything that a new flusher process must be told."""
        if self.prefaults:
            yield Prefault(PREFAULT_BYTES)
        for attempt in self.attempts.values():
            yield from attempt.work()

    def take(self, message: Message) -> None:
        """Note an answer. Raises ProtocolError when it does not fit to what was asked."""
        self.has_progress = True
        if isinstance(message, Written):
            for slab in message.slabs:
                self._take_slab(slab)
        elif isinstance(message, Dropped):
            self._take_slab(message)
        elif isinstance(message, Durable):
            self._take_durable(self._file(message.file))
        elif isinstance(message, FileFailed):
            file = self._file(message.file)
            self._lose(file, self._error_of(file, message))
            self._prune(file)
        elif isinstance(message, Settled):
            self._take_settled(message)
        elif isinstance(message, AttemptFailed):
            self._take_failed(message)
        elif isinstance(message, Prefaulted):
            for future in self._take_prefaults():
                self._deferred.append(lambda future=future: future.set_result(None))  # type: ignore[misc]
        elif isinstance(message, PrefaultFailed):
            self._fail_prefaults(StorageError(message.message, message.errno, rank=self._rank))
        elif isinstance(message, (Carried, CarryFailed)):
            self._note_carried(message)
        else:
            raise ProtocolError(f"a {type(message).__name__} came from the flusher")

    def end(self, attempt: Attempt) -> None:
        """The outcome of a lost attempt is known and was asked for: its future raises."""
        del self.attempts[attempt.name]
        self.settled.add(attempt.name)
        error = attempt.error or CommitError(f"attempt {attempt.name} was aborted")
        self._record("failed", attempt.begin, path=attempt.path, error=str(error))
        self._deferred.append(lambda: attempt.future.set_exception(error))

    def drop_prefaults(self) -> None:
        """Nobody needs the host cache any more: its futures raise, and no process is needed for them."""
        self._fail_prefaults(ClosedError("the flusher client was closed before the host cache was reserved"))

    def free_lost(self) -> None:
        """The process is gone: nobody reads the slabs of lost files any more."""
        for file in list(self._files.values()):
            if file.error is not None:
                for slab in file.unwritten.values():
                    self.free(slab.cache_offset)
                file.unwritten.clear()
                self._prune(file)

    def lose_all(self, error: FlusherDiedError) -> None:
        """No process can go on: everything in flight is lost."""
        self._fail_prefaults(error)
        for attempt in list(self.attempts.values()):
            if not attempt.is_pending:
                continue
            attempt.error = attempt.error or error
            attempt.is_told = True
            for file in attempt.files:
                self._lose(file, error)
            if attempt.request is not None:
                self.end(attempt)
        self.free_lost()

    def _file(self, number: int) -> FlushFile:
        try:
            return self._files[number]
        except KeyError:
            raise ProtocolError(f"an answer about file {number}, which is not in flight") from None

    def _take_slab(self, message: WrittenSlab | Dropped) -> None:
        file = self._file(message.file)
        slab = file.unwritten.pop(message.index, None)
        if slab is None or slab.cache_offset != message.cache_offset:
            raise ProtocolError(f"{file.path}: an answer about slab {message.index}, which was not sent")
        self.free(slab.cache_offset)
        if isinstance(message, WrittenSlab):
            file.crcs[message.index] = message.crc32
            fields = {"attempt": file.attempt, "path": file.path, "index": message.index, "nbytes": slab.nbytes}
            self._deferred.append(lambda: self._events.record("flush", message.begin, message.end, **fields))
        self._prune(file)

    def _take_durable(self, file: FlushFile) -> None:
        if len(file.crcs) != file.num_slabs:
            raise ProtocolError(f"{file.path}: durable with {len(file.crcs)} of {file.num_slabs} slabs written")
        file.has_ended = file.is_durable = True
        record = file.record()
        self._prune(file)
        self._record("durable", file.begin, attempt=file.attempt, path=file.path, nbytes=file.nbytes)
        self._deferred.append(lambda: file.durable.set_result(record))

    def _take_settled(self, message: Settled) -> None:
        attempt = self._known(message.attempt)
        attempt.is_told = True
        if attempt.error is not None:
            self.end(attempt)
            return
        del self.attempts[attempt.name]
        self.settled.add(attempt.name)
        result = attempt.result(message.nbytes, message.num_files)
        fields = {"attempt": attempt.name, "path": result.path, "nbytes": result.nbytes}
        self._record("committed", attempt.begin, **fields)
        self._deferred.append(lambda: attempt.future.set_result(result))

    def _take_failed(self, message: AttemptFailed) -> None:
        attempt = self._known(message.attempt)
        attempt.num_unanswered = max(attempt.num_unanswered - 1, 0)
        error: Exception
        if attempt.abort is not None:
            cause = attempt.abort.cause
            error = CommitError(f"attempt {attempt.name} was aborted: {cause}", {self._rank: cause}, attempt.tag)
        elif message.ranks:
            causes = {int(rank): cause for rank, cause in message.ranks.items()}
            error = CommitError(message.message, causes, attempt.tag)
        else:
            error = StorageError(message.message, message.errno, message.path, self._rank, attempt.tag)
        attempt.error = attempt.error or error
        for file in attempt.files:
            self._lose(file, error)
        attempt.is_told = attempt.num_unanswered == 0
        if attempt.is_told and attempt.request is not None:
            self.end(attempt)

    def _note_carried(self, message: Carried | CarryFailed) -> None:
        fields: dict[str, object] = {"attempt": message.attempt, "path": message.path, "tier": message.tier}
        if isinstance(message, Carried):
            event, fields = "carried", fields | {"nbytes": message.nbytes}
            seconds = message.end - message.begin
            logger.info("%s is in %s: %.2f GiB in %.1f s", message.path, message.tier, message.nbytes / 2**30, seconds)
        else:
            event, fields = "carry_failed", fields | {"error": message.message, "is_final": message.is_final}
            again = "it is not tried again" if message.is_final else "it is tried again"
            logger.warning("%s is not carried to %s, %s: %s", message.path, message.tier, again, message.message)
        self._deferred.append(lambda: self._events.record(event, message.begin, message.end, **fields))

    def _known(self, name: str) -> Attempt:
        try:
            return self.attempts[name]
        except KeyError:
            raise ProtocolError(f"an answer about attempt {name}, which is not in flight") from None

    def _error_of(self, file: FlushFile, message: FileFailed) -> Exception:
        file.has_ended = True
        attempt = self.attempts.get(file.attempt)
        if attempt is not None and attempt.abort is not None:
            cause = attempt.abort.cause
            return CommitError(f"attempt {attempt.name} was aborted: {cause}", {self._rank: cause}, attempt.tag)
        tag = "" if attempt is None else attempt.tag
        error = StorageError(message.message, message.errno, message.path, self._rank, tag)
        if attempt is not None:
            attempt.error = attempt.error or error
        return error

    def _lose(self, file: FlushFile, error: Exception) -> None:
        if file.error is None:
            file.lose(error, self._deferred.append)
            self._record("failed", file.begin, attempt=file.attempt, path=file.path, error=str(error))

    def _prune(self, file: FlushFile) -> None:
        """Forget a file about which no answer can come any more."""
        if file.has_ended and not file.unwritten:
            self._files.pop(file.number, None)

    def _take_prefaults(self) -> list[Future[None]]:
        futures, self.prefaults = self.prefaults, []
        return futures

    def _fail_prefaults(self, error: Exception) -> None:
        for future in self._take_prefaults():
            self._deferred.append(lambda future=future: future.set_exception(error))  # type: ignore[misc]

    def _record(self, event: str, begin: float, **fields: object) -> None:
        end = now()
        self._deferred.append(lambda: self._events.record(event, begin, end, **fields))
