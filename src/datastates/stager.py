"""The stager: fills slabs of the host cache from the state, behind the training's back.

One thread takes the files in the order in which they were saved, fills slab after slab, and passes each full
one to the flusher. It is the only part that reads the caller's tensors after ``save()`` has returned; a
`StagingJob` says how far it is.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from datastates.copier import Copier, Mark, copier_for
from datastates.errors import ClosedError, TornSnapshotError, WaitTimeoutError
from datastates.events import EventLog, now
from datastates.host_cache import HostCache, Slab
from datastates.plan import FilePlan, Piece, SlabPlan
from datastates.verification import SourceCheck

logger = logging.getLogger(__name__)

FileT = TypeVar("FileT")
FileT_contra = TypeVar("FileT_contra", contravariant=True)


class SlabSink(Protocol[FileT_contra]):
    """Where full slabs go: the flusher's client, seen from here."""

    def flush_slab(self, file: FileT_contra, index: int, cache_offset: int, nbytes: int) -> None:
        """Take over the slab at ``cache_offset``; it comes back through `HostCache.release`."""


class StagingJob(Generic[FileT]):
    """One file on its way from the state to the host cache.

    Attributes:
        plan: the file's image; emptied of its sources when the job is done.
        staged: done when the stager needs the state no longer. Its exception, if any, says why the file is lost.
        issued: set when all copies have been issued, host copies being complete then.
        check: takes note of what was copied, None unless the sources are to be read again.
    """

    def __init__(
        self,
        plan: FilePlan,
        file: FileT,
        path: str,
        is_lost: Callable[[], bool],
        check: SourceCheck | None = None,
    ) -> None:
        self.plan = plan
        self.file = file
        self.path = path
        self.begin = now()
        self.staged: Future[None] = Future()
        self.issued = threading.Event()
        self.marks: dict[torch.device, Mark] = {}
        self.ready: dict[torch.device, Mark | None] = {}
        self.is_lost = is_lost
        self.check = check
        self._fenced = False
        self._eager_issued = threading.Event()

    def wait_issued(self, timeout: float | None) -> bool:
        return self.issued.wait(timeout)

    def hold(self, copiers: Callable[[torch.device], Copier]) -> None:
        """Order later work of the caller's streams behind the copies; the host does not wait. Needs `issued`."""
        for device, mark in self.marks.items():
            copiers(device).hold_current_stream(mark)
        self._fenced = True

    def wait_eager(self, copiers: Callable[[torch.device], Copier]) -> None:
        """Block until all that may change before the fence has been copied (or ordered behind its copy)."""
        if self.plan.eager_end:
            self._eager_issued.wait()
            for device, mark in dict(self.marks).items():
                copiers(device).hold_current_stream(mark)

    def note_issued(self, end: int, is_last: bool) -> None:
        if end >= self.plan.eager_end or is_last:
            self._eager_issued.set()
        if is_last:
            self.issued.set()

    def check_versions(self) -> None:
        """Raise TornSnapshotError if a source was changed in place since ``save()``.

        Sees what autograd's version counters see: not writes through ``.data``, not fused optimizer kernels. Not
        asked once the fence has let the training go on, since sources may change then.
        """
        if self._fenced:
            return
        torn = tuple(s.fqn for s in self.plan.segments if s.version >= 0 and _version(s.source) != s.version)
        if torn:
            raise TornSnapshotError(torn_message(self.path, torn), torn)

    def finish(self, error: BaseException | None) -> None:
        self.note_issued(self.plan.nbytes, True)
        self.plan = dataclasses.replace(self.plan, segments=(), seals=())  # lets go of the state
        if not self.staged.done():
            if error is None:
                self.staged.set_result(None)
            else:
                self.staged.set_exception(error)


@dataclass(frozen=True, slots=True)
class _FilledSlab(Generic[FileT]):
    """A slab whose copies have been issued."""

    job: StagingJob[FileT]
    plan: SlabPlan
    slab: Slab
    marks: Sequence[Mark]
    begin: float
    is_last: bool


class Stager(Generic[FileT]):
    """Owns the staging thread. `submit` and `close` may be called from any thread."""

    def __init__(
        self,
        cache: HostCache,
        sink: SlabSink[FileT],
        events: EventLog,
        on_lost: Callable[[StagingJob[FileT], BaseException], None],
        make_copier: Callable[[torch.device], Copier] = copier_for,
    ) -> None:
        """Args:
        cache: where slabs come from; the sink gives them back to it.
        sink: takes full slabs.
        on_lost: called on the staging thread when a file cannot be staged, before `StagingJob.staged` fails.
        make_copier: makes the copier of a device, on first use.
        """
        self._cache = cache
        self._sink = sink
        self._events = events
        self._on_lost = on_lost
        self._make_copier = make_copier
        self._copiers_lock = threading.Lock()  # protects the creation of copiers
        self._copiers: dict[torch.device, Copier] = {}
        self._jobs: queue.SimpleQueue[StagingJob[FileT] | None] = queue.SimpleQueue()
        self._filled: deque[_FilledSlab[FileT]] = deque()
        self.starved_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="datastates-stager", daemon=True)
        self._thread.start()

    def copier(self, device: torch.device) -> Copier:
        """The one copier of a device."""
        with self._copiers_lock:
            if device not in self._copiers:
                self._copiers[device] = self._make_copier(device)
            return self._copiers[device]

    def submit(self, job: StagingJob[FileT]) -> None:
        """Queue a file; returns at once. Marks the devices' current streams: the copies wait for what they hold."""
        for device in {s.source.device for s in job.plan.segments if isinstance(s.source, torch.Tensor)}:
            job.ready[device] = self.copier(device).ready()
        self._jobs.put(job)

    def close(self, timeout: float | None = None) -> None:
        """Finish the queued files, then end the thread; idempotent.

        Raises:
            WaitTimeoutError: it did not end within ``timeout`` seconds.
        """
        self._jobs.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise WaitTimeoutError(f"staging did not end within {timeout} s: {self._cache!r}")

    def _run(self) -> None:
        while True:
            job = self._next_job()
            if job is None:
                return
            try:
                self._stage(job)
            except Exception as error:  # noqa: BLE001 - top of the thread: the file is lost, the caller learns why
                self._lose(job, error)

    def _next_job(self) -> StagingJob[FileT] | None:
        """The next file; hands over what earlier files still have on their way to the host meanwhile."""
        if self._filled:
            try:
                return self._jobs.get_nowait()
            except queue.Empty:
                self._hand_over(num_left=0)
        job = self._jobs.get()
        if job is None:
            self._hand_over(num_left=0)
        return job

    def _stage(self, job: StagingJob[FileT]) -> None:
        slab_bytes = self._cache.slab_bytes
        last = job.plan.num_slabs(slab_bytes) - 1
        for plan in job.plan.slabs(slab_bytes):
            if job.is_lost():
                raise ClosedError(f"{job.path}: the file was lost while it was staged")
            slab = self._reserve()
            begin = now()
            try:
                marks = self._fill(job, plan, slab.memory)
            except BaseException:
                self._settle_copies()
                self._cache.release(slab.offset)
                raise
            if plan.index == last:
                self._check_versions(job, slab)
            self._filled.append(_FilledSlab(job, plan, slab, marks, begin, plan.index == last))
            job.note_issued(plan.begin + plan.nbytes, plan.index == last)
            self._hand_over(num_left=len(self._filled), block=False)
        if last < 0:
            job.finish(None)

    def _settle_copies(self) -> None:
        """Wait for every device copy issued so far: a slab must not be reused while one may still write to it."""
        for copier in self._copiers.values():
            mark = copier.mark()
            if mark is not None:
                mark.synchronize()

    def _check_versions(self, job: StagingJob[FileT], slab: Slab) -> None:
        try:
            job.check_versions()
        except TornSnapshotError:
            self._cache.release(slab.offset)
            raise

    def _reserve(self) -> Slab:
        slab = self._cache.try_reserve()
        if slab is None:
            self._hand_over(num_left=0)
            begin = time.monotonic()
            slab = self._cache.reserve()
            self.starved_seconds += time.monotonic() - begin
        return slab

    def _fill(self, job: StagingJob[FileT], plan: SlabPlan, memory: torch.Tensor) -> list[Mark]:
        """Issue the copies that fill one slab; zero what no piece covers."""
        end = 0
        devices: dict[torch.device, Copier] = {}
        pointer = memory.data_ptr()
        for piece in plan.pieces:
            _zero(pointer, end, piece.slab_begin)
            end = piece.slab_begin + piece.nbytes
            if piece.segment.is_literal:
                _copy_literal(pointer, piece)
                continue
            device = piece.segment.source.device  # type: ignore[union-attr]
            copier = devices.setdefault(device, self.copier(device))
            copier.copy(piece, memory[piece.slab_begin : end], job.ready[device])
        _zero(pointer, end, plan.nbytes)
        marks = {device: copier.mark() for device, copier in devices.items()}
        issued = {device: mark for device, mark in marks.items() if mark is not None}
        job.marks.update(issued)
        return list(issued.values())

    def _hand_over(self, num_left: int, block: bool = True) -> None:
        """Pass filled slabs to the sink, oldest first; with ``block``, wait for the copies of all but ``num_left``."""
        while self._filled:
            filled = self._filled[0]
            if not all(mark.query() for mark in filled.marks):
                if not block or len(self._filled) <= num_left:
                    return
                for mark in filled.marks:
                    mark.synchronize()
            self._filled.popleft()
            self._pass_on(filled)

    def _pass_on(self, filled: _FilledSlab[FileT]) -> None:
        job = filled.job
        if job.staged.done():
            self._cache.release(filled.slab.offset)
            return
        try:
            if filled.is_last and job.marks:
                job.check_versions()
        except TornSnapshotError as error:
            self._cache.release(filled.slab.offset)
            self._lose(job, error)
            return
        if job.check is not None:
            for piece in filled.plan.pieces:
                job.check.note(piece, filled.slab.memory)
        self._events.record(
            "stage", filled.begin, now(), path=job.path, index=filled.plan.index, nbytes=filled.plan.nbytes
        )
        self._sink.flush_slab(job.file, filled.plan.index, filled.slab.offset, filled.plan.nbytes)
        if filled.is_last:
            self._events.record("staged", job.begin, now(), path=job.path, nbytes=job.plan.nbytes)
            job.finish(None)

    def _lose(self, job: StagingJob[FileT], error: BaseException) -> None:
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error must not keep slabs and tensors alive
        self._on_lost(job, error)
        job.finish(error)


def torn_message(path: str, fqns: tuple[str, ...]) -> str:
    return (
        f"{path}: {len(fqns)} tensors changed between save() and their copy, first {fqns[0]!r}: the save was dropped, "
        "nothing torn is published. Call wait() before changing the state outside of an optimizer's step"
    )


def _version(source: object) -> int:
    return source._version if isinstance(source, torch.Tensor) else -1


def _zero(pointer: int, begin: int, end: int) -> None:
    if begin < end:
        ctypes.memset(pointer + begin, 0, end - begin)


def _copy_literal(pointer: int, piece: Piece) -> None:
    source = memoryview(piece.segment.source).cast("B")  # type: ignore[arg-type]
    part = source[piece.segment_begin : piece.segment_begin + piece.nbytes]
    target = (ctypes.c_char * piece.nbytes).from_address(pointer + piece.slab_begin)
    memoryview(target).cast("B")[:] = part
