"""One attempt to make a checkpoint, or a lone file, as the saver sees it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from datastates.events import now
from datastates.flusher.work import CommitResult, running_future


@dataclass(frozen=True, slots=True)
class SaveHandle:
    """One saved file.

    Attributes:
        path: its final, absolute path.
        nbytes: its size; 0 when it was not saved, as ``when_busy`` asks.
        staged: done when the state may be changed (device tensors: when their bytes are on the host).
        committed: done when the file is durable and visible under its final name; for a file of a checkpoint, when
            the whole checkpoint is committed.
    """

    path: str
    nbytes: int
    staged: Future[None]
    committed: Future[CommitResult]

    @classmethod
    def of_nothing(cls, path: str, committed: Future[CommitResult]) -> SaveHandle:
        """That of a file which is not saved: the state may be changed at once."""
        staged = running_future(type(None))
        staged.set_result(None)
        return cls(path, 0, staged, committed)


@dataclass(slots=True, eq=False)
class Attempt:
    """Files that become visible together.

    Attributes:
        name: unique for all runs, equal on all ranks; part of temporary names.
        path: the checkpoint's folder, or the lone file.
        directory: the checkpoint's folder; None for a lone file.
        tag: what the checkpoint is called; the content of ``latest``.
        update_latest: whether ``latest`` shall name it once it is committed.
        is_skipped: nothing is saved for it, because earlier saves are in flight.
        begin: when it was begun, in seconds of the monotonic clock.
        blocked_seconds: how long the calls that made it took.
        nbytes: of this rank's files.
        committed: done when it is committed, or lost for the reason that the future raises.
        error: why this rank gave it up, before the flusher has confirmed that.
    """

    name: str
    path: str
    directory: str | None = None
    tag: str = ""
    update_latest: bool = False
    is_skipped: bool = False
    begin: float = field(default_factory=now)
    blocked_seconds: float = 0.0
    nbytes: int = 0
    committed: Future[CommitResult] = field(default_factory=lambda: running_future(CommitResult))
    error: BaseException | None = None

    def blames(self, failed: BaseException) -> BaseException:
        """Why it is lost: this rank's own reason where it gave up, since the flusher says no more than that it did."""
        return failed if self.error is None else self.error
