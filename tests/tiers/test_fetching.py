"""Loading from whatever tier has the newest checkpoint whole."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from datastates import CheckpointEngine, Checkpointer, list_checkpoints, load_latest
from datastates.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, WaitTimeoutError
from datastates.integrity import verify
from datastates.tiers.fetching import fetch
from tiers.object_server import BUCKET
from tiers.rig import Ranks, tier_of

URL = f"s3://{BUCKET}/run"


def save(folder: Path, tiers: list[object], *steps: int) -> None:
    with CheckpointEngine({"host_cache_size": 0.02, "tiers": tiers}) as engine:
        for step in steps:
            with engine.checkpoint(str(folder / f"step{step}"), f"step{step}"):
                engine.save({"w": torch.full((300_000,), float(step))}, str(folder / f"step{step}" / "model.pt"))
            engine.wait()
        engine.wait_carried(60)


def weights(loaded) -> float:
    found = loaded.files["model.pt"]["w"]
    assert bool((found == found[0]).all()) and len(found) == 300_000
    return float(found[0])


def test_the_whole_way_there_and_back(tmp_path, server):
    tiers = [tmp_path / "a", tmp_path / "b", URL]
    save(tmp_path / "a", tiers, 1, 2)
    assert [one.tag for one in list_checkpoints(URL)] == ["step1", "step2"]
    assert [one.is_latest for one in list_checkpoints(URL)] == [False, True]
    assert load_latest(tiers).path == str(tmp_path / "a" / "step2"), "the nearest"
    shutil.rmtree(tmp_path / "a")
    assert load_latest(tiers).path == str(tmp_path / "b" / "step2"), "as it is: nothing is copied"
    shutil.rmtree(tmp_path / "b")
    loaded = load_latest(tiers)
    assert loaded.path == str(tmp_path / "a" / "step2") and weights(loaded) == 2.0 and loaded.skipped == {}
    assert verify(loaded.path) == [] and os.listdir(tmp_path / "a") == ["step2"]
    server.requests.clear()
    assert weights(load_latest(tiers)) == 2.0
    assert not [request for request in server.requests if request.key.endswith("model.pt")], "it is there now"


def test_the_newest_wins_over_the_nearest(tmp_path, server):
    save(tmp_path / "a", [tmp_path / "a", URL], 1, 2)
    shutil.rmtree(tmp_path / "a" / "step2")
    assert weights(load_latest([tmp_path / "a", URL])) == 2.0


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_local_one_is_replaced_from_the_next_tier(tmp_path, server, damage):
    tiers = [tmp_path / "a", URL]
    save(tmp_path / "a", tiers, 1)
    path = tmp_path / "a" / "step1" / "model.pt"
    if damage == "flipped":
        data = bytearray(path.read_bytes())
        data[700_000] ^= 4
        path.write_bytes(data)
    else:
        os.truncate(path, 1000)
    loaded = load_latest(tiers)
    assert weights(loaded) == 1.0 and verify(str(path.parent)) == []
    assert list(loaded.skipped) == ["step1"]


def test_a_damaged_object_is_refused_and_an_older_one_taken(tmp_path, server):
    tiers = [tmp_path / "a", URL]
    save(tmp_path / "a", tiers, 1, 2)
    shutil.rmtree(tmp_path / "a")
    data = bytearray(server.get("run/step2/model.pt"))
    data[-1000] ^= 1
    server.call("PUT", f"/{BUCKET}/run/step2/model.pt", bytes(data))
    loaded = load_latest(tiers)
    assert weights(loaded) == 1.0 and "CRC-32" in loaded.skipped["step2"]
    assert not list((tmp_path / "a").rglob("*.partial")) and not (tmp_path / "a" / "step2" / "model.pt").exists()


def test_a_tier_that_is_down_does_not_hide_the_others(tmp_path, server, monkeypatch):
    tiers = [tmp_path / "a", URL]
    save(tmp_path / "a", tiers, 1)
    server.trouble = lambda _: 403
    loaded = load_latest(tiers)
    assert weights(loaded) == 1.0 and "403" in loaded.skipped[URL]
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CheckpointNotFoundError, match="403"):
        load_latest(tiers)


def test_an_interrupted_fetch_goes_on_by_file(tmp_path, commit, server):
    commit(tmp_path / "a", "step1")
    Ranks(tmp_path / "a", URL).work()
    server.trouble = lambda request: 403 if request.method == "GET" and "part1" in request.path else None
    with pytest.raises(OSError, match="403"):
        fetch(tier_of(URL), "step1", str(tmp_path / "c" / "step1"))
    server.trouble = lambda _: None
    server.requests.clear()
    fetch(tier_of(URL), "step1", str(tmp_path / "c" / "step1"))
    assert verify(str(tmp_path / "c" / "step1")) == []
    assert not [request for request in server.requests if "part0" in request.path]


def test_of_several_processes_one_fetches_and_all_find_it(tmp_path, commit, server):
    commit(tmp_path / "a", "step1")
    Ranks(tmp_path / "a", URL).work()
    server.requests.clear()
    threads = [
        threading.Thread(target=fetch, args=(tier_of(URL), "step1", str(tmp_path / "c" / "step1"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verify(str(tmp_path / "c" / "step1")) == []
    assert sum("part0" in request.path for request in server.requests) == 4, "its four slabs, once"


def test_what_is_not_there_is_named(tmp_path, commit, server):
    with pytest.raises(CheckpointNotFoundError, match=f"{URL} holds no complete checkpoint 'step9'"):
        fetch(tier_of(URL), "step9", str(tmp_path / "step9"))
    with pytest.raises(CheckpointNotFoundError):
        load_latest([tmp_path / "a", URL])
    assert load_latest([tmp_path / "a", URL], missing_ok=True) is None
    with pytest.raises(ConfigError, match="name both"):
        load_latest(URL)
    commit(tmp_path / "a", "step1")
    Ranks(tmp_path / "a", URL).work()
    (manifest,) = [key for key in server.names() if "/rank-" in key]
    server.call("PUT", f"/{BUCKET}/{manifest}", b"{}")
    with pytest.raises(CorruptCheckpointError, match="committed with"):
        fetch(tier_of(URL), "step1", str(tmp_path / "c"))


def test_what_was_fetched_is_not_carried_again(tmp_path, commit, server):
    commit(tmp_path / "a", "step1")
    Ranks(tmp_path / "a", URL).work()
    fetch(tier_of(URL), "step1", str(tmp_path / "c" / "step1"))
    again = Ranks(tmp_path / "c", URL)
    again.work()
    assert again.notes == []


def test_waiting_for_tiers_has_a_limit_that_names_what_is_behind(tmp_path, server):
    server.trouble = lambda _: 503
    config = {"host_cache_size": 0.02, "tiers": [tmp_path / "a", URL], "carry_timeout_seconds": 0.1}
    with CheckpointEngine(config) as engine:
        with engine.checkpoint(str(tmp_path / "a" / "step1"), "step1"):
            engine.save({"w": torch.ones(10)}, str(tmp_path / "a" / "step1" / "model.pt"))
        engine.wait(persist=True)
        with pytest.raises(WaitTimeoutError, match=f"step1 is not in {URL} after 0"):
            engine.wait_carried(0.3)


def test_the_log_says_once_what_is_saved_elsewhere(tmp_path, caplog):
    with CheckpointEngine({"host_cache_size": 0.02, "tiers": [tmp_path / "a", tmp_path / "b"]}) as engine:
        for step in range(2):
            with engine.checkpoint(str(tmp_path / "other" / f"step{step}"), f"step{step}"):
                engine.save({"w": torch.ones(10)}, str(tmp_path / "other" / f"step{step}" / "model.pt"))
        engine.wait_carried(30)
    assert sum("is not below" in message for message in caplog.messages) == 1
    assert not (tmp_path / "b").exists()


def test_what_lies_too_deep_is_not_waited_for(tmp_path, caplog):
    with CheckpointEngine({"host_cache_size": 0.02, "tiers": [tmp_path / "a", tmp_path / "b"]}) as engine:
        directory = tmp_path / "a" / "1" / "2" / "3" / "step1"
        with engine.checkpoint(str(directory), "step1"):
            engine.save({"w": torch.ones(10)}, str(directory / "model.pt"))
        engine.wait_carried(60)
    assert "more than 3 folders deep" in caplog.text and not (tmp_path / "b").exists()


def test_a_checkpointer_deletes_nothing_that_is_not_carried_and_resumes_from_any_tier(tmp_path, server):
    server.trouble = lambda _: 403
    options = {"host_cache_gb": 0.02, "keep_last": 1, "tiers": [tmp_path / "a", URL], "carry_timeout_seconds": 20}
    with Checkpointer(tmp_path / "a" / "run", **options) as checkpointer:
        for step in range(3):
            checkpointer.save(step, {"w": torch.full((10,), float(step))}, block=True)
        assert checkpointer.steps() == [0, 1, 2]
        server.trouble = lambda _: None
        checkpointer.wait_carried(60)
        checkpointer.save(3, {"w": torch.full((10,), 3.0)}, block=True)
        checkpointer.wait_carried(60)
        assert checkpointer.steps() == [3]
    shutil.rmtree(tmp_path / "a")
    with Checkpointer(tmp_path / "a" / "run", **options) as checkpointer:
        state = {"w": torch.zeros(10)}
        assert checkpointer.resume(state) == 3 and bool((state["w"] == 3).all())


def test_a_checkpointers_folder_lies_in_its_first_tier(tmp_path):
    with pytest.raises(ConfigError, match="expected a folder in it"):
        Checkpointer(tmp_path / "c", host_cache_gb=0.02, tiers=[tmp_path / "a", tmp_path / "b"])
