"""One file on its way from the state to the host cache, and how far it is."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from datastates.copier import Copier, Mark
from datastates.errors import TornSnapshotError, WaitTimeoutError
from datastates.events import now
from datastates.plan import FilePlan, Segment
from datastates.segment_table import SegmentTable
from datastates.verification import SourceCheck

FileT = TypeVar("FileT")
Copiers = Callable[[torch.device], Copier]


class StagingJob(Generic[FileT]):
    """Shared by the thread that saves, the staging thread, and whoever closes the fence.

    Attributes:
        plan: the file's image; emptied of its sources when the job is done.
        file: what the flusher's client knows the file by.
        staged: done when the stager needs the state no longer. Its exception, if any, says why the file is lost.
        issued: set when all copies have been issued, host copies being complete then.
        marks: the last copies issued on each device.
        ready: per device, what the caller's stream had been given at ``save()``; the copies wait for it.
        names: what records of it are found by.
        check: takes note of what was copied, None unless the sources are to be read again.
    """

    def __init__(
        self, plan: FilePlan, file: FileT, path: str, check: SourceCheck | None = None, attempt: str = ""
    ) -> None:
        self.plan = plan
        self.file = file
        self.path = path
        self.check = check
        self.begin = now()
        self.names = {"attempt": attempt, "path": path}
        self.staged: Future[None] = Future()
        self.staged.set_running_or_notify_cancel()  # nobody can call the work back
        self.issued = threading.Event()
        self.marks: dict[torch.device, Mark] = {}
        self.ready: dict[torch.device, Mark | None] = {}
        self._eager_issued = threading.Event()
        self._is_fenced = False

    def wait_issued(self, timeout: float | None) -> None:
        """Block until all copies have been issued, or the file is lost. Raises WaitTimeoutError."""
        if not self.issued.wait(timeout):
            raise WaitTimeoutError(f"{self.path}: not staged within {timeout} s")

    def hold(self, copiers: Copiers) -> None:
        """Order later work of the caller's streams behind the copies; the host does not wait. Needs `issued`."""
        if not self.staged.done():
            _hold(self.marks, copiers)
        self._is_fenced = True

    def wait_eager(self, copiers: Copiers) -> None:
        """Block until all that may change before the fence has been copied (or ordered behind its copy)."""
        if self.plan.eager_end:
            self._eager_issued.wait()
            if not self.staged.done():
                _hold(dict(self.marks), copiers)

    def note_eager_issued(self) -> None:
        self._eager_issued.set()

    def check_versions(self, begin: int, end: int) -> None:
        """Raise TornSnapshotError if a source in ``[begin, end)`` was changed in place since ``save()``.

        Sees what autograd's version counters see: not writes through ``.data``, not fused optimizer kernels. What the
        fence has let go may change, and is not asked about any more.
        """
        torn = _changed(self.plan.segments, begin, end)
        if torn and not self._is_fenced:  # asked last: training may have passed the fence while we looked
            raise torn_error(self.path, torn)

    def finish(self, error: BaseException | None) -> None:
        """The stager is done with the file; idempotent, the first outcome stays."""
        if self.staged.done():
            return
        self.plan = dataclasses.replace(self.plan, segments=(), seals=())  # lets go of the state
        if error is None:
            self.staged.set_result(None)
        else:
            self.staged.set_exception(error)
        self._eager_issued.set()
        self.issued.set()


def torn_error(path: str, fqns: tuple[str, ...]) -> TornSnapshotError:
    return TornSnapshotError(
        f"{path}: tensors changed between save() and their copy ({len(fqns)}, first {fqns[0]!r}): the save was "
        "dropped, nothing torn is published. Call wait() before changing the state outside of an optimizer's step",
        fqns,
    )


def _hold(marks: dict[torch.device, Mark], copiers: Copiers) -> None:
    for device, mark in marks.items():
        copiers(device).hold_current_stream(mark)


def _changed(segments: Sequence[Segment], begin: int, end: int) -> tuple[str, ...]:
    if isinstance(segments, SegmentTable):
        return segments.changed(begin, end)
    return tuple(
        segment.fqn
        for segment in segments
        if segment.version >= 0 and begin <= segment.begin < end and _version(segment.source) != segment.version
    )


def _version(source: object) -> int:
    return source._version if isinstance(source, torch.Tensor) else -1
