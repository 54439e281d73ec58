"""What a run's event records say about its saves: how long each blocked, and when it was durable.

Ranks are put together by their attempts; each time is that of the rank that took longest.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from typing import Any

from datastates.events import Event


@dataclass(slots=True, eq=False)
class SaveRecord:
    """One checkpoint, or one file that was saved alone. Times are those of its records.

    Attributes:
        attempt: what its records are found by.
        path: the checkpoint's folder where that is known, else one of its files.
        begin: when its first rank began.
        nbytes: of all ranks.
        num_files: of all ranks.
        ranks: those that took part.
        staged_nbytes: copied so far, where slabs are recorded.
        flushed_nbytes: written so far, where slabs are recorded.
        staged_at: when the last copy was made, None where that was not recorded.
        durable_at: when the last file was durable, None where it was not.
        committed_at: when it was visible, None where it was not.
        num_in_flight: the most checkpoints that were not settled when a file of it was saved; itself not counted.
        num_slabs: of the host cache of a rank.
        num_free_slabs: the least that were free when a file of it was saved, None where that was not recorded.
        carried_at: by tier, when the last rank's part of it was there.
        carry_errors: by tier, why it was not carried there at last.
        failure: why it is lost or was skipped; empty where it is not.
    """

    attempt: str
    path: str
    begin: float
    nbytes: int = 0
    num_files: int = 0
    ranks: set[int] = field(default_factory=set)
    staged_nbytes: int = 0
    flushed_nbytes: int = 0
    staged_at: float | None = None
    durable_at: float | None = None
    committed_at: float | None = None
    num_in_flight: int = 0
    num_slabs: int = 0
    num_free_slabs: int | None = None
    carried_at: dict[str, float] = field(default_factory=dict)
    carry_errors: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    _calls: dict[int, float] = field(default_factory=dict, repr=False)  # seconds in save(), by rank
    _whole_calls: dict[int, float] = field(default_factory=dict, repr=False)  # in save_checkpoint
    _fences: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def blocked_seconds(self) -> float:
        """How long the calls took, on the slowest rank."""
        return max([0.0, *self._calls.values(), *self._whole_calls.values()])

    @property
    def fenced_seconds(self) -> float:
        """How long steps were held back until the next save was begun, on the slowest rank."""
        return max([0.0, *self._fences.values()])

    @property
    def staged_seconds(self) -> float | None:
        return self._since_begin(self.staged_at)

    @property
    def durable_seconds(self) -> float | None:
        return self._since_begin(self.durable_at)

    @property
    def committed_seconds(self) -> float | None:
        return self._since_begin(self.committed_at)

    @property
    def carried_seconds(self) -> dict[str, float]:
        """From the begin until it was in each further tier."""
        return {tier: at - self.begin for tier, at in self.carried_at.items()}

    @property
    def nbytes_per_second(self) -> float | None:
        """Durable rate of all ranks together, None where nothing became durable."""
        return self.nbytes / self.durable_seconds if self.durable_seconds and self.nbytes else None

    @property
    def is_settled(self) -> bool:
        return self.committed_at is not None or bool(self.failure)

    def note(self, record: Event) -> None:
        """Enter one record of it."""
        event, rank, end = record["event"], int(record["rank"]), float(record["end"])
        seconds = end - float(record["begin"])
        self.ranks.add(rank)
        self.begin = min(self.begin, float(record["begin"]))
        if event == "save":
            self._note_call(record, rank, seconds)
        elif event == "save_checkpoint":
            self.path = str(record.get("path", self.path))
            self._whole_calls[rank] = seconds  # includes what DeepSpeed does besides
        elif event in ("stage", "flush"):
            self._note_slab(record)
        elif event == "staged":
            self.staged_at = _later(self.staged_at, end)
        elif event == "durable":
            self.durable_at = _later(self.durable_at, end)
        elif event == "committed":
            self.path = str(record.get("path", self.path))
            self.committed_at = _later(self.committed_at, end)
        elif event in ("failed", "skipped"):
            self.failure = self.failure or str(record.get("error", event))
        elif event in ("carried", "carry_failed"):
            self._note_carried(record, end)

    def note_fence(self, rank: int, seconds: float) -> None:
        self._fences[rank] = self._fences.get(rank, 0.0) + seconds

    def _note_call(self, record: Event, rank: int, seconds: float) -> None:
        self.nbytes += int(record.get("nbytes", 0))
        self.num_files += 1
        self._calls[rank] = self._calls.get(rank, 0.0) + seconds
        self.num_in_flight = max(self.num_in_flight, int(record.get("num_in_flight", 0)))
        if "num_free_slabs" in record:
            self.num_slabs = int(record.get("num_slabs", 0))
            found = int(record["num_free_slabs"])
            self.num_free_slabs = found if self.num_free_slabs is None else min(found, self.num_free_slabs)

    def _note_slab(self, record: Event) -> None:
        if record["event"] == "stage":
            self.staged_nbytes += int(record.get("nbytes", 0))
        else:
            self.flushed_nbytes += int(record.get("nbytes", 0))

    def _note_carried(self, record: Event, end: float) -> None:
        tier = str(record.get("tier", ""))
        if record["event"] == "carried":
            self.carried_at[tier] = max(self.carried_at.get(tier, end), end)
            self.carry_errors.pop(tier, None)
        else:
            self.carry_errors[tier] = str(record.get("error", "not carried"))

    def _since_begin(self, at: float | None) -> float | None:
        return None if at is None else at - self.begin


class SaveTable:
    """Puts records together by saves, as they come. Not thread safe."""

    def __init__(self, limit: int | None = None) -> None:
        """Args:
        limit: how many saves are kept, those that began last; None: all.
        """
        self._limit = limit
        self._saves: dict[str, SaveRecord] = {}
        self._last: dict[int, SaveRecord] = {}  # what a rank has begun last: its fences are for that

    def note(self, record: Event) -> SaveRecord | None:
        """Enter one record; gives the save that it belongs to, None where it belongs to none."""
        rank = int(record["rank"])
        if record["event"] == "fence":
            if rank in self._last:
                self._last[rank].note_fence(rank, float(record["end"]) - float(record["begin"]))
            return self._last.get(rank)
        attempt = str(record.get("attempt", ""))
        if not attempt:
            return None
        save = self._saves.get(attempt) or self._begun(attempt, record)
        if record["event"] in ("save", "skipped"):
            self._last[rank] = save
        save.note(record)
        return save

    def _begun(self, attempt: str, record: Event) -> SaveRecord:
        """A save that was not known; one of an earlier run, of which only the carrying is told now, is not kept."""
        path = str(record.get("path", ""))
        if record["event"] in ("carried", "carry_failed"):
            return SaveRecord(attempt, path, 0.0)
        save = self._saves[attempt] = SaveRecord(attempt, path, float(record["begin"]))
        if self._limit is not None and len(self._saves) > self._limit:
            del self._saves[next(iter(self._saves))]
        return save

    def get(self, attempt: str) -> SaveRecord | None:
        return self._saves.get(attempt)

    @property
    def saves(self) -> list[SaveRecord]:
        """In the order in which they began."""
        return sorted(self._saves.values(), key=lambda save: save.begin)


def summary_of(saves: list[SaveRecord]) -> dict[str, Any]:
    """How many saves there were, and medians over those that were committed (None where there are none)."""
    whole = [save for save in saves if save.committed_at is not None]
    gaps = [later.begin - earlier.begin for earlier, later in itertools.pairwise(saves)]
    return {
        "num_saves": len(saves),
        "num_committed": len(whole),
        "num_lost": sum(bool(save.failure) for save in saves),
        "nbytes": _median([save.nbytes for save in whole]),
        "blocked_seconds": _median([save.blocked_seconds for save in whole]),
        "fenced_seconds": _median([save.fenced_seconds for save in whole]),
        "durable_seconds": _median([save.durable_seconds for save in whole]),
        "committed_seconds": _median([save.committed_seconds for save in whole]),
        "nbytes_per_second": _median([save.nbytes_per_second for save in whole]),
        "interval_seconds": _median(gaps),
    }


def _later(known: float | None, found: float) -> float:
    return found if known is None else max(known, found)


def _median(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
