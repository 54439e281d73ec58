"""A save whose bytes are not known yet, in the place that it will have in the fence."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from datastates.cache_copies import CacheCopies
from datastates.captures import Captures
from datastates.deadline import Deadline
from datastates.errors import DataStatesError, WaitTimeoutError
from datastates.plan import FilePlan
from datastates.staging_job import Copiers, FileT, StagingJob


class PromisedJob(StagingJob[None]):
    """Holds the fence from the moment of the save, until the job that stages it is known, and then as that job does.

    It ends with the job, or without one: `fail`, or when somebody has waited for the job as long as may be. Whatever
    comes later is refused then: the state may have changed. Thread safe.

    Attributes:
        captures: the copies that were made at the moment of the save; given back when the promise ends.
        copies: those that found no room among these; given back with them.
        is_fenced: whether the save reads anything that training may change.
        ready: per device, what the caller's stream had been given at that moment.
    """

    def __init__(
        self, name: str, copiers: Copiers, captures: Captures, copies: CacheCopies, limit_seconds: float
    ) -> None:
        """Args:
        name: what messages call it.
        copiers: gives the copier of a device.
        captures: takes copies; owned by the promise from now on.
        copies: takes what has no room there; owned by it, too.
        limit_seconds: so long may training be held up by a job that is not known.
        """
        super().__init__(FilePlan("promised", 0, ()), None, name)
        self.captures = captures
        self.copies = copies
        self.is_fenced = True
        self._copiers = copiers
        self._limit_seconds = limit_seconds
        self._lock = threading.RLock()  # protects _job and the end of `staged`; what is collected meanwhile may `fail`
        self._job: StagingJob[object] | None = None
        self._known = threading.Event()

    @property
    def error(self) -> BaseException | None:
        """Why it has failed, None unless it has."""
        return self.staged.exception() if self.staged.done() else None

    def mark_ready(self, devices: Iterable[torch.device]) -> None:
        """Note what the current streams have been given so far; on the thread that saves, with all that it captures."""
        self.captures.pack()
        for device in devices:
            self.ready[device] = self._copiers(device).ready()

    def let_go(self) -> None:
        """All that the save reads are copies: the fence need not wait for it."""
        self.is_fenced = False

    def keep(self, job: StagingJob[FileT]) -> None:
        """The job that the promise was made for, before it is submitted; its copies wait for the streams as they were.

        Raises:
            DataStatesError: the promise has ended already: nothing may be copied any more.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            job.ready.update(self.ready)
            self._job = job  # type: ignore[assignment]
            self._known.set()
        job.staged.add_done_callback(lambda staged: self.finish(staged.exception()))

    def fail(self, error: BaseException) -> None:
        """There will be no job; no effect once one is known, or another reason."""
        with self._lock:
            if self._job is None:
                self._end(error)

    def finish(self, error: BaseException | None) -> None:
        """The state is not needed any more; idempotent, the first outcome stays."""
        with self._lock:
            self._end(error)

    def wait_issued(self, timeout: float | None) -> None:
        """As that of the job, if there is anything to wait for: see `let_go`.

        Gives the promise up when the job is not known within the limit: nobody waits for ever.

        Raises:
            WaitTimeoutError: not reached within ``timeout`` seconds, and these are less than the limit.
        """
        if not self.is_fenced:
            return
        deadline = Deadline(timeout)
        is_patient = timeout is None or timeout >= self._limit_seconds
        if not self._known.wait(self._limit_seconds if is_patient else timeout):
            if not is_patient:
                raise WaitTimeoutError(f"{self.path}: not planned within {timeout} s")
            self.fail(_late(self.path, self._limit_seconds))
        if self._job is not None:
            self._job.wait_issued(deadline.left())

    def hold(self, copiers: Copiers) -> None:
        """As that of the job."""
        if self._job is not None and self.is_fenced:
            self._job.hold(copiers)

    def _end(self, error: BaseException | None) -> None:
        if not self.staged.done():
            super().finish(error)
            self.captures.release()
            self.copies.release()
            self._known.set()


def _late(name: str, seconds: float) -> DataStatesError:
    return WaitTimeoutError(
        f"{name}: given up, training was held up for {seconds:g} s by a save that the ranks had not planned: one of"
        " them is missing, or the process group has failed, or an earlier save is still being written"
    )
