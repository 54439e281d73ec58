"""What the log says of commits, and what it advises."""

from __future__ import annotations

import logging

import pytest

from datastates.attempt import Attempt
from datastates.commit_log import ADVICE_SECONDS, CommitLog
from datastates.events import now

MIB = 1 << 20


def note(log: CommitLog, nbytes: int, held: float = 0.0, starved: float = 0.0) -> None:
    log.note(Attempt("a", "/run/step5", begin=now() - 2.0, blocked_seconds=0.01, nbytes=nbytes), held, starved)


def test_each_commit_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    note(CommitLog(64 * MIB), 512 * MIB)
    (line,) = caplog.messages
    assert line.startswith("committed /run/step5: 0.500 GiB of this rank, blocked 0.0100 s, durable after 2.0")


@pytest.mark.parametrize(("held", "starved"), [(ADVICE_SECONDS, 9.0), (9.0, ADVICE_SECONDS)])
def test_no_advice_where_the_cache_is_not_what_training_waits_for(
    caplog: pytest.LogCaptureFixture, held: float, starved: float
) -> None:
    note(CommitLog(64 * MIB), 512 * MIB, held, starved)
    assert not caplog.messages


def test_a_cache_smaller_than_a_save_shall_be_as_large(caplog: pytest.LogCaptureFixture) -> None:
    log = CommitLog(8 * MIB)
    for _ in range(2):
        note(log, 10 * MIB, held=3.0, starved=3.0)
    (advice,) = caplog.messages  # once
    assert "training was held back for 3 s" in advice
    assert "raise host_cache_size to >= 0.0103 or save less often than every 2 s" in advice


def test_no_larger_cache_is_advised_where_a_save_fits_it(caplog: pytest.LogCaptureFixture) -> None:
    note(CommitLog(16 * MIB), 3 * MIB, held=3.0, starved=3.0)
    (advice,) = caplog.messages
    assert "host_cache_size" not in advice
    assert advice.endswith("because the host cache was full; save less often than every 2 s")
