"""A tier that is a directory."""

from __future__ import annotations

import os
import shutil

import pytest

from datastates.errors import StorageError
from datastates.integrity import verify
from datastates.manifest import read_commit, read_latest
from datastates.tier_settings import read_tiers
from datastates.tiers import carrying, folder_store
from datastates.tiers.housekeeping import keep_house
from tiers.rig import Ranks


def test_a_checkpoint_is_the_same_in_the_tier_to_the_last_byte(tmp_path, commit):
    first = commit(tmp_path / "a", "run/step1", world_size=2)
    ranks = Ranks(tmp_path / "a", tmp_path / "b", world_size=2)
    ranks.work()
    second = tmp_path / "b" / "run" / "step1"
    assert verify(str(second)) == [] and read_commit(str(second)) == read_commit(str(first))
    assert {path.name: path.read_bytes() for path in first.glob("*.pt")} == {
        path.name: path.read_bytes() for path in second.glob("*.pt")
    }
    assert len(list(second.glob("*.pt"))) == 6 and read_latest(str(second.parent)) == "step1"
    assert ranks.carried() == ["step1"]
    ranks.notes.clear()
    ranks.work()
    assert ranks.notes == [], "it is remembered"
    Ranks(tmp_path / "a", tmp_path / "b").work()


def test_no_rank_begins_before_rank_0_has_chosen(tmp_path, commit):
    commit(tmp_path / "a", "step1", world_size=2)
    ranks = Ranks(tmp_path / "a", tmp_path / "b", world_size=2)
    assert ranks.turn(1) is not None and not (tmp_path / "b").exists()
    ranks.turn(0)  # sends its part, and gives up on rank 1's at once
    assert "the parts of ranks [1] have not come" in ranks.errors()[0]
    assert read_commit(str(tmp_path / "b" / "step1")) is None and not (tmp_path / "b" / "latest").exists()
    ranks.work()
    assert verify(str(tmp_path / "b" / "step1")) == []


def test_a_checkpoint_of_more_ranks_is_shared_out_over_those_that_are_left(tmp_path, commit):
    commit(tmp_path / "a", "step1", world_size=3)
    Ranks(tmp_path / "a", tmp_path / "b", world_size=2).work()
    assert verify(str(tmp_path / "b" / "step1")) == []


def test_a_damaged_file_is_not_carried_but_reported(tmp_path, commit):
    commit(tmp_path / "a", "step1")
    bad = commit(tmp_path / "a", "step2")
    path = bad / "part0-rank0.pt"
    data = bytearray(path.read_bytes())
    data[2**20 + 7] ^= 1
    path.write_bytes(data)
    ranks = Ranks(tmp_path / "a", tmp_path / "b")
    ranks.work()
    assert ranks.carried() == ["step1"]
    (error,) = ranks.errors()
    assert f"{path}: bytes 1048576 to 2097152 have CRC-32" in error and "not carried" in error
    assert read_commit(str(tmp_path / "b" / "step2")) is None
    assert read_latest(str(tmp_path / "b")) == "step1"
    assert not list((tmp_path / "b").rglob("*.partial"))


def test_another_ranks_damage_ends_the_waiting(tmp_path, commit):
    bad = commit(tmp_path / "a", "step1", world_size=2)
    os.truncate(bad / "part0-rank1.pt", 10)
    ranks = Ranks(tmp_path / "a", tmp_path / "b", world_size=2)
    ranks.turn(0)
    ranks.work()
    assert ranks.carried() == [] and "10 bytes found" in "".join(ranks.errors())
    assert ranks.turn(0) is None


@pytest.mark.parametrize("how", ["removed", "saved anew"])
def test_a_checkpoint_that_goes_while_it_is_carried_is_given_up(tmp_path, commit, monkeypatch, how):
    directory = commit(tmp_path / "a", "step1")
    send = folder_store.FolderStore.send

    def lose(*arguments):
        if how == "removed":
            shutil.rmtree(directory, ignore_errors=True)
        elif not list(directory.glob(".datastates/*/outcome*")):
            commit(tmp_path / "a", "step1", seed="new")
        return send(*arguments)

    monkeypatch.setattr(folder_store.FolderStore, "send", lose)
    ranks = Ranks(tmp_path / "a", tmp_path / "b")
    ranks.turn(0)
    assert "was removed or saved anew" in ranks.errors()[0] and ranks.carried() == []
    monkeypatch.setattr(folder_store.FolderStore, "send", send)
    ranks.work()
    if how == "saved anew":
        assert verify(str(tmp_path / "b" / "step1")) == []
        assert read_commit(str(tmp_path / "b" / "step1")) == read_commit(str(directory))
    else:
        assert not list((tmp_path / "b").rglob("*.partial"))


def test_saving_again_under_a_tag_replaces_it_in_the_tier_at_once_or_not_at_all(tmp_path, commit, monkeypatch):
    commit(tmp_path / "a", "step1", (100, 200, 300))
    ranks = Ranks(tmp_path / "a", tmp_path / "b")
    ranks.work()
    old = read_commit(str(tmp_path / "b" / "step1"))
    commit(tmp_path / "a", "step1", (100,), seed="again")
    monkeypatch.setattr(folder_store.FolderStore, "send_manifest", _full)
    ranks.turn(0)
    assert read_commit(str(tmp_path / "b" / "step1")) == old and verify(str(tmp_path / "b" / "step1")) == []
    monkeypatch.undo()
    ranks.work()
    assert verify(str(tmp_path / "b" / "step1")) == [] and read_commit(str(tmp_path / "b" / "step1")) != old
    assert [path.name for path in (tmp_path / "b" / "step1").glob("*.pt")] == ["part0-rank0.pt"]


def _full(*_):
    raise StorageError("the tier is full")


def test_each_tier_has_its_own_retention_and_links_are_not_followed(tmp_path, commit):
    for step in range(1, 6):
        commit(tmp_path / "a", f"step{step}")
    other = tmp_path / "elsewhere"
    other.mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "step0").symlink_to(other)
    (tmp_path / "b" / "notes").mkdir()
    ranks = Ranks(tmp_path / "a", {"path": tmp_path / "b", "keep_last": 1, "keep_every": 2})
    ranks.work()
    assert ranks.carried() == ["step5", "step4", "step2"]
    assert sorted(os.listdir(tmp_path / "b")) == ["latest", "notes", "step0", "step2", "step4", "step5"]
    commit(tmp_path / "a", "step7")
    ranks.work()
    assert sorted(os.listdir(tmp_path / "b")) == ["latest", "notes", "step0", "step2", "step4", "step7"]
    assert other.is_dir() and len(list((tmp_path / "a").glob("step*"))) == 6


def test_the_first_tier_keeps_what_is_not_carried_up_to_its_limit(tmp_path, commit):
    for step in range(1, 5):
        commit(tmp_path / "a", f"step{step}", (1 << 20,))
    tiers = read_tiers([{"path": tmp_path / "a", "keep_last": 1}, tmp_path / "b"])
    assert keep_house(tiers[0], tiers[1:]) == ([], [])
    limited = read_tiers([{"path": tmp_path / "a", "keep_last": 1, "limit_gb": 3.5 / 1024}, tmp_path / "b"])
    removed, lost = keep_house(limited[0], limited[1:])
    assert removed == ["step1"] and [(one.checkpoint.name, one.tiers) for one in lost] == [
        ("step1", (str(tmp_path / "b"),))
    ]
    ranks = Ranks(tmp_path / "a", tmp_path / "b")
    ranks.work()
    assert ranks.carried() == ["step4", "step3", "step2"]
    assert keep_house(tiers[0], tiers[1:]) == (["step2", "step3"], [])
    assert sorted(os.listdir(tmp_path / "a")) == ["latest", "step4"]


def test_what_is_no_record_in_the_tier_is_replaced(tmp_path, commit):
    directory = commit(tmp_path / "a", "step1", (100,))
    record = tmp_path / "b" / "step1" / ".datastates" / "commit.json"
    record.parent.mkdir(parents=True)
    record.write_text("nonsense")
    ranks = Ranks(tmp_path / "a", tmp_path / "b")
    ranks.work()
    assert ranks.carried() == ["step1"] and verify(str(record.parent.parent)) == []
    assert read_commit(str(record.parent.parent)) == read_commit(str(directory))


def test_a_tier_that_fails_is_tried_again_ever_later_and_with_the_newest(tmp_path, commit, monkeypatch):
    commit(tmp_path / "a", "step1")
    monkeypatch.setattr(folder_store.FolderStore, "send", _full)
    ranks = Ranks(tmp_path / "a", tmp_path / "b")
    delays = [ranks.turn(0) for _ in range(12)]
    assert all(0.4 < low < high for low, high in zip(delays[:3:2], delays[2:5:2], strict=True)) and max(delays) <= 60
    assert not ranks.carriers[0].is_idle
    commit(tmp_path / "a", "step2")
    monkeypatch.undo()
    ranks.work()
    assert ranks.carried() == ["step2", "step1"] and read_latest(str(tmp_path / "b")) == "step2"


def test_a_defect_in_carrying_harms_nothing_else(tmp_path, commit, monkeypatch):
    commit(tmp_path / "a", "step1")
    monkeypatch.setattr(carrying.Carrying, "send_part", lambda *_: 1 / 0)
    ranks = Ranks(tmp_path / "a", tmp_path / "b")
    assert ranks.turn(0) > 0 and "ZeroDivisionError" in ranks.errors()[0]


def test_what_a_killed_process_has_left_is_cleaned_or_used(tmp_path, commit):
    commit(tmp_path / "a", "step1")
    ranks = Ranks(tmp_path / "a", tmp_path / "b", world_size=2)
    commit(tmp_path / "a", "step2", world_size=2)
    ranks.turn(0)  # rank 0's part of step2
    for carrier in ranks.carriers:
        if carrier._carrying is not None:
            carrier._carrying._store.close()  # as a process that dies lets go
    gone = tmp_path / "b" / "step0" / ".datastates" / "run-1-0001"
    gone.mkdir(parents=True)
    (gone.parent.parent / ".x.pt.run-1-0001.datastates.partial").write_bytes(b"1")
    again = Ranks(tmp_path / "a", tmp_path / "b", world_size=2)
    again.work()
    assert sorted(again.carried()) == ["step1", "step2"]
    assert not list((tmp_path / "b").rglob("*.partial"))
    assert all(verify(str(tmp_path / "b" / name)) == [] for name in again.carried())
