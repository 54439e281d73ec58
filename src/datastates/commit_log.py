"""What the log and the records say of commits."""

from __future__ import annotations

import logging

from datastates.advice import Advice, Measured, advise
from datastates.attempt import Attempt
from datastates.events import EventLog, now
from datastates.figures import figure
from datastates.run_meter import RunMeter
from datastates.save_records import SaveRecord

logger = logging.getLogger(__name__)

ADVICE_SECONDS = 0.5
"""So long may training be held back for want of host cache, all in all, before the log says what to do about it."""


class CommitLog:
    """One line and one record ``summary`` per commit, and once what to do where saves outrun the disk."""

    def __init__(self, events: EventLog, meter: RunMeter) -> None:
        """Args:
        events: receives the record ``summary``.
        meter: has heard of all records that these give.
        """
        self._events = events
        self._meter = meter
        self._has_advised = False

    def note(self, attempt: Attempt, held_seconds: float, starved_seconds: float) -> None:
        """An attempt is committed.

        Args:
            attempt: which.
            held_seconds: so long training has been held back, all in all.
            starved_seconds: so long staging has waited for host cache, all in all.
        """
        seconds, gib = now() - attempt.begin, attempt.nbytes / 2**30
        logger.info(
            "committed %s: %.3f GiB of this rank, blocked %.4f s, durable after %.2f s (%.2f GiB/s)",
            attempt.path,
            gib,
            attempt.blocked_seconds,
            seconds,
            gib / seconds,
        )
        measured = self._meter.measured
        advice = advise(measured)
        self._events.record("summary", attempt.begin, now(), **_summary(attempt, self._save(attempt), measured, advice))
        is_known = measured.interval_seconds is not None and (measured.step_seconds or not measured.num_steps)
        if advice is not None and is_known and not self._has_advised:
            waited = min(held_seconds, starved_seconds)  # training also waits for copies that have room
            self._advise(advice, waited if waited > ADVICE_SECONDS else 0.0)

    def _save(self, attempt: Attempt) -> SaveRecord:
        return self._meter.save_of(attempt.name) or SaveRecord(attempt.name, attempt.path, attempt.begin)

    def _advise(self, advice: Advice, held_seconds: float) -> None:
        """Say once what to do, if training was held back for want of host cache or saves had to be skipped."""
        symptoms = []
        if held_seconds:
            symptoms.append(f"training was held back for {figure(held_seconds)} s because the host cache was full")
        if self._meter.num_skipped:
            symptoms.append(f"{self._meter.num_skipped} saves were not made because others were in flight")
        if symptoms:
            self._has_advised = True
            remedy = advice.remedy or f"save every {advice.interval_text} or less often"
            logger.warning("saves outrun the disk: %s; %s", ", and ".join(symptoms), remedy)


def _summary(attempt: Attempt, save: SaveRecord, measured: Measured, advice: Advice | None) -> dict[str, object]:
    """The fields of the record ``summary``, as the table in `datastates.events` has them."""
    return {
        "attempt": attempt.name,
        "path": attempt.path,
        "tag": attempt.tag,
        "nbytes": attempt.nbytes,
        "num_files": save.num_files,
        "blocked_seconds": attempt.blocked_seconds,
        "fenced_seconds": save.fenced_seconds,
        "staged_seconds": save.staged_seconds,
        "durable_seconds": save.durable_seconds,
        "committed_seconds": save.committed_seconds,
        "nbytes_per_second": attempt.nbytes / save.durable_seconds if save.durable_seconds else None,
        "num_in_flight": save.num_in_flight,
        "num_slabs": save.num_slabs,
        "num_free_slabs": save.num_free_slabs or 0,
        "host_cache_bytes": measured.host_cache_bytes,
        "flush_nbytes_per_second": measured.flush_nbytes_per_second,
        "copy_nbytes_per_second": measured.copy_nbytes_per_second,
        "step_seconds": measured.step_seconds,
        "interval_seconds": measured.interval_seconds,
        "num_steps_between_saves": measured.num_steps,
        "advised_seconds": None if advice is None else advice.interval_seconds,
        "advised_steps": None if advice is None else advice.interval_steps,
        "advised_host_cache_bytes": None if advice is None else advice.host_cache_bytes,
    }
