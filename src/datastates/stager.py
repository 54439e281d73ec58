"""The stager: fills slabs of the host cache from the state, behind the training's back.

One thread takes the files in the order in which they were saved, fills slab after slab, and passes each full
one to the flusher. It is the only part that reads the caller's tensors after ``save()`` has returned.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from datastates.bundles import BundledTensor
from datastates.copier import Copier, HostCopier, Mark, copier_for
from datastates.copying import memory_at
from datastates.errors import ClosedError, WaitTimeoutError
from datastates.events import EventLog, now
from datastates.gathering import MIN_PIECES, gather_segments, place_of, runs_of
from datastates.host_cache import HostCache, Slab
from datastates.plan import FilePlan, Piece, Segment, SlabPlan
from datastates.segment_table import SegmentTable
from datastates.staging_job import FileT, StagingJob

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")

FileT_contra = TypeVar("FileT_contra", contravariant=True)


class SlabSink(Protocol[FileT_contra]):
    """Where full slabs go: the flusher's client, seen from here."""

    def flush_slab(self, file: FileT_contra, index: int, cache_offset: int, nbytes: int) -> None:
        """Take over the slab at ``cache_offset``; it comes back through `HostCache.release`."""


@dataclass(frozen=True, slots=True)
class _FilledSlab(Generic[FileT]):
    """A slab whose copies have been issued, all but those of ``late``: these follow when the marks are passed.

    Its plan holds the sources until then, also those of a file that is lost: their memory must not be given to others.
    """

    job: StagingJob[FileT]
    plan: SlabPlan
    slab: Slab
    marks: Sequence[Mark]
    late: Sequence[Piece]
    begin: float
    is_last: bool


class Stager(Generic[FileT]):
    """Owns the staging thread. `submit`, `copier` and `close` may be called from any thread.

    Whatever fails while a file is staged loses that file and no other: its job ends with the error.
    """

    def __init__(
        self,
        cache: HostCache,
        sink: SlabSink[FileT],
        events: EventLog,
        loss_of: Callable[[FileT], BaseException | None],
        on_lost: Callable[[StagingJob[FileT], BaseException], None],
        make_copier: Callable[[torch.device], Copier] = copier_for,
    ) -> None:
        """Args:
        cache: where slabs come from; the sink gives them back to it.
        sink: takes full slabs.
        events: receives the records ``stage`` and ``staged``.
        loss_of: why a file is lost downstream, None while it is not.
        on_lost: called on the staging thread when a file cannot be staged, before `StagingJob.staged` fails.
        make_copier: makes the copier of a device, on first use.
        """
        self._cache = cache
        self._sink = sink
        self._events = events
        self._loss_of = loss_of
        self._on_lost = on_lost
        self._make_copier = make_copier
        self._copiers_lock = threading.RLock()  # protects the creation of copiers; a signal handler may save, too
        self._copiers: dict[torch.device, Copier] = {}
        self._jobs: queue.SimpleQueue[StagingJob[FileT] | None] = queue.SimpleQueue()
        self._filled: deque[_FilledSlab[FileT]] = deque()
        self.starved_seconds = 0.0
        """How long the thread has waited for free slabs, all in all."""
        self._descriptor = os.dup(cache.descriptor)  # its own: the cache may be closed while the thread is stuck
        self._thread = threading.Thread(target=self._run, name="datastates-stager", daemon=True)
        self._thread.start()

    def copier(self, device: torch.device) -> Copier:
        """The one copier of a device."""
        with self._copiers_lock:
            known = self._copiers.get(device)
            return known or self._copiers.setdefault(device, self._make_copier(device))

    def submit(self, job: StagingJob[FileT]) -> None:
        """Queue a file; returns at once. Marks the devices' current streams: the copies wait for what they hold.

        Streams that are in `StagingJob.ready` already have been marked at the moment of the save.
        """
        for device in _devices_of(job.plan):
            if device not in job.ready:
                job.ready[device] = self.copier(device).ready()
        self._jobs.put(job)

    @property
    def is_alive(self) -> bool:
        """Whether the thread may still read the state and write to the cache."""
        return self._thread.is_alive()

    def close(self, timeout: float | None = None) -> None:
        """Finish the queued files, then end the thread; idempotent.

        Raises:
            WaitTimeoutError: it did not end within ``timeout`` seconds.
        """
        self._jobs.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise WaitTimeoutError(f"staging did not end within {timeout} s: {self._cache!r}")

    # ------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._stage_all()
        finally:
            os.close(self._descriptor)

    def _stage_all(self) -> None:
        while (job := self._next_job()) is not None:
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
                self._hand_over()
        job = self._jobs.get()
        if job is None:
            self._hand_over()
        return job

    def _stage(self, job: StagingJob[FileT]) -> None:
        plan, slab_bytes = job.plan, self._cache.slab_bytes
        num_slabs = plan.num_slabs(slab_bytes)
        if num_slabs == 0:
            job.finish(None)
        for slab_plan in plan.slabs(slab_bytes):
            loss = self._loss_of(job.file)
            if loss is not None or job.staged.done():
                raise loss or ClosedError(f"{job.path}: given up while it was staged")
            slab = self._reserve()
            begin, is_last = now(), slab_plan.index == num_slabs - 1
            try:
                marks, late = self._fill(job, slab_plan, slab)
                self._check(job, slab_plan, is_last)
            except BaseException:
                try:
                    self._settle_copies()
                finally:
                    self._cache.release(slab.offset)
                raise
            self._filled.append(_FilledSlab(job, slab_plan, slab, marks, late, begin, is_last))
            if slab_plan.begin + slab_plan.nbytes >= plan.eager_end:
                job.note_eager_issued()
            if is_last:
                job.issued.set()
            self._hand_over(block=False)

    def _check(self, job: StagingJob[FileT], plan: SlabPlan, is_last: bool) -> None:
        """Ask the version counters once for each source, as late as it may not have changed yet."""
        eager_end = job.plan.eager_end
        if plan.begin < eager_end <= plan.begin + plan.nbytes:
            job.check_versions(0, eager_end)
        if is_last:
            job.check_versions(eager_end, job.plan.nbytes)

    def _settle_copies(self) -> None:
        """Wait for every device copy issued so far: a slab must not be reused while one may still write to it."""
        for copier in self._copiers.values():
            mark = copier.mark()
            if mark is not None:
                mark.synchronize()

    def _reserve(self) -> Slab:
        slab = self._cache.try_reserve()
        if slab is None:
            self._hand_over()
            begin = time.monotonic()
            slab = self._cache.reserve()
            self.starved_seconds += time.monotonic() - begin
        return slab

    def _fill(self, job: StagingJob[FileT], plan: SlabPlan, slab: Slab) -> tuple[list[Mark], list[Piece]]:
        """Issue the copies that fill one slab; zero what no piece covers. Gives their marks, and what follows these."""
        end = plan.begin
        late: list[Piece] = []
        devices: dict[torch.device, Copier] = {}
        pointer, memory = slab.memory.data_ptr(), slab.memory
        for run in runs_of(plan):
            begin, end_of_run = place_of(run)
            _zero(pointer, end - plan.begin, begin - plan.begin)
            end = min(end_of_run, plan.end)
            if self._copy_run(plan, run, slab):
                continue
            for piece in map(plan.piece, run):
                self._copy(job, piece, memory, devices, late)
        _zero(pointer, end - plan.begin, plan.nbytes)
        marks = {device: copier.mark() for device, copier in devices.items()}
        issued = {device: mark for device, mark in marks.items() if mark is not None}
        job.marks.update(issued)
        return list(issued.values()), late

    def _copy_run(self, plan: SlabPlan, run: Sequence[Segment], slab: Slab) -> bool:
        """Copy a run of segments by few calls; False where they must be copied one by one."""
        if not isinstance(self.copier(_HOST), HostCopier):
            return False
        if isinstance(run, SegmentTable):
            return run.copy_into(self._descriptor, slab, plan)
        return len(run) >= MIN_PIECES and gather_segments(self._descriptor, slab.offset, plan, run)

    def _copy(
        self,
        job: StagingJob[FileT],
        piece: Piece,
        memory: torch.Tensor,
        devices: dict[torch.device, Copier],
        late: list[Piece],
    ) -> None:
        """Issue the copy of one piece; note its device's copier, and whether it has to follow later."""
        source, begin, end = piece.segment.source, piece.slab_begin, piece.slab_begin + piece.nbytes
        if isinstance(source, torch.Tensor):
            copier = devices.setdefault(source.device, self.copier(source.device))
            copier.copy(piece, memory[begin:end], job.ready[source.device])
        elif isinstance(source, (bytes, bytearray, memoryview)):
            _copy_literal(memory.data_ptr(), piece, source)
        elif isinstance(source, BundledTensor):
            copier = devices.setdefault(source.device, self.copier(source.device))
            source.bundle.bring(copier)
            late.append(piece)
        else:
            source.read_into(piece.segment_begin, memory_at(memory.data_ptr() + begin, piece.nbytes))

    def _hand_over(self, block: bool = True) -> None:
        """Pass filled slabs to the sink, oldest first; with ``block``, wait until their copies have arrived."""
        while self._filled:
            filled = self._filled[0]
            try:
                if not block and not all(mark.query() for mark in filled.marks):
                    return
                for mark in filled.marks:
                    mark.synchronize()
            except Exception as error:  # noqa: BLE001 - the device failed: this file is lost, the thread goes on
                self._filled.popleft()
                self._cache.release(filled.slab.offset)
                self._lose(filled.job, error)
                continue
            self._filled.popleft()
            self._pass_on(filled)

    def _pass_on(self, filled: _FilledSlab[FileT]) -> None:
        job, plan = filled.job, filled.plan
        if job.staged.done():
            self._cache.release(filled.slab.offset)
            return
        is_passed = False
        try:
            if filled.is_last and job.marks:
                job.check_versions(job.plan.eager_end, job.plan.nbytes)
            _read_late(filled.late, filled.slab.memory.data_ptr())
            if job.check is not None:
                for piece in plan.pieces:
                    job.check.note(piece, filled.slab.memory)
            self._events.record("stage", filled.begin, now(), **job.names, index=plan.index, nbytes=plan.nbytes)
            is_passed = True  # from here on the sink releases the slab, unless it refuses it
            self._sink.flush_slab(job.file, plan.index, filled.slab.offset, plan.nbytes)
        except Exception as error:  # noqa: BLE001 - this file is lost, the thread goes on with the others
            if not is_passed or isinstance(error, (ClosedError, ValueError)):
                self._cache.release(filled.slab.offset)
            self._lose(job, error)
            return
        if filled.is_last:
            self._events.record("staged", job.begin, now(), **job.names, nbytes=job.plan.nbytes)
            job.finish(None)

    def _lose(self, job: StagingJob[FileT], error: BaseException) -> None:
        if job.staged.done():
            return
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error must not keep slabs and tensors alive
        try:
            self._on_lost(job, error)
        except Exception:
            logger.exception("%s: could not be given up in an orderly way", job.path)
        finally:
            job.finish(error)


def _devices_of(plan: FilePlan) -> set[torch.device]:
    """The devices that have something of a file; a device's name costs more than to ask for the host."""
    if isinstance(plan.segments, SegmentTable):
        return {_HOST}
    devices, has_host = set(), False
    for segment in plan.segments:
        source = segment.source
        if isinstance(source, torch.Tensor) and source.is_cpu:
            has_host = True
        elif isinstance(source, (torch.Tensor, BundledTensor)):
            devices.add(source.device)
    return devices | {_HOST} if has_host else devices


def _zero(pointer: int, begin: int, end: int) -> None:
    if begin < end:
        ctypes.memset(pointer + begin, 0, end - begin)


def _read_late(pieces: Sequence[Piece], pointer: int) -> None:
    for piece in pieces:
        source = piece.segment.source
        assert isinstance(source, BundledTensor)  # noqa: S101 - `_fill` puts nothing else here
        source.read_into(piece.segment_begin, memory_at(pointer + piece.slab_begin, piece.nbytes))


def _copy_literal(pointer: int, piece: Piece, source: bytes | bytearray | memoryview) -> None:
    if isinstance(source, bytes):  # long ones, without holding the GIL
        address = ctypes.cast(ctypes.c_char_p(source), ctypes.c_void_p).value or 0
        ctypes.memmove(pointer + piece.slab_begin, address + piece.segment_begin, piece.nbytes)
        return
    part = memoryview(source).cast("B")[piece.segment_begin : piece.segment_begin + piece.nbytes]
    memory_at(pointer + piece.slab_begin, piece.nbytes)[:] = part
