"""Rates, steps and intervals from the records of a rank."""

from __future__ import annotations

import pytest

from datastates.events import Event
from datastates.run_meter import REMEMBERED_SECONDS, RunMeter, advice_of
from datastates.run_view import seen_in

MIB = 1 << 20


def record(event: str, begin: float, end: float, **fields: object) -> Event:
    return {"event": event, "rank": 0, "begin": begin, "end": end, **fields}


def save(attempt: str, begin: float, seconds: float = 0.0, nbytes: int = 100 * MIB) -> Event:
    return record("save", begin, begin + seconds, attempt=attempt, path=f"/c/{attempt}", nbytes=nbytes)


def metered(*records: Event) -> RunMeter:
    meter = RunMeter(host_cache_bytes=MIB)
    for one in records:
        meter.note(one)
    return meter


def test_nothing_is_known_at_first():
    measured = RunMeter().measured
    assert (measured.nbytes, measured.flush_nbytes_per_second, measured.step_seconds) == (0, None, None)
    assert (measured.interval_seconds, measured.num_steps) == (None, None)


def test_a_rate_counts_the_time_in_which_there_was_work():
    flushes = [(0.0, 1.0), (0.5, 2.0), (10.0, 11.0)]  # overlapping writers, then a pause
    meter = metered(*(record("flush", *times, attempt="a", path="/c/a", nbytes=30 * MIB) for times in flushes))
    assert meter.measured.flush_nbytes_per_second == 30 * MIB
    assert meter.measured.copy_nbytes_per_second is None


def test_fsync_is_part_of_the_time_that_flushing_takes():
    meter = metered(
        record("flush", 0.0, 1.0, attempt="a", path="/c/a", nbytes=30 * MIB),
        record("durable", -5.0, 1.5, attempt="a", path="/c/a", nbytes=30 * MIB),
    )
    assert meter.measured.flush_nbytes_per_second == 20 * MIB


def test_a_disk_that_becomes_slower_is_noticed():
    meter = RunMeter()
    for second in range(1000):
        meter.note(record("flush", second, second + 1, attempt="a", path="/c/a", nbytes=100 * MIB))
    for second in range(1000, 1000 + 3 * int(REMEMBERED_SECONDS)):
        meter.note(record("flush", second, second + 1, attempt="a", path="/c/a", nbytes=10 * MIB))
    assert meter.measured.flush_nbytes_per_second < 25 * MIB


def test_a_step_is_measured_without_what_saves_add_to_it():
    meter = metered(
        record("step", 0.0, 0.0, number=1),
        record("step", 0.0, 1.0, number=2),
        save("a", 1.0, 0.25),
        record("fence", 2.25, 2.5, num_files=1),
        record("step", 1.0, 2.5, number=3),
        save("b", 2.5, 0.25),
        save("b", 2.75, 0.25),
        record("save_checkpoint", 2.5, 3.5, attempt="b", path="/c/b"),  # what it does besides saving counts, too
        record("step", 2.5, 4.5, number=4),
    )
    assert meter.measured.step_seconds == 1.0
    assert meter.measured.interval_seconds == 2.5 - 1.0 - 0.5
    assert meter.measured.num_steps == 1


def test_a_save_overlaps_with_what_comes_before_the_fence():
    """Where it stands in the step decides how much of it is hidden, not how long the step takes."""
    meter = metered(
        save("a", 1.0, 0.25),
        save("a", 1.25, 0.25),
        record("fence", 2.0, 2.5, num_files=2),
        record("fence", 2.6, 2.6, num_files=1),
        save("b", 3.0, 0.25),
        record("clock", 9.0, 9.0, time=9.0, host="node", pid=1),
        record("fence", 9.5, 9.5, num_files=1),
    )
    assert meter.measured.overlap_seconds == 0.5
    assert metered(save("a", 1.0)).measured.overlap_seconds is None


def test_small_files_between_checkpoints_are_no_checkpoints():
    times = [0.0, 10.0, 20.0, 30.0]
    records = [save(f"a{number}", begin) for number, begin in enumerate(times)]
    records += [save(f"b{number}", begin + 1, nbytes=10) for number, begin in enumerate(times)]
    measured = metered(*sorted(records, key=lambda one: one["begin"])).measured
    assert (measured.nbytes, measured.interval_seconds) == (100 * MIB, 10.0)


def test_saves_that_were_skipped_count_for_the_interval():
    skipped = record("skipped", 5.0, 5.0, attempt="b", path="/c/b", error="busy")
    meter = metered(save("a", 0.0), skipped, save("c", 10.0))
    assert (meter.measured.interval_seconds, meter.num_skipped) == (5.0, 1)


def test_a_save_that_is_dropped_later_is_begun_once():
    dropped = record("skipped", 5.0, 11.0, attempt="b", path="/c/b", error="dropped")
    meter = metered(save("a", 0.0), save("b", 5.0), save("c", 10.0), dropped)
    assert (meter.measured.interval_seconds, meter.num_skipped) == (5.0, 1)


def test_a_commit_that_waits_for_an_earlier_one_is_not_charged_for_that():
    def committed(attempt: str, durable: float, end: float) -> list[Event]:
        names = {"attempt": attempt, "path": f"/c/{attempt}", "nbytes": 1}
        return [save(attempt, 0.0), record("durable", 0.0, durable, **names), record("committed", 0.0, end, **names)]

    meter = metered(*committed("a", 1.0, 2.0), *committed("b", 1.5, 3.0), *committed("c", 1.5, 4.0))
    assert meter.measured.commit_seconds == 1.0


def test_memory_is_bounded():
    meter = RunMeter()
    for number in range(2000):
        meter.note(save(f"a{number}", float(number)))
        meter.note(record("step", number, number + 1, number=number))
        meter.note(record("committed", number, number + 1, attempt=f"a{number}", path="/c", nbytes=1))
    assert meter.save_of("a0") is None
    assert meter.save_of("a1999") is not None
    assert max(len(meter._saves.saves), len(meter._begins), len(meter._steps), len(meter._commits)) <= 64


def test_the_cache_of_a_run_that_has_ended_is_that_of_its_summary():
    found = [save("a", 0.0), record("flush", 0.0, 1.0, attempt="a", path="/c/a", nbytes=100 * MIB)]
    found.append(record("summary", 0.0, 2.0, attempt="a", path="/c/a", host_cache_bytes=7 * MIB))
    view, _ = seen_in([*found, {**found[0], "rank": 1}])
    meters = [rank.meter for rank in view.present.values()]
    assert (sorted(view.present), meters[0].measured.host_cache_bytes) == ([0, 1], 7 * MIB)
    advice = advice_of(meters)
    assert advice is not None and advice == view.advice and advice.interval_seconds == pytest.approx(1.25)


def test_a_clock_that_was_set_back_does_not_stop_the_measuring():
    meter = metered(record("flush", 5000.0, 5001.0, attempt="a", path="/c/a", nbytes=MIB))
    meter.note(record("clock", 100.0, 100.0, time=100.0, host="node", pid=1))
    for second in range(100, 103):
        meter.note(record("flush", second, second + 1.0, attempt="b", path="/c/b", nbytes=MIB))
    assert meter.measured.flush_nbytes_per_second == MIB
