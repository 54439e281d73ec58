"""What a run's event records say about its saves: how long each blocked, and when it was durable.

The records are those of `datastates.events`, one file per rank. Ranks are put together by their attempts; each time
is that of the rank that took longest.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from datastates.errors import CheckpointNotFoundError
from datastates.events import Event

SUFFIX = ".jsonl"

_MAX_SECONDS, _MAX_COUNT = 1e12, 1 << 63  # what is beyond is no record of ours; nor are NaN and infinity

_NEEDED = frozenset({"event", "rank", "begin", "end"})


@dataclass(slots=True)
class SaveRecord:
    """One checkpoint, or one file that was saved alone.

    Attributes:
        attempt: what its records are found by.
        path: the checkpoint's folder where that is known, else one of its files.
        begin: when its first rank began, in seconds of that machine's clock.
        nbytes: of all ranks.
        ranks: those that took part.
        blocked_seconds: how long the calls took, on the slowest rank.
        fenced_seconds: how long steps were held back until the next save was begun, on the slowest rank.
        staged_seconds: from the begin until the last copy, None where that was not recorded.
        durable_seconds: from the begin until the last file was durable, None where it was not.
        committed_seconds: from the begin until it was visible, None where it was not.
        failure: why it is lost or was skipped; empty where it is not.
    """

    attempt: str
    path: str
    begin: float
    nbytes: int = 0
    ranks: set[int] = field(default_factory=set)
    blocked_seconds: float = 0.0
    fenced_seconds: float = 0.0
    staged_seconds: float | None = None
    durable_seconds: float | None = None
    committed_seconds: float | None = None
    failure: str = ""

    @property
    def nbytes_per_second(self) -> float | None:
        """Durable rate of all ranks together, None where nothing became durable."""
        return self.nbytes / self.durable_seconds if self.durable_seconds and self.nbytes else None


def read_records(path: str) -> list[Event]:
    """The records of a file, or of all ``*.jsonl`` files of a folder, in the order in which they began.

    What is not a record is left out: a line that a crash has cut, or other people's files.

    Raises:
        CheckpointNotFoundError: there are none.
        OSError: a file cannot be read.
    """
    paths = [path]
    if os.path.isdir(path):
        paths = sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith(SUFFIX))
    found = [record for name in paths if os.path.exists(name) for record in _records_of(name)]
    if not found:
        raise CheckpointNotFoundError(
            f"{path}: no records of saves; they are written where events_dir is set in the section datastates_ckpt"
        )
    return sorted(found, key=lambda record: float(record["begin"]))


def saves_of(records: Iterable[Event]) -> list[SaveRecord]:
    """Put the records of each save together, in the order in which the saves began."""
    saves: dict[str, SaveRecord] = {}
    calls: dict[tuple[str, int], float] = {}  # seconds in save(), by attempt and rank
    fences: dict[tuple[str, int], float] = {}
    last: dict[int, str] = {}  # attempt that a rank has begun last
    for record in records:
        rank, seconds = int(record["rank"]), float(record["end"]) - float(record["begin"])
        if record["event"] == "fence":
            if rank in last:
                key = last[rank], rank
                fences[key] = fences.get(key, 0.0) + seconds
            continue
        attempt, path = str(record.get("attempt", "")), str(record.get("path", ""))
        if not attempt:
            continue
        save = saves.setdefault(attempt, SaveRecord(attempt, path, float(record["begin"])))
        save.ranks.add(rank)
        if record["event"] in ("save", "skipped"):
            last[rank] = attempt
            calls[attempt, rank] = calls.get((attempt, rank), 0.0) + seconds * (record["event"] == "save")
        _note(save, record, path, seconds)
    for (attempt, _), seconds in calls.items():
        saves[attempt].blocked_seconds = max(saves[attempt].blocked_seconds, seconds)
    for (attempt, _), seconds in fences.items():
        saves[attempt].fenced_seconds = max(saves[attempt].fenced_seconds, seconds)
    return sorted(saves.values(), key=lambda save: save.begin)


def summary_of(saves: list[SaveRecord]) -> dict[str, Any]:
    """How many saves there were, and medians over those that were committed (None where there are none)."""
    whole = [save for save in saves if save.committed_seconds is not None]
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


def _records_of(path: str) -> Iterator[Event]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and record.keys() >= _NEEDED and _is_sound(record):
                yield record


def _is_sound(record: Event) -> bool:
    """Whether the fields are what `_note` and its like take them for."""
    times, counts = (record["begin"], record["end"]), (record["rank"], record.get("nbytes", 0))
    return (
        all(type(value) in (int, float) and abs(value) < _MAX_SECONDS for value in times)
        and all(type(value) is int and 0 <= value < _MAX_COUNT for value in counts)
        and all(isinstance(record.get(name, ""), str) for name in ("event", "attempt", "path", "error"))
    )


def _note(save: SaveRecord, record: Event, path: str, seconds: float) -> None:
    """Enter one record of a save."""
    event, since_begin = record["event"], float(record["end"]) - save.begin
    if event == "save":
        save.nbytes += int(record.get("nbytes", 0))
    elif event == "save_checkpoint":
        save.path = path
        save.blocked_seconds = max(save.blocked_seconds, seconds)  # includes what DeepSpeed does besides
    elif event == "staged":
        save.staged_seconds = max(save.staged_seconds or 0.0, since_begin)
    elif event == "durable":
        save.durable_seconds = max(save.durable_seconds or 0.0, since_begin)
    elif event == "committed":
        save.path = path
        save.committed_seconds = max(save.committed_seconds or 0.0, since_begin)
    elif event in ("failed", "skipped"):
        save.failure = save.failure or str(record.get("error", event))


def _median(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
