"""What is asked of the flusher about each attempt: to commit it, or to give it up."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from datastates.attempt import Attempt
from datastates.errors import ClosedError, CommitError, StorageError
from datastates.fence import Fence
from datastates.flusher.client import CommitResult, FlusherClient, FlushFile
from datastates.nodes.following import Following
from datastates.outcomes import Outcomes
from datastates.staging_job import StagingJob, torn_error
from datastates.whole_records import is_whole_part


class CommitRequests:
    """Asks for the outcome of attempts, and has it told. Thread safe.

    Where what is staged is verified, nothing is asked for before the fence has shown that nothing was torn.
    """

    def __init__(
        self,
        client: FlusherClient,
        fence: Fence,
        outcomes: Outcomes,
        *,
        rank: int,
        following: Following | None,
        is_verified: bool,
    ) -> None:
        """Args:
        client: the flusher's.
        fence: calls `verify` when it closes, if so asked.
        outcomes: hears what has become of each attempt.
        rank: this process's.
        following: waits for the parts of other nodes, None where the ranks share the directory.
        is_verified: whether the sources are read again when the fence closes.
        """
        self._client = client
        self._fence = fence
        self._outcomes = outcomes
        self._rank = rank
        self._following = following
        self._is_verified = is_verified
        self._lock = threading.RLock()  # protects _unverified; a signal handler may save, too
        self._unverified: list[tuple[Attempt, Callable[[], Future[CommitResult]]]] = []
        self._attempt_by_job: weakref.WeakKeyDictionary[StagingJob[FlushFile], Attempt] = weakref.WeakKeyDictionary()

    def begin(self, attempt: Attempt, refusal: CommitError | None, announce: bool) -> None:
        """Have it known that a checkpoint is begun, or say at once what has become of one that is not saved.

        Args:
            attempt: the checkpoint; skipped without a refusal: others are in flight.
            refusal: why it could never be committed.
            announce: whether the flusher hears of it now; else with its first file.
        """
        if refusal is not None:
            self._tell_nodes(attempt, refusal)
            self._outcomes.refuse(attempt, refusal)
        elif attempt.is_skipped:
            self._outcomes.skip(attempt)
        elif announce and attempt.directory is not None:
            self._client.begin(attempt.name, attempt.directory)

    def refusal(self, name: str, directory: str, tag: str) -> CommitError | None:
        """Why nodes do not save to a folder; where this rank alone cannot tell, the others are told.

        Raises:
            StorageError: what is there already cannot be read.
        """
        try:
            if self._following is None or not is_whole_part(directory):
                return None
        except StorageError as error:
            self.abort(Attempt(name, directory, directory, tag), f"{type(error).__name__}: {error}")
            raise
        message = f"{directory} is whole on all nodes, and is not replaced: save under another name"
        return CommitError(message, tag=tag)

    def publish(self, attempt: Attempt) -> None:
        """A lone file has been handed over: it becomes visible when it is durable."""
        name = attempt.name
        self._request(attempt, lambda: self._client.publish(name))

    def commit(self, attempt: Attempt, directory: str) -> None:
        """A checkpoint has no further files of this rank."""
        self._request(attempt, lambda: self._ask_to_commit(attempt, directory))

    def abort(self, attempt: Attempt, cause: str) -> None:
        """Drop a checkpoint that was begun, instead of `commit`; the other ranks learn the cause."""
        attempt.error = CommitError(f"{attempt.path}: given up, {cause}", {self._rank: cause})
        self.give_up(attempt)
        self._client.publish(attempt.name)  # asks for the outcome, which is known; or the client would keep it for ever
        self._tell_nodes(attempt, attempt.error)
        attempt.committed.set_exception(attempt.error)

    def give_up(self, attempt: Attempt) -> None:
        """Have the flusher drop an attempt for its ``error``; its outcome comes as of any other."""
        with contextlib.suppress(ClosedError):  # the flusher is ending, and gives up by itself what is incomplete
            self._client.abort(attempt.name, str(attempt.error), attempt.directory or "")

    def note_job(self, job: StagingJob[FlushFile], attempt: Attempt) -> None:
        """The attempt is lost if this file of it cannot be staged, see `lose`."""
        self._attempt_by_job[job] = attempt

    def lose(self, job: StagingJob[FlushFile], error: BaseException) -> None:
        """A file cannot be staged: what it belongs to is given up."""
        attempt = self._attempt_by_job.get(job)
        if attempt is not None and job.file.error is None:
            attempt.error = attempt.error or error
            self.give_up(attempt)

    def verify(self, jobs: list[StagingJob[FlushFile]]) -> None:
        """Read the sources of the jobs again, then ask for what has been held back for that."""
        for job in jobs:
            if job.staged.exception() is None and job.check is not None and (torn := job.check.changed()):
                self.lose(job, torn_error(job.path, torn))
        with self._lock:
            verified, self._unverified = self._unverified, []
        for attempt, ask in verified:
            self._follow(attempt, ask)

    def close(self, timeout: float | None) -> None:
        """End what waits for other nodes; idempotent."""
        if self._following is not None:
            self._following.close(timeout)

    def _request(self, attempt: Attempt, ask: Callable[[], Future[CommitResult]]) -> None:
        """Ask the flusher to make an attempt visible: now, or once the fence has shown that nothing was torn."""
        self._outcomes.add(attempt)
        with self._lock:
            if self._is_verified and self._fence.is_open:
                self._unverified.append((attempt, ask))
                return
        self._follow(attempt, ask)

    def _follow(self, attempt: Attempt, ask: Callable[[], Future[CommitResult]]) -> None:
        try:
            future = ask()
        except BaseException:
            self._outcomes.forget(attempt)
            raise
        future.add_done_callback(lambda done: self._outcomes.settle(attempt, done))

    def _ask_to_commit(self, attempt: Attempt, directory: str) -> Future[CommitResult]:
        """Done when the checkpoint is committed on all nodes."""
        update_latest = attempt.update_latest and self._following is None  # a part alone is not named
        part = self._client.commit(attempt.name, directory, step_or_tag=attempt.tag, update_latest=update_latest)
        return part if self._following is None else self._following.follow(attempt, part)

    def _tell_nodes(self, attempt: Attempt, error: BaseException) -> None:
        """The other nodes need not wait for this one's part of an attempt."""
        if self._following is not None and attempt.directory is not None:
            self._following.give_up(attempt, error)
