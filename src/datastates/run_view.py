"""The state of a run, kept up to date from its records: for whoever looks on while it works."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from datastates.advice import Advice
from datastates.events import Event
from datastates.run_meter import RunMeter, advice_of
from datastates.save_records import SaveRecord, SaveTable

CUT_OFF = "cut off: its process has ended"

_NUM_SAVES, _NUM_FAILURES = 256, 8  # so many of the last ones are known


@dataclass(slots=True)
class RankView:
    """One rank.

    Attributes:
        host: where it runs, empty where that was not recorded.
        pid: of its process, 0 where that was not recorded.
        started_at: when its process began to write, 0 where that was not recorded.
        seen_at: when its last record ended.
        num_steps: optimizer steps of its process so far.
        step_seconds: of the last one.
        num_saves: calls of ``save()``.
        num_committed: checkpoints and files alone that it had a part in; likewise the next two.
        num_lost: of which something was lost.
        num_skipped: not made, or dropped.
        nbytes: given to save.
        blocked_seconds: in ``save()``.
        fenced_seconds: that steps were held back.
        last: its ``summary`` of what was committed last.
        meter: its pace.
    """

    host: str = ""
    pid: int = 0
    started_at: float = 0.0
    seen_at: float = 0.0
    num_steps: int = 0
    step_seconds: float | None = None
    num_saves: int = 0
    num_committed: int = 0
    num_lost: int = 0
    num_skipped: int = 0
    nbytes: int = 0
    blocked_seconds: float = 0.0
    fenced_seconds: float = 0.0
    last: Event | None = None
    meter: RunMeter = field(default_factory=RunMeter)


@dataclass(frozen=True, slots=True)
class TierView:
    """A tier behind the first one.

    Attributes:
        last: what was carried there last, None where nothing was.
        num_behind: checkpoints that were committed since and are not there.
        error: why the last carry failed; empty where it did not.
    """

    name: str
    last: SaveRecord | None
    num_behind: int
    error: str


class RunView:
    """Takes the records of all ranks, as they come. Of bounded memory; not thread safe."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankView] = {}
        self.begin: float | None = None
        """Of the first record that is of a step or a save; None before there is one."""
        self.failures: deque[SaveRecord] = deque(maxlen=_NUM_FAILURES)
        self.last_committed: SaveRecord | None = None
        self._table = SaveTable(_NUM_SAVES)
        self._lost: dict[int, str] = {}  # by rank, the attempt that was counted last
        self._tiers: dict[str, SaveRecord | None] = {}  # what was carried there that began last
        self._tier_errors: dict[str, str] = {}  # of the last carry; empty where it succeeded

    def note_all(self, records: Iterable[Event]) -> None:
        for record in records:
            self.note(record)

    def note(self, record: Event) -> None:
        """Enter one record."""
        number, event = int(record["rank"]), record["event"]
        rank = self.ranks.get(number)
        if rank is None:
            rank = self.ranks[number] = RankView()
        rank.seen_at = max(rank.seen_at, float(record["end"]))
        if event == "clock":
            self._note_start(number, rank, record)
        elif self.begin is None or record["begin"] < self.begin:
            self.begin = float(record["begin"])
        save = self._table.note(record)
        was_lost = save is not None and save in self.failures
        rank.meter.note(record)
        self._count(number, rank, record)
        if event in ("carried", "carry_failed"):
            self._note_tier(record, save)
        if save is None:
            return
        if event == "committed" and (self.last_committed is None or save.begin >= self.last_committed.begin):
            self.last_committed = save
        if save.failure and not was_lost:
            self.failures.append(save)

    @property
    def present(self) -> dict[int, RankView]:
        """The ranks that have been seen since the last start of one: a job may start anew with fewer."""
        started_at = max((rank.started_at for rank in self.ranks.values()), default=0.0)
        return {number: rank for number, rank in self.ranks.items() if rank.seen_at >= started_at}

    @property
    def in_flight(self) -> list[SaveRecord]:
        """What is neither committed nor lost, as far as the records say, in the order of the begins."""
        return [save for save in self._table.saves if save.num_files and not save.is_settled]

    @property
    def num_committed(self) -> int:
        """Of the rank that has taken part in most."""
        return max((rank.num_committed for rank in self.ranks.values()), default=0)

    @property
    def tiers(self) -> list[TierView]:
        """Those that something was carried to, or tried to be."""
        return [self._tier(name, last) for name, last in sorted(self._tiers.items())]

    @property
    def advice(self) -> Advice | None:
        """What is right for all ranks that are present."""
        return advice_of(rank.meter for rank in self.present.values())

    def rate(self, name: str) -> float | None:
        """The sum over the ranks that are present of a rate of `Measured`, None where none has it."""
        found = [getattr(rank.meter.measured, name) for rank in self.present.values()]
        known = [rate for rate in found if rate is not None]
        return sum(known) if known else None

    def plain(self, now: float) -> dict[str, Any]:
        """All of it as plain values for machines; ages are counted from ``now``."""
        last, advice = self.last_committed, self.advice
        return {
            "ranks": [_plain_rank(number, rank, now) for number, rank in sorted(self.ranks.items())],
            "in_flight": [_plain_save(save, now) for save in self.in_flight],
            "num_committed": self.num_committed,
            "last_committed": None if last is None else _plain_save(last, now),
            "flush_nbytes_per_second": self.rate("flush_nbytes_per_second"),
            "copy_nbytes_per_second": self.rate("copy_nbytes_per_second"),
            "failures": [{"path": save.path, "error": save.failure} for save in self.failures],
            "tiers": [
                {"tier": tier.name, "num_behind": tier.num_behind, "error": tier.error}
                | {"last": None if tier.last is None else tier.last.path}
                for tier in self.tiers
            ],
            "advice": None if advice is None else advice.plain(),
        }

    def _note_start(self, number: int, rank: RankView, record: Event) -> None:
        """A process has begun to write: what an earlier one of this rank had in flight will not be told of any more."""
        host, pid = str(record.get("host", "")), int(record.get("pid", 0))
        is_same = (rank.host, rank.pid) == (host, pid)  # it has made a second engine, or its clock was set
        rank.host, rank.pid = host, pid
        if is_same:
            return
        rank.started_at, rank.seen_at = float(record["begin"]), float(record["end"])
        rank.num_steps, rank.step_seconds = 0, None
        for save in self.in_flight:
            if number in save.ranks and save.begin < float(record["begin"]):
                save.failure = CUT_OFF
                self.failures.append(save)

    def _count(self, number: int, rank: RankView, record: Event) -> None:
        event, seconds = record["event"], float(record["end"]) - float(record["begin"])
        if event == "save":
            rank.num_saves += 1
            rank.nbytes += int(record.get("nbytes", 0))
            rank.blocked_seconds += seconds
        elif event == "fence":
            rank.fenced_seconds += seconds
        elif event == "step":
            rank.num_steps, rank.step_seconds = int(record.get("number", 0)), seconds
        elif event == "committed":
            rank.num_committed += 1
        elif event == "summary":
            rank.last = record
        elif event == "skipped":
            rank.num_skipped += 1
        elif event == "failed" and self._lost.get(number) != record.get("attempt"):
            self._lost[number] = str(record.get("attempt", ""))  # a lost checkpoint tells of each of its files
            rank.num_lost += 1

    def _note_tier(self, record: Event, save: SaveRecord | None) -> None:
        """The save is None where all carrying to the tier has failed, not that of a checkpoint."""
        name = str(record.get("tier", ""))
        known = self._tiers.setdefault(name, None)
        self._tier_errors[name] = str(record.get("error", "")) if record["event"] == "carry_failed" else ""
        if record["event"] == "carried" and save is not None and (known is None or save.begin >= known.begin):
            self._tiers[name] = save

    def _tier(self, name: str, last: SaveRecord | None) -> TierView:
        begin = -1.0 if last is None else last.begin
        waiting = [
            save
            for save in self._table.saves
            if save.begin > begin and save.committed_at is not None and name not in save.carried_at
        ]
        return TierView(name, last, len(waiting), self._tier_errors[name])


def seen_in(records: Iterable[Event]) -> tuple[RunView, list[SaveRecord]]:
    """A run as its records show it, and all of its saves in the order in which they began.

    What was in flight when a process was killed has no end in the list: its flusher may have committed it all the same.
    """
    view, table = RunView(), SaveTable()
    for record in records:
        view.note(record)
        table.note(record)
    return view, table.saves


def _plain_rank(number: int, rank: RankView, now: float) -> dict[str, Any]:
    return {
        "rank": number,
        "host": rank.host,
        "pid": rank.pid,
        "age_seconds": now - rank.seen_at,
        "num_steps": rank.num_steps,
        "step_seconds": rank.step_seconds,
        "num_committed": rank.num_committed,
        "num_lost": rank.num_lost,
        "num_skipped": rank.num_skipped,
    }


def _plain_save(save: SaveRecord, now: float) -> dict[str, Any]:
    return {
        "path": save.path,
        "num_ranks": len(save.ranks),
        "nbytes": save.nbytes,
        "staged_nbytes": min(save.staged_nbytes, save.nbytes),
        "flushed_nbytes": min(save.flushed_nbytes, save.nbytes),
        "age_seconds": now - (save.begin if save.committed_at is None else save.committed_at),
        "committed_seconds": save.committed_seconds,
    }
