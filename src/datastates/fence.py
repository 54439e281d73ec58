"""The fence: training may change the state again only when what is being saved has been copied.

It closes by itself before any ``torch.optim.Optimizer`` steps, also one that a framework wraps. Where a step evaluates
a closure (Lightning's does, with the whole forward and backward pass in it), the fence of torch's own optimizers closes
behind its first evaluation. What no such hook sees (writes by the training script, optimizers that do not subclass
``torch.optim.Optimizer``) needs the explicit ``wait()``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from datastates.cuda_runtime import is_capturing
from datastates.events import EventLog, now
from datastates.staging_job import Copiers, StagingJob

Arguments: TypeAlias = tuple[Any, ...]
Options: TypeAlias = dict[str, Any]


logger = logging.getLogger(__name__)


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
        events: receives the records ``fence`` and ``step``.
        before_closed: called with the jobs that the fence was closed for, before the caller may go on.
        """
        self._copiers = copiers
        self._events = events
        self._before_closed = before_closed
        self._lock = threading.RLock()  # protects _jobs; a signal handler may save, too
        self._jobs: list[StagingJob[Any]] = []
        self.held_seconds = 0.0
        """How long callers were held back, all in all."""
        self._owner = os.getpid()
        self._has_told_of_graphs = False
        self._step_lock = threading.RLock()  # protects what belongs to steps; a signal handler may call wait()
        self._stepping: weakref.ref[torch.optim.Optimizer] | None = None  # the optimizer whose steps are counted
        self._is_told = False  # of steps, by `note_step`
        self._step_at: float | None = None
        self._num_steps = 0
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    @property
    def is_open(self) -> bool:
        """Whether something must still be waited for before the state may change."""
        return bool(self._jobs)

    def add(self, job: StagingJob[Any]) -> None:
        with self._lock:
            self._jobs.append(job)
            if self._before_closed is None:  # else somebody wants to hear of every job
                for other in [other for other in self._jobs if other.staged.done()]:
                    with contextlib.suppress(ValueError):  # one by one: a signal handler may add and remove meanwhile
                        self._jobs.remove(other)

    def close(self, timeout: float | None = None) -> None:
        """Return when the state may be changed.

        Host tensors: when they are copied. Device tensors: when their copies are issued and the caller's current
        stream is ordered behind them; the host does not wait for the device. A save that failed holds nobody
        back, and its error is not raised here: it must not stop the training.

        Raises:
            WaitTimeoutError: not reached within ``timeout`` seconds; the fence stays open.
            GraphCaptureError: a device's current stream is recording a graph; the fence stays open.
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
            is_closed = not self._jobs
        if self._before_closed is not None and is_closed:
            self._before_closed([])  # what another thread has asked for since, and found the fence open still
        end = now()
        self.held_seconds += end - begin
        self._events.record("fence", begin, end, num_files=len(jobs))

    def note_step(self) -> None:
        """Training takes an optimizer step now: for a framework that knows, so that the fence need not guess.

        Without it each call of the optimizer that was the first to step counts as one.
        """
        self._is_told = True
        self._note_step()

    def remove(self) -> None:
        """Take the hook away; idempotent."""
        self._hook.remove()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options
    ) -> tuple[Arguments, Options] | None:
        if os.getpid() != self._owner:  # a forked child has copies of the state, and no stager
            return None
        if self.is_open and self._is_recorded():
            return None
        postponed = _with_closing_closure(optimizer, args, kwargs, self.close) if self.is_open else None
        if postponed is None and self.is_open:
            self.close()
        if not self._is_told and self._is_counted(optimizer):
            self._note_step()
        return postponed

    def _is_recorded(self) -> bool:
        """Whether the step that begins goes into a graph: it changes nothing yet, and could not wait for anything."""
        with self._lock:
            devices = {device for job in self._jobs for device in job.ready}
        if not any(is_capturing(device) for device in devices):
            return False
        if not self._has_told_of_graphs:
            self._has_told_of_graphs = True
            logger.warning(
                "an optimizer's step is being recorded into a graph: its replays run no hooks, so call wait() before "
                "the first replay that follows a save"
            )
        return True

    def _is_counted(self, optimizer: torch.optim.Optimizer) -> bool:
        with self._step_lock:
            if self._stepping is None or self._stepping() is None:
                self._stepping = weakref.ref(optimizer)
            return self._stepping() is optimizer

    def _note_step(self) -> None:
        with self._step_lock:
            at, before = now(), self._step_at
            self._step_at = at
            self._num_steps += 1
            number = self._num_steps
        self._events.record("step", at if before is None else before, at, number=number)


def _with_closing_closure(
    optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options, close: Callable[[], None]
) -> tuple[Arguments, Options] | None:
    """The arguments of a step with a closure that closes the fence when it has been evaluated.

    None where there is no closure, or where the optimizer may change the state before it evaluates it: its step is not
    torch's own, or somebody has hooked it.

    Source: torch 2.13, optim/*.py: every ``step(closure)`` evaluates the closure before it touches anything, and hooks
    get the optimizer itself as the first of the arguments.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    is_own = type(optimizer).step.__module__.startswith("torch.optim.")
    if not callable(closure) or not is_own or optimizer._optimizer_step_pre_hooks:
        return None

    @functools.wraps(closure)
    def evaluated(*inner_args: Any, **inner_kwargs: Any) -> Any:
        result = closure(*inner_args, **inner_kwargs)
        close()
        return result

    if len(args) > 1:
        return (args[0], evaluated, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluated}
