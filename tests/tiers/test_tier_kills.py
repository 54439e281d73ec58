"""SIGKILL at each stage of an upload: what is left is whole, and the next start finishes. Long form: `make stress`."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from datastates.manifest import read_latest
from datastates.tier_settings import read_tiers
from flusher.rig import TIMEOUT, Rig, eventually, image_of
from tiers.checkpoints import make_checkpoint as commit
from tiers.killing import SIZES, STAGES, URL, Snapshot, kill_round, wait_carried, wait_ended

NUMBER = {"at a part": 2}


@pytest.mark.parametrize("stage", STAGES)
def test_of_the_flusher(tmp_path, server, stage):
    assert kill_round(server, tmp_path / "a", stage, NUMBER.get(stage, 1), whole_job=False) == []


@pytest.mark.parametrize("stage", ["at a part", "before the commit"])
def test_of_the_whole_job(tmp_path, server, stage):
    assert kill_round(server, tmp_path / "a", stage, NUMBER.get(stage, 1), whole_job=True) == []


@pytest.mark.parametrize("number", [2, 3])
def test_of_the_flusher_while_it_removes(tmp_path, server, number):
    """Killed when the record of a checkpoint that has to go is gone: before its files go, and before the mark does."""
    tiers = read_tiers([tmp_path / "a", {"path": URL, "keep_last": 1}])
    commit(tmp_path / "a", "step1", (1000, 0))
    with Rig(tiers=tiers):
        wait_carried(tmp_path / "a", "step1")
    commit(tmp_path / "a", "step2", (1000,))
    snapshot, count = Snapshot(), 0
    with Rig(tiers=tiers) as rig:
        pid = rig.client.pid

        def strike(request):
            nonlocal count
            count += request.method == "DELETE" or "delete" in request.query
            if count != number:
                return None
            server.trouble = lambda _: None
            os.kill(pid, signal.SIGKILL)
            snapshot.take(server)
            return "reset"

        server.trouble = strike
        wait_ended(pid)
    commit(tmp_path / "a", "step3", (1000,))
    with Rig(tiers=tiers):
        wait_carried(tmp_path / "a", "step3")
        eventually(lambda: not server.names("run/step1/") and not server.names("run/step2/"), "older ones are gone")
    assert snapshot.objects and snapshot.problems() == []
    end = Snapshot()
    end.take(server)
    assert end.problems() == [] and end.objects["run/latest"] == b"step3"


def test_a_server_that_is_down_fills_the_first_tier_up_to_its_limit(tmp_path, server):
    """With real sizes; when it is back, what is there is carried."""
    server.trouble = lambda _: 503
    nbytes, limit = 1 << 20, 3.5 / 1024
    root = tmp_path / "a"
    tiers = read_tiers([{"path": root, "limit_gb": limit}, URL])

    def held() -> int:
        nbytes = 0
        for path in root.glob("step*/x.pt"):
            with contextlib.suppress(FileNotFoundError):  # it is being removed
                nbytes += path.stat().st_size
        return nbytes

    def names() -> list[str]:
        return sorted(path.parent.parent.name for path in root.glob("*/.datastates/commit.json"))

    with Rig(tiers=tiers) as rig:
        for step in range(8):
            rig.checkpoint(root / f"step{step}", {"x.pt": image_of(nbytes, step)}, f"a-{step}")
            eventually(lambda: held() <= limit * 2**30, "the oldest has gone")
        kept = names()
        assert len(kept) == 3 and "step7" in kept
        lost = [f"step{step}" for step in range(8) if f"step{step}" not in kept]
        eventually(lambda: set(lost) <= set(_given_up(rig)), "each loss is told")
        server.trouble = lambda _: None
        for name in kept:
            wait_carried(root, name)
    end = Snapshot()
    end.take(server)
    assert end.problems() == [] and end.objects["run/latest"] == b"step7"
    assert all(end.objects[f"run/{name}/x.pt"] == image_of(nbytes, int(name[-1])) for name in kept)
    assert not [key for key in end.objects if any(f"/{name}/" in key for name in lost)]


def _given_up(rig):
    events = [event for event in rig.events if event["event"] == "carry_failed" and event["is_final"]]
    return [os.path.basename(event["path"]) for event in events if event["tier"] == URL]


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
