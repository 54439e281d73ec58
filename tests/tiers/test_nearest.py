"""What is to be loaded comes from the nearest tier that has it whole."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from datastates import Checkpointer
from datastates.errors import CheckpointNotFoundError
from datastates.integrity import verify
from datastates.manifest import read_latest
from datastates.pins import is_pinned, pin
from datastates.tier_settings import read_tiers
from datastates.tiers.first_tier import name_below
from datastates.tiers.nearest import fetch_latest, fetch_named, fetch_newest
from tiers.rig import Ranks


@pytest.fixture
def tiers(tmp_path, commit):
    """Two checkpoints in three tiers."""
    for step in (1, 2):
        commit(tmp_path / "a", f"run/step{step}", at=float(step))
    for far in ("b", "c"):
        Ranks(tmp_path / "a", tmp_path / far).work()
    return read_tiers([tmp_path / name for name in "abc"])


def test_a_checkpoint_is_brought_from_the_nearest_that_has_it_whole(tmp_path, tiers):
    step = tmp_path / "a" / "run" / "step1"
    assert fetch_named(tiers, str(step)) is False
    shutil.rmtree(step)
    shutil.rmtree(tmp_path / "b" / "run" / "step1")
    assert fetch_named(tiers, str(step)) is True and verify(str(step)) == []
    assert read_latest(str(tmp_path / "a" / "run")) == "step2"


@pytest.mark.parametrize("damage", ["a file is gone", "a file is cut", "the record is gone", "the record is nonsense"])
def test_what_is_not_whole_here_is_replaced(tmp_path, tiers, damage):
    step = tmp_path / "a" / "run" / "step2"
    if damage == "a file is gone":
        os.unlink(step / "part1-rank0.pt")
    elif damage == "a file is cut":
        os.truncate(step / "part0-rank0.pt", 17)
    elif damage == "the record is gone":
        shutil.rmtree(step / ".datastates")
        (step / ".datastates").mkdir()
    else:
        (step / ".datastates" / "commit.json").write_text("nonsense")
    assert fetch_named(tiers, str(step)) is True
    assert verify(str(step)) == []


def test_what_is_damaged_in_the_nearer_tier_comes_from_the_next(tmp_path, tiers):
    shutil.rmtree(tmp_path / "a" / "run" / "step2")
    path = tmp_path / "b" / "run" / "step2" / "part0-rank0.pt"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert fetch_named(tiers, str(tmp_path / "a" / "run" / "step2"))
    assert verify(str(tmp_path / "a" / "run" / "step2")) == []


def test_what_is_nowhere_is_said_tier_by_tier(tmp_path, tiers):
    with pytest.raises(CheckpointNotFoundError) as info:
        fetch_named(tiers, str(tmp_path / "a" / "run" / "step9"))
    text = str(info.value)
    assert "step9 is whole in no tier" in text and f"{tmp_path}/a: not there" in text
    assert f"{tmp_path}/b holds no complete checkpoint" in text and f"{tmp_path}/c holds no" in text
    assert not (tmp_path / "a" / "run" / "step9").exists()


def test_what_others_have_saved_and_what_lies_elsewhere_is_left_alone(tmp_path, tiers):
    theirs = tmp_path / "a" / "run" / "step1"
    shutil.rmtree(theirs)
    theirs.mkdir()
    (theirs / "mp_rank_00_model_states.pt").write_bytes(b"theirs")
    assert fetch_named(tiers, str(theirs)) is False and os.listdir(theirs) == ["mp_rank_00_model_states.pt"]
    assert fetch_named(tiers, str(tmp_path / "elsewhere" / "step1")) is False
    assert fetch_latest(tiers, str(tmp_path / "elsewhere")) is None
    assert not (tmp_path / "elsewhere").exists()


def test_latest_names_what_was_brought(tmp_path, tiers):
    run = tmp_path / "a" / "run"
    shutil.rmtree(run)
    assert fetch_latest(tiers, str(run)) == "step2" == read_latest(str(run))
    assert sorted(os.listdir(run)) == ["latest", "step2"]
    (run / "latest").write_text("step1")  # somebody goes back; nothing younger than what is here is anywhere
    assert fetch_latest(tiers, str(run)) == "step1" and verify(str(run / "step1")) == []


def test_nothing_anywhere_is_a_fresh_start(tmp_path):
    tiers = read_tiers([tmp_path / "a", tmp_path / "b"])
    assert fetch_latest(tiers, str(tmp_path / "a")) is None
    assert fetch_newest(tiers, str(tmp_path / "a")) is None
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_pin_comes_with_the_checkpoint(tmp_path, commit):
    pin(str(commit(tmp_path / "a", "step1")))
    Ranks(tmp_path / "a", tmp_path / "b").work()
    shutil.rmtree(tmp_path / "a")
    assert fetch_named(read_tiers([tmp_path / "a", tmp_path / "b"]), str(tmp_path / "a" / "step1"))
    assert is_pinned(str(tmp_path / "a" / "step1"))


def test_a_checkpointer_loads_a_step_that_another_tier_has(tmp_path):
    options = {"host_cache_gb": 0.02, "keep_last": 1, "tiers": [tmp_path / "a", tmp_path / "b"]}
    with Checkpointer(tmp_path / "a", **options) as checkpointer:
        for step in range(2):
            checkpointer.save(step, {"w": torch.full((10,), float(step))}, block=True)
            checkpointer.wait_carried(60)
    shutil.rmtree(tmp_path / "a" / "step1")
    with Checkpointer(tmp_path / "a", **options) as checkpointer:
        assert bool((checkpointer.load(1).state["w"] == 1).all())
        with pytest.raises(CheckpointNotFoundError, match="step7 is whole in no tier"):
            checkpointer.load(7)


def test_names_below_a_root(tmp_path):
    assert name_below(str(tmp_path), str(tmp_path / "a" / "b" / "c")) == "a/b/c"
    assert name_below(str(tmp_path), str(tmp_path / "a" / "b" / "c" / "d")) is None, "too deep to be found"
    assert name_below(str(tmp_path), str(tmp_path.parent / "x")) is None
    assert name_below(str(tmp_path), str(tmp_path)) is None
    assert name_below(str(tmp_path), str(tmp_path / ".hidden" / "a")) is None
