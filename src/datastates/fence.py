"""The fence: training may change the state again only when what is being saved has been copied.

It closes by itself before any ``torch.optim.Optimizer`` steps, also one that a framework wraps. What no such
hook sees (writes by the training script, optimizers that do not subclass ``torch.optim.Optimizer``) needs the
explicit ``wait()``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from datastates.events import EventLog, now
from datastates.staging_job import Copiers, StagingJob


class Fence:
    """Holds back the caller until the jobs added so far need the state no longer. Thread safe."""

    def __init__(
        self,
        copiers: Copiers,
        events: EventLog,
        before_closed: Callable[[list[StagingJob[Any]]], None] | None = None,
    ) -> None:
        """Args:
        copiers: gives the copier of a device.
        events: receives the record ``fence``.
        before_closed: called with the jobs that the fence was closed for, before the caller may go on.
        """
        self._copiers = copiers
        self._events = events
        self._before_closed = before_closed
        self._lock = threading.Lock()  # protects _jobs
        self._jobs: list[StagingJob[Any]] = []
        self.held_seconds = 0.0
        """How long callers were held back, all in all."""
        self._owner = os.getpid()
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    @property
    def is_open(self) -> bool:
        """Whether something must still be waited for before the state may change."""
        return bool(self._jobs)

    def add(self, job: StagingJob[Any]) -> None:
        with self._lock:
            if self._before_closed is None:  # else somebody wants to hear of every job
                self._jobs = [other for other in self._jobs if not other.staged.done()]
            self._jobs.append(job)

    def close(self, timeout: float | None = None) -> None:
        """Return when the state may be changed.

        Host tensors: when they are copied. Device tensors: when their copies are issued and the caller's current
        stream is ordered behind them; the host does not wait for the device. A save that failed holds nobody
        back, and its error is not raised here: it must not stop the training.

        Raises:
            WaitTimeoutError: not reached within ``timeout`` seconds; the fence stays open.
        """
        with self._lock:
            jobs = list(self._jobs)
        if not jobs:
            return
        begin = now()
        for job in jobs:
            job.wait_issued(None if timeout is None else max(begin + timeout - now(), 0.0))
            job.hold(self._copiers)
        if self._before_closed is not None:
            self._before_closed(jobs)
        with self._lock:
            self._jobs = [job for job in self._jobs if job not in jobs]
        end = now()
        self.held_seconds += end - begin
        self._events.record("fence", begin, end, num_files=len(jobs))

    def remove(self) -> None:
        """Take the hook away; idempotent."""
        self._hook.remove()

    def _before_step(self, *_: Any) -> None:
        if self.is_open and os.getpid() == self._owner:  # a forked child has copies of the state, and no stager
            self.close()
