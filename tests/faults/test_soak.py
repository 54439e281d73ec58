"""Hundreds of saves, some of which fail: nothing grows. The short form of `make stress`."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from datastates import CheckpointEngine
from datastates.attempt import Attempt
from datastates.errors import StorageError
from datastates.events import EventLog
from datastates.outcomes import Outcomes
from flusher.rig import eventually
from stress.soak import LIMITS, NUM_SAMPLES, Report, Sample

TESTS = Path(__file__).resolve().parent.parent
NUM_SAVES = 300


def test_nothing_grows(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "stress.soak", tmp_path / "soak", str(NUM_SAVES), small_disk(2 << 20)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    report = Report.from_json(done.stdout)
    assert report.unexpected == []
    assert len(report.samples) == NUM_SAMPLES
    assert report.committed > NUM_SAVES / 2
    assert set(report.failed.values()) == {NUM_SAVES // 5 // len(report.failed)} and len(report.failed) == 4
    assert report.excess() == {}


def test_an_aborted_checkpoint_is_forgotten(tmp_path: Path) -> None:
    engine = CheckpointEngine({"host_cache_size": 4 / 1024})
    try:
        with pytest.raises(KeyError), engine.checkpoint(str(tmp_path / "s1"), "s1"):
            engine.save({"a": torch.zeros(10)}, str(tmp_path / "s1" / "a.pt"))
            raise KeyError
        eventually(lambda: "0 attempts and 0 files in flight" in repr(engine.saver._client), "the flusher has answered")
    finally:
        engine.close()


def test_whoever_finds_no_save_in_flight_finds_its_failure() -> None:
    outcomes = Outcomes(EventLog(), lambda attempt: None, forgiving=False)
    attempt = Attempt("run-1", "/s1", "/s1", "s1", True)
    outcomes.add(attempt)
    seen: list[list[Attempt]] = []

    class Look(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(outcomes.unsettled)

    failed: Future[Any] = Future()
    failed.set_exception(StorageError("no space"))
    look = Look()
    logging.getLogger("datastates.outcomes").addHandler(look)
    try:
        outcomes.settle(attempt, failed)
    finally:
        logging.getLogger("datastates.outcomes").removeHandler(look)
    assert seen == [[attempt]] and outcomes.unsettled == []
    with pytest.raises(StorageError):
        outcomes.raise_failure()


SAMPLE = Sample(*range(12))


def report_of(name: str, values: list[int]) -> Report:
    return Report([replace(SAMPLE, **{"num_saves": 100 * (i + 1), name: value}) for i, value in enumerate(values)])


@pytest.mark.parametrize("name", LIMITS)
def test_growth_is_found(name: str) -> None:
    step = LIMITS[name] + 1000  # per sample: a leak of ten per save
    assert list(report_of(name, [step * i for i in range(NUM_SAMPLES)]).excess()) == [name]
    assert report_of(name, [step * 9, step * 9] + [0] * (NUM_SAMPLES - 2)).excess() == {}, "warming up is none"
