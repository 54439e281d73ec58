"""The state of a run as OpenMetrics text, for Prometheus and its like: as a string, or kept in a file.

Source: OpenMetrics 1.0.0, "Text format": one ``# TYPE`` per family before its samples, counters end in ``_total``, a
unit is the end of the family's name, ``# EOF`` is the last line. No sample has a time, which the textfile collector of
Prometheus' node exporter refuses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from datastates.advice import advise
from datastates.events import Event, now, unix_offset
from datastates.loggers import RelayedListener
from datastates.run_view import RankView, RunView

SHORTEST_SECONDS = 1.0
"""The file is not written more often than that."""


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric, with a sample per rank where its value is known."""

    name: str
    kind: str
    unit: str
    help: str
    value: Callable[[RankView], float | int | None]

    @property
    def is_time(self) -> bool:
        """Whether the value is a moment, not a span."""
        return self.name.endswith("_timestamp_seconds")


def _measured(name: str) -> Callable[[RankView], float | None]:
    return lambda rank: getattr(rank.meter.measured, name)


def _advised(name: str) -> Callable[[RankView], float | None]:
    def value(rank: RankView) -> float | None:
        advice = advise(rank.meter.measured)
        return None if advice is None else getattr(advice, name)

    return value


def _last(name: str) -> Callable[[RankView], float | None]:
    return lambda rank: None if rank.last is None else rank.last.get(name)


_FAMILIES = (
    _Family("committed", "counter", "", "Checkpoints committed.", lambda rank: rank.num_committed),
    _Family("lost", "counter", "", "Checkpoints lost.", lambda rank: rank.num_lost),
    _Family("skipped", "counter", "", "Checkpoints not made, or dropped.", lambda rank: rank.num_skipped),
    _Family("saved_bytes", "counter", "bytes", "Given to save().", lambda rank: rank.nbytes),
    _Family("blocked_seconds", "counter", "seconds", "Spent in save().", lambda rank: rank.blocked_seconds),
    _Family("fenced_seconds", "counter", "seconds", "Optimizer steps held back.", lambda rank: rank.fenced_seconds),
    _Family("last_committed_timestamp_seconds", "gauge", "seconds", "Unix time of the last commit.", _last("end")),
    _Family("last_checkpoint_bytes", "gauge", "bytes", "This rank's part of it.", _last("nbytes")),
    _Family("last_durable_seconds", "gauge", "seconds", "From its begin.", _last("durable_seconds")),
    _Family("last_committed_seconds", "gauge", "seconds", "From its begin.", _last("committed_seconds")),
    _Family("last_saves_in_flight", "gauge", "", "When it was saved.", _last("num_in_flight")),
    _Family("last_free_slabs", "gauge", "", "Of the host cache, when it was saved.", _last("num_free_slabs")),
    _Family("host_cache_bytes", "gauge", "bytes", "Host memory for saves.", _last("host_cache_bytes")),
    _Family("flush_bytes_per_second", "gauge", "", "While flushing.", _measured("flush_nbytes_per_second")),
    _Family("copy_bytes_per_second", "gauge", "", "While copying.", _measured("copy_nbytes_per_second")),
    _Family("step_seconds", "gauge", "seconds", "A step without saves.", _measured("step_seconds")),
    _Family("advised_interval_seconds", "gauge", "seconds", "Between two saves.", _advised("interval_seconds")),
    _Family("advised_interval_steps", "gauge", "", "Between two saves.", _advised("interval_steps")),
    _Family("advised_host_cache_bytes", "gauge", "bytes", "It hides a save.", _advised("host_cache_bytes")),
)
"""All names have the prefix ``datastates_`` and the label ``rank``."""


def openmetrics_text(view: RunView, offset: float = 0.0) -> str:
    """All metrics of a run, with the last line ``# EOF``.

    Args:
        view: of the run.
        offset: what is added to its times for Unix time; 0 where they are that, as in records that were read.
    """
    lines = [line for family in _FAMILIES for line in _family_lines(family, view, offset)]
    return "\n".join([*lines, *_tier_lines(view), "# EOF\n"])


def metrics_path(directory: str, rank: int) -> str:
    """Where the metrics of a rank are kept."""
    return os.path.join(directory, f"datastates-rank{rank:05d}.prom")


class MetricsFile(RelayedListener):
    """A listener that keeps a file up to date with the metrics of its rank.

    It is replaced as a whole, at most once a second, by a thread of its own; the last time by `close`. What cannot be
    written is logged, and tried again with the next record.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Args:
        path: the file, ``*.prom`` for node exporter; one for each rank of a machine. Its folder is made.
        """
        self._path = os.path.abspath(os.fspath(path))
        self._view = RunView()
        self._written_at = -SHORTEST_SECONDS
        self._is_stale = False
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        super().__init__()

    def _handle(self, record: Event) -> None:
        self._view.note(record)
        self._is_stale = True
        if now() >= self._written_at + SHORTEST_SECONDS:  # also where records come without a pause
            self._tick()

    def _wait_seconds(self) -> float | None:
        return max(self._written_at + SHORTEST_SECONDS - now(), 0.0) if self._is_stale else None

    def _tick(self) -> None:
        if self._is_stale:
            self._is_stale, self._written_at = False, now()
            write_replacing(self._path, openmetrics_text(self._view, unix_offset()))


def write_replacing(path: str, text: str) -> None:
    """Put a text in the place of a file: whoever reads sees the old or the new one. Not durable. Raises OSError."""
    partial = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.tmp")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise


def _family_lines(family: _Family, view: RunView, offset: float) -> Iterator[str]:
    shift = offset if family.is_time else 0
    values = [
        (rank, value + shift)
        for rank, found in sorted(view.ranks.items())
        if (value := family.value(found)) is not None
    ]
    yield from _head(family.name, family.kind, family.unit, family.help)
    suffix = "_total" if family.kind == "counter" else ""
    yield from (f'datastates_{family.name}{suffix}{{rank="{rank}"}} {value}' for rank, value in values)


def _tier_lines(view: RunView) -> Iterator[str]:
    tiers = view.tiers
    if not tiers:
        return
    yield from _head("tier_checkpoints_behind", "gauge", "", "Committed, and not carried to the tier yet.")
    for tier in tiers:
        yield f'datastates_tier_checkpoints_behind{{tier="{_escaped(tier.name)}"}} {tier.num_behind}'
    yield from _head("tier_is_failing", "gauge", "", "Whether the last carry failed.")
    for tier in tiers:
        yield f'datastates_tier_is_failing{{tier="{_escaped(tier.name)}"}} {int(bool(tier.error))}'


def _head(name: str, kind: str, unit: str, text: str) -> Iterator[str]:
    yield f"# TYPE datastates_{name} {kind}"
    if unit:
        yield f"# UNIT datastates_{name} {unit}"
    yield f"# HELP datastates_{name} {text}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
