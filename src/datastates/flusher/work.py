"""Files and attempts in flight, as the trainer sees them: enough to give all of it to another flusher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from datastates.flusher.protocol import (
    Abort,
    Acknowledged,
    Begin,
    Commit,
    FlushSlab,
    OpenFile,
    Publish,
    Request,
    SealTable,
    batches,
    shortened,
)
from datastates.manifest import FileRecord
from datastates.plan import PackedSeals, Seal

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CommitResult:
    """An attempt is durable and visible.

    Attributes:
        path: the checkpoint directory, or the (first) lone file.
        nbytes: of the whole checkpoint, all ranks; of the lone files.
        num_files: likewise.
    """

    attempt: str
    path: str
    tag: str
    nbytes: int
    num_files: int


def running_future(_: type[Result]) -> Future[Result]:
    """A future that nobody can cancel: the work behind it cannot be called back."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    return future


class FlushFile:
    """A file on its way to storage; made by `FlusherClient.open_file`.

    Attributes:
        has_ended: the flusher has said its last word: durable, or failed.
        durable: ends when the bytes are on the device, still under a partial name; else raises StorageError,
            CommitError (aborted) or FlusherDiedError.
    """

    def __init__(
        self, number: int, path: str, nbytes: int, slab_bytes: int, seals: Sequence[Seal], attempt: str, begin: float
    ) -> None:
        self.number = number
        self.path = path
        self.nbytes = nbytes
        self.slab_bytes = slab_bytes
        self.attempt = attempt
        self.begin = begin
        self.num_slabs = -(-nbytes // slab_bytes)
        self.durable = running_future(FileRecord)
        self.check_free = True
        self.next_index = 0
        self.unwritten: dict[int, FlushSlab] = {}
        self.crcs: dict[int, int] = {}
        self.has_ended = False
        self.is_durable = False
        self._seals = seals if isinstance(seals, PackedSeals) else tuple(seals)
        self._error: Exception | None = None

    def __repr__(self) -> str:
        return f"FlushFile({self.path!r}, {len(self.crcs)} of {self.num_slabs} slabs written, error={self._error!r})"

    @property
    def error(self) -> Exception | None:
        """Why the file is lost, None while it is not."""
        return self._error

    def lose(self, error: Exception, defer: Callable[[Callable[[], object]], object] | None = None) -> None:
        """The file will not become visible; the first error stays.

        Args:
            defer: takes the call that ends `durable` and so runs its callbacks; None: it is made at once.
        """
        if self._error is not None:
            return
        self._error = error
        if not self.is_durable:
            end = partial(self.durable.set_exception, error)
            end() if defer is None else defer(end)

    def record(self) -> FileRecord:
        values = tuple(self.crcs[index] for index in range(self.num_slabs))
        return FileRecord(self.path, self.nbytes, self.slab_bytes, values)

    def opening(self) -> Iterator[Request]:
        """All that a flusher must know of the file before its next slab."""
        yield OpenFile(
            self.number,
            self.attempt,
            self.path,
            self.nbytes,
            self.slab_bytes,
            len(self._seals),
            len(self.crcs),
            self.is_durable,
            self.check_free,
        )
        for seals in batches(self._seals):
            yield SealTable(self.number, seals)
        for slabs in batches(tuple(sorted(self.crcs.items()))):
            yield Acknowledged(self.number, tuple(slabs))


@dataclass(eq=False)
class Attempt:
    """Files that become visible together, or one by one if there is no checkpoint.

    Attributes:
        folder: of the checkpoint, once the trainer has begun it; empty for lone files.
        request: the trainer's last word about it; None while files may be added.
        abort: the trainer's wish to give it up, with the directory in which other ranks hear of it.
        num_unanswered: aborts sent and not answered.
        error: why it is lost, the first reason. Kept until the trainer asks for the outcome.
        is_told: the flusher has nothing more to say about it.
    """

    name: str
    begin: float
    folder: str = ""
    files: list[FlushFile] = field(default_factory=list)
    request: Publish | Commit | None = None
    abort: Abort | None = None
    num_unanswered: int = 0
    error: Exception | None = None
    is_told: bool = False
    future: Future[CommitResult] = field(default_factory=lambda: running_future(CommitResult))

    @property
    def directory(self) -> str:
        return self.request.directory if isinstance(self.request, Commit) else self.folder

    @property
    def tag(self) -> str:
        return self.request.tag if isinstance(self.request, Commit) else ""

    @property
    def path(self) -> str:
        return self.directory or (self.files[0].path if self.files else "")

    @property
    def is_pending(self) -> bool:
        """Whether a flusher still has to do something for it."""
        has_work = self.request is not None or self.abort is not None or any(file.error is None for file in self.files)
        return has_work and not self.is_told

    def work(self) -> Iterator[Request]:
        """Everything that another flusher must be told, in order."""
        if self.folder and self.request is None and self.abort is None and self.error is None:
            yield Begin(self.name, self.folder)
        if not self.is_pending:
            return
        if self.abort is None and self.error is not None and isinstance(self.request, Commit):
            self.abort = Abort(self.name, shortened(str(self.error)), self.directory)
        if self.abort is not None:
            self.num_unanswered = 1
            yield self.abort
            return
        for file in self.files:
            if file.error is None:
                yield from file.opening()
                yield from file.unwritten.values()
        if self.request is not None:
            yield self.request

    def result(self, nbytes: int, num_files: int) -> CommitResult:
        return CommitResult(self.name, self.path, self.tag, nbytes, num_files)
