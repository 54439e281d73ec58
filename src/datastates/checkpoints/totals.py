"""What the saves of a run have come to: counts and seconds."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace

from datastates.errors import SaveSkippedError
from datastates.flusher.work import CommitResult


@dataclass(frozen=True, slots=True)
class SaveTotals:
    """Counts since the start.

    Attributes:
        num_saves: calls of ``save()`` that have returned.
        num_committed: those whose checkpoint is durable and visible.
        num_lost: those that failed in the background.
        num_skipped: those that were not made, or dropped, as ``when_busy`` asks.
        num_lost_in_a_row: since the last one that was committed.
        nbytes: of what was committed, all ranks.
        blocked_seconds: in the calls.
        fenced_seconds: how long optimizer steps were held back for copies.
        last_committed: the step of the youngest that was committed, None before the first.
    """

    num_saves: int = 0
    num_committed: int = 0
    num_lost: int = 0
    num_skipped: int = 0
    num_lost_in_a_row: int = 0
    nbytes: int = 0
    blocked_seconds: float = 0.0
    fenced_seconds: float = 0.0
    last_committed: int | None = None


class Totals:
    """Follows saves to their ends. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # protects _totals; a signal handler may save, too
        self._totals = SaveTotals()
        self._num_saves = 0
        self._blocked_seconds = 0.0

    def follow(self, committed: Future[CommitResult], step: int, blocked_seconds: float) -> None:
        """Count a save, and its end when that comes."""
        with self._lock:
            self._num_saves += 1  # nothing is called between reading and writing: no handler can come in between
            self._blocked_seconds += blocked_seconds
        committed.add_done_callback(lambda done: self._note(done, step))

    def now(self, fenced_seconds: float) -> SaveTotals:
        """The counts at this moment."""
        with self._lock:
            return replace(
                self._totals,
                num_saves=self._num_saves,
                blocked_seconds=self._blocked_seconds,
                fenced_seconds=fenced_seconds,
            )

    def _note(self, done: Future[CommitResult], step: int) -> None:
        error = done.exception()
        with self._lock:
            last = self._totals
            if error is None:
                self._totals = replace(
                    last,
                    num_committed=last.num_committed + 1,
                    nbytes=last.nbytes + done.result().nbytes,
                    num_lost_in_a_row=0,
                    last_committed=step,
                )
            elif isinstance(error, SaveSkippedError):
                self._totals = replace(last, num_skipped=last.num_skipped + 1)
            else:
                self._totals = replace(last, num_lost=last.num_lost + 1, num_lost_in_a_row=last.num_lost_in_a_row + 1)
