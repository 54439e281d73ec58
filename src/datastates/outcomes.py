"""What becomes of saves: which are in flight, which have failed, and who has been told."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from datastates.attempt import Attempt
from datastates.errors import CommitError, SaveSkippedError, TornSnapshotError
from datastates.events import EventLog, now
from datastates.flusher.work import CommitResult

logger = logging.getLogger(__name__)


class Outcomes:
    """Follows attempts until they are committed or lost. Thread safe.

    A failure is logged at once and kept until `raise_failure` has raised it.
    """

    def __init__(self, events: EventLog, on_committed: Callable[[Attempt], None], forgiving: bool) -> None:
        """Args:
        events: receives the record ``skipped``.
        on_committed: called with each attempt that is committed, on the thread that learns of it.
        forgiving: a checkpoint that commits makes up for failures of those begun before it: they are not raised any
            more.
        """
        self._events = events
        self._on_committed = on_committed
        self._forgiving = forgiving
        self._lock = threading.RLock()  # protects the fields below; a signal handler may save, too
        self._unsettled: list[Attempt] = []
        self._failures: list[tuple[float, BaseException]] = []  # with the time at which the attempt was begun
        self._untold: dict[str, tuple[float, BaseException]] = {}  # by path, until `raise_failure` has told
        self._torn_fqns: frozenset[str] = frozenset()

    @property
    def unsettled(self) -> list[Attempt]:
        """The attempts in flight, oldest first."""
        with self._lock:
            return list(self._unsettled)

    @property
    def torn_fqns(self) -> frozenset[str]:
        """Tensors that have changed too early once, and may do so again."""
        return self._torn_fqns

    def pending(self, path: str) -> list[Attempt]:
        """The attempts in flight that a file belongs to, oldest first."""
        return [a for a in self.unsettled if path == a.path or path.startswith(a.path + os.sep)]

    def loss_of(self, path: str) -> BaseException | None:
        """Why the youngest save that a file belongs to was lost, None if it was not, or somebody was told.

        Always None where failures are forgiven: there the log has told.
        """
        if self._forgiving:
            return None
        with self._lock:
            lost = [e for other, (_, e) in self._untold.items() if path == other or path.startswith(other + os.sep)]
        return next(iter(lost), None)

    def losses_in(self, folder: str) -> list[BaseException]:
        """Why checkpoints in a folder were lost that nothing has made up for, and nobody has been told of."""
        with self._lock:
            return [error for path, (_, error) in self._untold.items() if os.path.dirname(path) == folder]

    def add(self, attempt: Attempt) -> None:
        """An attempt has been made; `settle` ends it."""
        with self._lock:
            self._unsettled.append(attempt)

    def forget(self, attempt: Attempt) -> None:
        """The attempt was not made after all."""
        with self._lock:
            self._unsettled.remove(attempt)

    def skip(self, attempt: Attempt) -> None:
        """Nothing is saved for an attempt, since others are in flight."""
        error = SaveSkippedError(f"{attempt.path}: not saved, {len(self.unsettled)} earlier saves are in flight")
        self._note_skipped(attempt, error)
        attempt.committed.set_exception(error)

    def refuse(self, attempt: Attempt, error: CommitError) -> None:
        """Nothing is saved for an attempt, since it could never be committed; a failure as others are."""
        self.fail(f"datastates: {error}", error, attempt.begin)
        self._events.record("failed", attempt.begin, now(), attempt=attempt.name, path=attempt.path, error=str(error))
        attempt.committed.set_exception(error)

    def settle(self, attempt: Attempt, done: Future[CommitResult]) -> None:
        """The flusher's last word about an attempt."""
        failed = done.exception()
        error = None if failed is None else attempt.blames(failed)
        if error is None:
            self._on_committed(attempt)
        elif isinstance(error, SaveSkippedError):
            self._note_skipped(attempt, error)
        else:
            where = "" if attempt.path in str(error) else f"{attempt.path}: "
            self.fail(f"datastates: a save is lost, nothing earlier is harmed: {where}{error}", error, attempt.begin)
        with self._lock:  # not before: whoever finds nothing in flight must find its failure
            self._unsettled.remove(attempt)
            if error is None:
                self._make_up_for(attempt)
            elif not isinstance(error, SaveSkippedError):
                self._untold[attempt.path] = attempt.begin, error
        if error is None:
            attempt.committed.set_result(done.result())
        else:
            attempt.committed.set_exception(error)

    def _make_up_for(self, attempt: Attempt) -> None:
        """What was lost before a committed attempt was begun, as far as that replaces it. A younger one may be lost
        already: that stays. The lock is held."""
        is_for_all = self._forgiving and attempt.directory is not None
        self._untold = {
            path: lost
            for path, lost in self._untold.items()
            if lost[0] > attempt.begin or not (is_for_all or path == attempt.path)
        }
        if is_for_all:
            self._failures = [failure for failure in self._failures if failure[0] > attempt.begin]

    def fail(self, what: str, error: BaseException, begin: float = 0.0) -> None:
        """Something failed in the background: log what, and keep the error for `raise_failure`.

        Args:
            what: for the log.
            error: the cause.
            begin: when the attempt was begun that failed, in seconds of the monotonic clock.
        """
        logger.error("%s", what)
        with self._lock:
            self._failures.append((begin, error))
            if isinstance(error, TornSnapshotError):
                self._torn_fqns |= frozenset(error.fqns)

    def raise_failure(self) -> None:
        """Raise the first failure that has not been raised yet, and forget the others (they are in the log)."""
        with self._lock:
            failures, self._failures = self._failures, []
            self._untold.clear()
        if failures:
            raise failures[0][1]

    def _note_skipped(self, attempt: Attempt, error: SaveSkippedError) -> None:
        logger.warning("datastates: %s", error)
        names = {"attempt": attempt.name, "path": attempt.path}
        self._events.record("skipped", attempt.begin, now(), **names, error=str(error))
