"""What the log and the records say of commits, and what is advised."""

from __future__ import annotations

import logging

import pytest

from datastates.attempt import Attempt
from datastates.commit_log import ADVICE_SECONDS, CommitLog
from datastates.events import Event, EventLog, now
from datastates.run_meter import RunMeter

MIB = 1 << 20


class Commits:
    """A commit log that hears of saves of 512 MiB, written one after the other in 2 s each."""

    def __init__(self, host_cache_bytes: int) -> None:
        self.records: list[Event] = []
        self.events = EventLog(listener=self.records.append)
        meter = RunMeter(host_cache_bytes)
        self.events.add(meter.note)
        self.log = CommitLog(self.events, meter)
        self.num_saves = 0
        self.flushed_at = 0.0

    def save(self, begin: float) -> None:
        """One whole save, begun at a time of the records' clock."""
        self.num_saves += 1
        start = max(begin, self.flushed_at)
        self.flushed_at = end = start + 2.0
        names = {"attempt": f"a{self.num_saves}", "path": "/run/step5/x.pt"}
        queue = {"num_in_flight": 1, "num_slabs": 8, "num_free_slabs": 3}
        self.events.record("save", begin, begin + 0.01, **names, nbytes=512 * MIB, eager_nbytes=0, **queue)
        self.events.record("stage", begin, begin + 0.5, **names, index=0, nbytes=512 * MIB)
        self.events.record("staged", begin, begin + 0.5, **names, nbytes=512 * MIB)
        self.events.record("flush", start, end, **names, index=0, nbytes=512 * MIB)
        self.events.record("durable", begin, end, **names, nbytes=512 * MIB)
        self.events.record("committed", begin, end, **names, nbytes=512 * MIB)

    def note(self, held: float = 0.0, starved: float = 0.0) -> None:
        name = f"a{self.num_saves}"
        attempt = Attempt(name, "/run/step5", tag="step5", begin=now() - 2.0, blocked_seconds=0.01, nbytes=512 * MIB)
        self.log.note(attempt, held, starved)


def test_each_commit_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Commits(64 * MIB).note()
    (line,) = caplog.messages
    assert line.startswith("committed /run/step5: 0.500 GiB of this rank, blocked 0.0100 s, durable after 2.0")


def test_each_commit_is_one_record_with_numbers_and_advice() -> None:
    commits = Commits(64 * MIB)
    commits.save(100.0)
    commits.events.record("fence", 100.2, 100.5, num_files=1)
    commits.save(110.0)
    commits.num_saves = 1
    commits.note()
    found = commits.records[-1]
    assert found["event"] == "summary"
    expected = {
        "attempt": "a1",
        "path": "/run/step5",
        "tag": "step5",
        "nbytes": 512 * MIB,
        "num_files": 1,
        "blocked_seconds": 0.01,
        "fenced_seconds": 0.3,
        "staged_seconds": 0.5,
        "durable_seconds": 2.0,
        "committed_seconds": 2.0,
        "nbytes_per_second": 256 * MIB,
        "num_in_flight": 1,
        "num_slabs": 8,
        "num_free_slabs": 3,
        "host_cache_bytes": 64 * MIB,
        "flush_nbytes_per_second": 256 * MIB,
        "copy_nbytes_per_second": 1024 * MIB,
        "interval_seconds": 10 - 0.01 - 0.3,
        "num_steps_between_saves": 0,
        "advised_seconds": 2.5,
        "advised_host_cache_bytes": int((512 - 256 * 0.19) * MIB * 1.05),  # 0.19 s from the save to the fence
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["step_seconds"] is found["advised_steps"] is None


def test_one_save_is_too_few_to_advise_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    commits = Commits(64 * MIB)
    commits.save(0.0)
    commits.note(held=3.0, starved=3.0)
    assert not caplog.messages
    commits.save(0.5)  # two saves within the first step
    commits.events.record("step", 0.6, 0.6, number=1)
    commits.save(0.7)
    commits.note(held=3.0, starved=3.0)
    assert not caplog.messages


@pytest.mark.parametrize(("held", "starved"), [(ADVICE_SECONDS, 9.0), (9.0, ADVICE_SECONDS)])
def test_no_advice_where_the_cache_is_not_what_training_waits_for(
    caplog: pytest.LogCaptureFixture, held: float, starved: float
) -> None:
    commits = Commits(64 * MIB)
    commits.save(0.0)
    commits.save(5.0)
    commits.note(held, starved)
    assert not caplog.messages


def test_a_cache_that_does_not_hide_a_save_is_told_once_with_the_size_that_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    commits = Commits(64 * MIB)
    for begin in (0.0, 10.0):  # sustainable: each is written in 2 s
        commits.save(begin)
        commits.note(held=9.0, starved=3.0)  # for 6 s it waited for copies that had room
    (advice,) = caplog.messages
    assert "training was held back for 3 s because the host cache was full" in advice
    assert advice.endswith("; raise host_cache_size to >= 0.525")


def test_saves_that_outrun_the_disk_are_told_in_steps(caplog: pytest.LogCaptureFixture) -> None:
    commits = Commits(1024 * MIB)
    for number in range(5):  # a step of 0.4 s, a save at each
        commits.save(0.4 * number)
        commits.events.record("step", 0.4 * number, 0.4 * number + 0.41, number=number + 1)
    commits.note(held=3.0, starved=3.0)
    (advice,) = caplog.messages
    assert "host_cache_size" not in advice
    assert advice.endswith("; raise save-interval to >= 7 (2.5 s)")


def test_saves_that_are_skipped_are_told_of_with_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    commits = Commits(1024 * MIB)
    commits.save(0.0)
    commits.events.record("skipped", 0.5, 0.5, attempt="b", path="/run/step6", error="busy")
    commits.note()
    (advice,) = caplog.messages
    assert "1 saves were not made because others were in flight" in advice
    assert advice.endswith("; save every 2.5 s or less often")
