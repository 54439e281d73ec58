"""The saves that ``dcp.async_save`` has begun and a thread of DCP makes, and how far each is."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Callable
from typing import NoReturn

import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from datastates.attempt import Attempt
from datastates.deadline import Deadline
from datastates.errors import DataStatesError, WaitTimeoutError
from datastates.integrations.dcp_staging import Snapshot
from datastates.promised_job import PromisedJob

_ENDING_SECONDS = 5.0
"""So long a save that has failed may take to leave DCP's collectives before the next one."""


@dataclasses.dataclass(eq=False)
class BackgroundSave:
    """What `DataStatesWriter.stage` has begun.

    Attributes:
        promise: holds the fence.
        before: the save that has to end first.
        snapshot: the state; emptied once it is submitted.
        must_be_staged: before the caller may go on, since more may change than could be copied.
        save: what DCP's thread has made of it.
        begun: DCP's thread has got the state.
        submitted: this rank's part is complete, or the save has failed.
        ended: DCP's thread has ended.
    """

    promise: PromisedJob
    before: BackgroundSave | None
    snapshot: Snapshot = dataclasses.field(default_factory=Snapshot)
    must_be_staged: bool = False
    save: Save | None = None
    begun: threading.Event = dataclasses.field(default_factory=threading.Event)
    submitted: threading.Event = dataclasses.field(default_factory=threading.Event)
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def error(self) -> BaseException | None:
        return self.promise.error

    def note_source(self, tensor: torch.Tensor) -> None:
        """A tensor that the planner gives: one that it has just computed is not there when the state was taken."""
        if tensor.device.type != "cpu" and not self.snapshot.holds(tensor):
            self.promise.ready.pop(tensor.device, None)  # its copies wait for what this thread's stream is given, too

    def begin(self, on_end: Callable[[BackgroundSave], None]) -> None:
        """The calling thread is DCP's, which has got the state; ``on_end`` is called when it has ended."""
        self.begun.set()
        arguments = threading.current_thread(), on_end
        threading.Thread(target=self._watch, args=arguments, name="datastates-dcp-watch", daemon=True).start()

    def wait_before(self, deadline: Deadline, begin_seconds: float) -> None:
        """Block until the save before has ended; gives this one up where that takes too long."""
        before, self.before = self.before, None
        if before is not None:
            try:
                before.wait_ended(deadline, begin_seconds)
            except WaitTimeoutError as error:
                self.promise.fail(error)

    def _watch(self, thread: threading.Thread, on_end: Callable[[BackgroundSave], None]) -> None:
        thread.join()
        self.promise.fail(DataStatesError(f"{self.promise.path}: DCP could not plan it; its future says why"))
        try:
            on_end(self)
        finally:
            self.end()

    def drop(self) -> None:
        """Nobody has the staged state any more. Gives the save up, unless DCP's thread has got it before."""
        if not self.begun.is_set():
            self.promise.fail(DataStatesError(f"{self.promise.path}: DCP has dropped it before it was planned"))
            self.end()

    def end(self) -> None:
        """No thread of DCP makes it, or not any more; its promise has ended."""
        for event in (self.begun, self.submitted, self.ended):
            event.set()

    def wait_ended(self, deadline: Deadline, begin_seconds: float) -> None:
        """Block until DCP's thread has ended. One that has not begun for long never will. Raises WaitTimeoutError."""
        left = deadline.left()
        if not self.begun.wait(begin_seconds if left is None else min(left, begin_seconds)):
            self.promise.fail(WaitTimeoutError(f"{self.promise.path}: DCP never asked for what was staged"))
            self.end()
        if not self.ended.wait(deadline.left()):
            raise WaitTimeoutError(f"{self.promise.path}: DCP's thread has not ended in time")


@dataclasses.dataclass(eq=False)
class Save:
    """One save, between its collectives, on the thread that makes it.

    Attributes:
        is_begun: this rank may have told the flusher of it.
        is_requested: its commit was asked for, or it was given up.
    """

    attempt: Attempt
    background: BackgroundSave | None
    meta: StorageMeta
    is_coordinator: bool = False
    is_begun: bool = False
    is_requested: bool = False


class BackgroundSaves:
    """Those of one writer that have not ended, oldest first. Thread safe."""

    def __init__(self, planning_seconds: float) -> None:
        """Args:
        planning_seconds: so long one may take until the ranks have planned it.
        """
        self._planning_seconds = planning_seconds
        self._lock = threading.Lock()  # protects _saves
        self._saves: list[BackgroundSave] = []

    def add(self, promise: PromisedJob) -> BackgroundSave:
        """A new one, which follows the last."""
        save = BackgroundSave(promise, self.last())
        with self._lock:
            self._saves = [other for other in self._saves if not other.ended.is_set()]
            self._saves.append(save)
        return save

    def last(self) -> BackgroundSave | None:
        """The youngest, None where there is none."""
        with self._lock:
            return self._saves[-1] if self._saves else None

    def all(self) -> list[BackgroundSave]:
        """All of them."""
        with self._lock:
            return list(self._saves)

    def wait_ended(self, deadline: Deadline) -> None:
        """Block until all have ended. Raises WaitTimeoutError."""
        for save in self.all():
            save.wait_ended(deadline, self._planning_seconds)

    def wait_submitted(self) -> None:
        """Block until all have been planned and submitted, or have failed; gives up those that never began.

        Raises:
            DataStatesError: one of them hangs.
        """
        deadline = Deadline(self._planning_seconds)
        for save in self.all():
            seconds = min(self._planning_seconds, _ENDING_SECONDS) if save.error is not None else deadline.left()
            if save.submitted.wait(seconds):
                continue
            save.promise.fail(WaitTimeoutError(f"{save.promise.path}: given up for the next one"))
            if not save.begun.is_set():
                save.end()
                continue
            raise DataStatesError(
                f"{save.promise.path} is not planned yet, nothing more is saved: it hangs in DCP's collectives, or an "
                "earlier one is still being written"
            )


def refuse_process(save: BackgroundSave) -> NoReturn:
    """End a save whose state is sent to another process. Raises pickle.PicklingError."""
    error = pickle.PicklingError(
        "a DataStatesWriter cannot save from another process: use AsyncCheckpointerType.THREAD, the default; what it "
        "saves is written by a process of its own in any case"
    )
    save.promise.fail(error)
    save.end()
    raise error
