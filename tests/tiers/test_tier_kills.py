"""SIGKILL at each stage of an upload: what is left is whole, and the next start finishes. Long form: `make stress`."""

from __future__ import annotations

import os
import signal

import pytest

from datastates.manifest import read_latest
from datastates.tier_settings import read_tiers
from flusher.rig import TIMEOUT, Rig, image_of
from tiers.checkpoints import make_checkpoint as commit
from tiers.killing import SIZES, STAGES, URL, Snapshot, kill_round, wait_carried, wait_ended

NUMBER = {"at a part": 2}


@pytest.mark.parametrize("stage", STAGES)
def test_of_the_flusher(tmp_path, server, stage):
    assert kill_round(server, tmp_path / "a", stage, NUMBER.get(stage, 1), whole_job=False) == []


@pytest.mark.parametrize("stage", ["at a part", "before the commit"])
def test_of_the_whole_job(tmp_path, server, stage):
    assert kill_round(server, tmp_path / "a", stage, NUMBER.get(stage, 1), whole_job=True) == []


def test_carrying_goes_on_when_the_trainer_has_closed(tmp_path, server, make_gate, belongings):
    gate = make_gate()
    server.trouble = lambda request: gate.hold() if request.is_part else None
    commit(tmp_path / "a", "step1", SIZES)
    before = belongings()
    with Rig(tiers=read_tiers([tmp_path / "a", URL])) as rig:
        pid = rig.client.pid
        gate.wait_held()
    assert any(str(pid) in entry for entry in belongings().beyond(before)["processes"]), "close does not wait"
    gate.open()
    wait_ended(pid)
    end = Snapshot()
    end.take(server)
    assert end.problems() == [] and end.objects["run/latest"] == b"step1"


def test_sigterm_ends_the_carrying_at_once_and_the_next_start_goes_on(tmp_path, server, make_gate):
    gate = make_gate()
    server.trouble = lambda request: gate.hold() if request.is_part else None
    commit(tmp_path / "a", "step1", SIZES)
    tiers = read_tiers([tmp_path / "a", URL])
    with Rig(tiers=tiers) as rig:
        pid = rig.client.pid
        gate.wait_held()
        rig.client.close(TIMEOUT)
        os.kill(pid, signal.SIGTERM)
        wait_ended(pid)  # while the parts are held: it does not wait for them
        gate.open()
    assert "run/latest" not in server.names()
    with Rig(tiers=tiers):
        wait_carried(tmp_path / "a", "step1")
    assert server.get("run/latest") == b"step1" and server.uploads() == 0


def test_a_dead_tier_bounds_the_end_and_not_the_saves(tmp_path, server):
    server.trouble = lambda _: 503
    tiers = read_tiers([tmp_path / "a", URL])
    with Rig(tiers=tiers, carry_timeout_seconds=0.5) as rig:
        pid = rig.client.pid
        for step in range(3):
            rig.checkpoint(tmp_path / "a" / f"step{step}", {"x.pt": image_of(100_000, step)}, f"a-{step}")
    wait_ended(pid)
    assert read_latest(str(tmp_path / "a")) == "step2"
    server.trouble = lambda _: None
    with Rig(tiers=tiers):
        for step in range(3):
            wait_carried(tmp_path / "a", f"step{step}")
    assert server.get("run/step0/x.pt") == image_of(100_000, 0) and server.get("run/latest") == b"step2"


def test_a_checkpoint_outside_of_the_first_tier_is_not_carried(tmp_path, server):
    with Rig(tiers=read_tiers([tmp_path / "a", URL])) as rig:
        rig.checkpoint(tmp_path / "elsewhere" / "step1", {"x.pt": image_of(10)}, "a-1")
    assert not [request for request in server.requests if request.method == "PUT"]
