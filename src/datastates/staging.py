"""The files of one rank on their way into the host cache."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from datastates.attempt import Attempt
from datastates.cache_copies import CacheCopies
from datastates.captures import Captures, EagerBudget
from datastates.commit_requests import CommitRequests
from datastates.deadline import Deadline
from datastates.flusher.client import FlushFile
from datastates.machinery import Machinery
from datastates.plan import FilePlan
from datastates.promised_job import PromisedJob
from datastates.staging_job import StagingJob
from datastates.verification import SourceCheck


class Staging:
    """Hands planned files to the stager and the fence; knows which are not staged yet. Thread safe."""

    def __init__(self, machinery: Machinery, requests: CommitRequests, *, is_verified: bool) -> None:
        """Args:
        machinery: the moving parts.
        requests: hears of each file, and of those that are lost.
        is_verified: whether the sources are read again when the fence closes.
        """
        self._cache, self._client = machinery.cache, machinery.client
        self._stager, self._fence = machinery.stager, machinery.fence
        self._requests = requests
        self._is_verified = is_verified
        # half of the slabs stay for staging; what has been staged is read again to verify it, and must be there then
        self._copies_budget = EagerBudget(0 if is_verified else self._cache.nbytes // 2)
        self._lock = threading.RLock()  # protects _unstaged; a signal handler may save, too
        self._unstaged: list[tuple[str, Future[None]]] = []

    @property
    def is_empty(self) -> bool:
        """Whether all files are staged, or lost."""
        return not self._unstaged

    def wait(self, timeout: float | None) -> None:
        """Close the fence, then block until every file so far is staged, or lost. Raises WaitTimeoutError."""
        deadline = Deadline(timeout)
        with self._lock:
            unstaged = list(self._unstaged)
        self._fence.close(timeout)
        for path, staged in unstaged:
            deadline.wait(staged, f"{path}: not staged")

    def promise(self, name: str, captures: Captures, limit_seconds: float) -> PromisedJob:
        """A job for a file that is not planned yet, in the fence from now on; see `PromisedJob` for the arguments."""
        copies = CacheCopies(self._cache, self._copies_budget)
        promise = PromisedJob(name, self._stager.copier, captures, copies, limit_seconds)
        self._note(promise)
        self._fence.add(promise)
        return promise

    def make_job(self, plan: FilePlan, path: str, attempt: Attempt) -> StagingJob[FlushFile]:
        """A job for a file, which the flusher opens."""
        check = SourceCheck(plan) if self._is_verified else None
        file = self._client.open_file(path, plan.nbytes, self._cache.slab_bytes, plan.seals, attempt.name)
        return StagingJob(plan, file, path, check, attempt.name)

    def submit(self, job: StagingJob[FlushFile], attempt: Attempt, captures: Captures, is_fenced: bool) -> None:
        """Hand the job to the stager; from here on the job gives back what was captured.

        Blocks until what may change before the fence has been copied.
        """
        job.staged.add_done_callback(lambda _: captures.release())
        self._requests.note_job(job, attempt)
        self._note(job)
        if is_fenced:
            self._fence.add(job)
        try:
            self._stager.submit(job)
        except BaseException as error:
            self._requests.lose(job, error)
            job.finish(error)
            raise
        job.wait_eager(self._stager.copier)

    def _note(self, job: StagingJob[Any]) -> None:
        entry = (job.path, job.staged)
        with self._lock:
            self._unstaged.append(entry)
        job.staged.add_done_callback(lambda _: self._forget(entry))

    def _forget(self, entry: tuple[str, Future[None]]) -> None:
        with self._lock:
            self._unstaged.remove(entry)
