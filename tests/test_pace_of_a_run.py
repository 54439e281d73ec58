"""Advice from real saves onto a slow disk: what the log, the records and the commands say of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from datastates import commit_log
from datastates.checkpoint_engine import CheckpointEngine
from datastates.cli import main
from datastates.events import Event
from datastates.flusher.client import FlusherClient
from datastates.record_files import read_records
from flusher.rig import faulty

MIB = 1 << 20
STATE_BYTES = 12 * MIB
WRITE_SECONDS = 0.04  # for each MiB: a disk of at most 25 MiB/s, however fast or slow the machine is
NUM_SAVES = 3


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Event]]:
    """``train(cache_mib, interval)``: saves at every so many steps onto a slow disk, and gives the records."""
    slow = [{"call": "pwrite", "only": ".partial", "then": "slow", "seconds": WRITE_SECONDS}]
    monkeypatch.setitem(FlusherClient.__init__.__kwdefaults__, "command", faulty(json.dumps(slow)))
    monkeypatch.setattr(commit_log, "ADVICE_SECONDS", 0.05)

    def run(cache_mib: int, interval: int, **settings: Any) -> list[Event]:
        folder = tmp_path / f"{cache_mib}-{interval}"
        parameter = torch.nn.Parameter(torch.ones(STATE_BYTES // 4))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        section = {"host_cache_size": cache_mib / 1024, "slab_bytes": MIB, "num_writers": 1}
        section["events_dir"] = str(folder / "events")
        with CheckpointEngine(section | settings, rank=0) as engine:
            engine.wait()
            for step in range(NUM_SAVES * interval):
                parameter.grad = torch.ones_like(parameter)
                if step % interval == 0:
                    with engine.checkpoint(str(folder / f"step{step}"), f"step{step}"):
                        engine.save({"w": parameter.detach()}, str(folder / f"step{step}" / "w.pt"))
                optimizer.step()
            engine.wait(persist=True)
        return list(read_records(str(folder / "events")))

    return run


def fenced_seconds(records: list[Event]) -> float:
    return sum(one["end"] - one["begin"] for one in records if one["event"] == "fence")


def test_saves_that_outrun_a_slow_disk(train, tmp_path, caplog):
    records = train(cache_mib=4, interval=1)
    (advice,) = (one.getMessage() for one in caplog.records if "outrun" in one.getMessage())
    found = re.search(
        r"held back for (\S+) s .*raise host_cache_size to >= (\S+) and raise save-interval to >= ", advice
    )
    assert found is not None, advice
    assert 0.05 < float(found[1]) <= fenced_seconds(records) + 0.01
    assert 4 / 1024 < float(found[2]) <= math.ceil(STATE_BYTES * 1.05 / 2**30 * 1000) / 1000

    last = [one for one in records if one["event"] == "summary"][-1]
    least = STATE_BYTES / MIB * WRITE_SECONDS
    assert last["flush_nbytes_per_second"] <= MIB / WRITE_SECONDS
    assert last["durable_seconds"] >= least and last["advised_seconds"] >= 1.25 * least
    assert last["interval_seconds"] < least  # a step: what holds it back is not counted
    assert last["advised_steps"] * last["step_seconds"] >= last["advised_seconds"]
    assert last["fenced_seconds"] > last["step_seconds"]
    assert (last["num_slabs"], last["host_cache_bytes"], last["num_steps_between_saves"]) == (4, 4 * MIB, 1)

    events = str(tmp_path / "4-1" / "events")
    assert fenced_seconds(records) >= (STATE_BYTES - 4 * MIB) / MIB * WRITE_SECONDS

    text = CliRunner().invoke(main, ["stats", events]).stdout
    assert "Advice: raise host_cache_size to >= " in text and "raise save-interval to >= " in text
    printed = json.loads(CliRunner().invoke(main, ["stats", events, "--json"]).stdout)
    assert printed["advice"]["is_outrun"] and printed["advice"]["is_cache_short"]
    done = CliRunner().invoke(main, ["doctor", "--events", events, "--json"])
    findings = {one["subject"]: one for one in json.loads(done.stdout)}
    assert findings["interval"]["severity"] == findings["cache"]["severity"] == "warning"
    assert findings["interval"]["advice"].startswith("raise save-interval to >= ")
    assert printed["advice"]["remedy"] == " and ".join(findings[subject]["advice"] for subject in ("cache", "interval"))
    assert findings["saves"]["message"] == f"of {NUM_SAVES} saves {NUM_SAVES} were committed, 0 lost or skipped"


def test_saves_that_are_skipped_for_a_slow_disk(train, caplog):
    records = train(cache_mib=64, interval=1, when_busy="skip")
    assert sum(one["event"] == "skipped" for one in records) == NUM_SAVES - 1
    (advice,) = (one.getMessage() for one in caplog.records if "outrun" in one.getMessage())
    last = [one for one in records if one["event"] == "summary"][-1]
    assert last["advised_host_cache_bytes"] <= last["host_cache_bytes"]
    assert f"{NUM_SAVES - 1} saves were not made because others were in flight; raise save-interval to >= " in advice
