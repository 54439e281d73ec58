"""What the records of one rank say of its pace: rates, steps, intervals; for advice while it runs and afterwards."""

from __future__ import annotations

import itertools
import statistics
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from datastates.advice import Advice, Measured, advise, widest
from datastates.events import Event
from datastates.save_records import SaveRecord, SaveTable

REMEMBERED_SECONDS = 60.0
"""Rates are those of about the last minute of work, so that they follow a disk that becomes slower."""

_NUM_SAVES, _NUM_STEPS = 16, 64  # so many of the last ones count


@dataclass(slots=True)
class _Begin:
    """A save was begun: when, and how much had happened until then."""

    attempt: str
    at: float
    held_seconds: float
    num_steps: int


class RunMeter:
    """Takes the records of one rank in the order in which they are made. Thread safe, of bounded memory."""

    def __init__(self, host_cache_bytes: int = 0) -> None:
        """Args:
        host_cache_bytes: of this rank; 0: as ``summary`` records say.
        """
        self._lock = threading.RLock()  # protects all below; a signal handler may save, too
        self._host_cache_bytes = host_cache_bytes
        self._saves = SaveTable(limit=4 * _NUM_SAVES)
        self._begins: deque[_Begin] = deque(maxlen=_NUM_SAVES + 1)
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)
        self._saved_at: float | None = None  # the last call of save() since the last fence ended then
        self._overlaps: deque[float] = deque(maxlen=_NUM_SAVES)
        self._commits: deque[float] = deque(maxlen=_NUM_SAVES)
        self._committed_at = 0.0
        self._flushing, self._copying = _Rate(), _Rate()
        self._held_seconds = self._held_at_step = 0.0  # what saves have added to the training so far
        self._called_seconds = 0.0  # in calls of save() since the last whole call
        self._num_steps = 0
        self.num_skipped = 0

    def note(self, record: Event) -> None:
        """Enter one record."""
        with self._lock:
            event, begin, end = record["event"], float(record["begin"]), float(record["end"])
            save = self._saves.note(record)
            if event == "clock":
                self._note_clock()
            elif event == "stage":
                self._copying.add(begin, end, int(record.get("nbytes", 0)))
            elif event == "flush":
                self._flushing.add(begin, end, int(record.get("nbytes", 0)))
            elif event == "durable":
                self._flushing.extend(end)  # by fsync: what was written last was this file's end, or another's
            elif event == "committed" and save is not None and save.durable_at is not None:
                self._commits.append(end - max(save.durable_at, self._committed_at))  # they are made one by one
                self._committed_at = end
            elif event in ("save", "skipped"):
                self._note_begin(record, save, begin, end)
            elif event == "save_checkpoint":
                self._held_seconds += max(end - begin - self._called_seconds, 0.0)
                self._called_seconds = 0.0
            elif event == "fence":
                self._note_fence(begin, end)
            elif event == "step":
                self._note_step(end - begin, is_first=record.get("number") == 1)
            elif event == "summary":
                self._host_cache_bytes = int(record.get("host_cache_bytes", 0)) or self._host_cache_bytes

    @property
    def measured(self) -> Measured:
        with self._lock:
            saves = [(begin, self._saves.get(begin.attempt)) for begin in self._begins]
            largest = max((save.nbytes for _, save in saves if save is not None), default=0)
            alike = [
                begin
                for begin, save in saves  # small files that are saved in between are no checkpoints
                if save is None or save.nbytes >= largest / 2 or (save.failure and not save.nbytes)
            ]
            pairs = list(itertools.pairwise(alike))
            gaps = [(b.at - a.at) - (b.held_seconds - a.held_seconds) for a, b in pairs]
            return Measured(
                nbytes=largest,
                host_cache_bytes=self._host_cache_bytes,
                flush_nbytes_per_second=self._flushing.nbytes_per_second,
                copy_nbytes_per_second=self._copying.nbytes_per_second,
                step_seconds=statistics.median(self._steps) if self._steps else None,
                overlap_seconds=statistics.median(self._overlaps) if self._overlaps else None,
                interval_seconds=max(statistics.median(gaps), 0.0) if gaps else None,
                num_steps=statistics.median(b.num_steps - a.num_steps for a, b in pairs) if pairs else None,
                commit_seconds=max(statistics.median(self._commits), 0.0) if self._commits else 0.0,
            )

    def save_of(self, attempt: str) -> SaveRecord | None:
        """What is known of a save; None for one long ago."""
        with self._lock:
            return self._saves.get(attempt)

    def _note_clock(self) -> None:
        """A process has begun, or its clock was set: the times that follow may lie before those that are known."""
        self._flushing.pause()
        self._copying.pause()
        self._committed_at, self._saved_at = 0.0, None

    def _note_begin(self, record: Event, save: SaveRecord | None, begin: float, end: float) -> None:
        attempt = str(record.get("attempt", ""))
        if save is not None and all(known.attempt != attempt for known in tuple(self._begins)):
            self._begins.append(_Begin(attempt, begin, self._held_seconds, self._num_steps))
        if record["event"] == "save":
            self._saved_at = end
            self._held_seconds += end - begin
            self._called_seconds += end - begin
        else:
            self.num_skipped += 1

    def _note_fence(self, begin: float, end: float) -> None:
        self._held_seconds += end - begin
        if self._saved_at is not None:
            self._overlaps.append(max(begin - self._saved_at, 0.0))
            self._saved_at = None

    def _note_step(self, seconds: float, *, is_first: bool) -> None:
        self._num_steps += 1
        self._called_seconds = 0.0
        if not is_first:  # of that one it is not known when it began
            self._steps.append(max(seconds - (self._held_seconds - self._held_at_step), 0.0))
        self._held_at_step = self._held_seconds


def advice_of(meters: Iterable[RunMeter]) -> Advice | None:
    """What is right for all of these ranks; None before anything was written."""
    found = (advise(meter.measured) for meter in meters)
    return widest(advice for advice in found if advice is not None)


class _Rate:
    """Bytes per second of the time in which at least one piece of work was under way."""

    def __init__(self) -> None:
        self._nbytes = self._seconds = 0.0
        self._busy_until: float | None = None

    def add(self, begin: float, end: float, nbytes: int) -> None:
        self._seconds += max(end - max(begin, begin if self._busy_until is None else self._busy_until), 0.0)
        self._busy_until = end if self._busy_until is None else max(end, self._busy_until)
        self._nbytes += nbytes
        if self._seconds > REMEMBERED_SECONDS:
            self._nbytes, self._seconds = self._nbytes / 2, self._seconds / 2

    def pause(self) -> None:
        """Forget when the last piece of work ended."""
        self._busy_until = None

    def extend(self, end: float) -> None:
        """Work went on from the last piece until now."""
        if self._busy_until is not None:
            self.add(self._busy_until, end, 0)

    @property
    def nbytes_per_second(self) -> float | None:
        return self._nbytes / self._seconds if self._seconds and self._nbytes else None
