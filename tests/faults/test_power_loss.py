"""A power loss at any point of a save leaves the older checkpoint or the newer one, in full."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from datastates.directories import make_names_durable
from datastates.recovery import clean_leftovers
from faults.disk_model import Disk, Tree, read_tree
from faults.power_loss import SCENARIOS, PowerLossError, Recording, Scenario, record, run_power_loss, try_all
from faults.storage_recorder import Call, Recorder, read_log
from flusher.rig import Rig

ROOT, FOLDER, FILE, OTHER = 1, 2, 3, 4


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
def test_no_power_loss_does_harm(scenario: Scenario) -> None:
    counts = run_power_loss(4, 0, [scenario])
    assert counts["cut_points"] > 20 and counts["states"] >= 10
    assert all(counts[outcome] for outcome in ("none", "old", "new", "cleanings_cut"))
    assert counts["none"] + counts["old"] + counts["new"] == counts["states"]


# --- the harness finds what is broken: without some of the syncs that were recorded


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record(SCENARIOS[1])


def _is_dropped(kind: str, name: str, made: str) -> bool:
    """Whether a sync is of a kind, by the first name of what it syncs and the call that made it."""
    return {
        "data": name.endswith(".partial"),
        "manifest": name.startswith(".rank"),
        "record": name == ".commit.json.tmp",
        "latest": name == ".latest.tmp",
        "folder of a checkpoint": name == "s1",
        "folder of an older attempt": name == "run-0",
        "folder of records": name == ".datastates",
        "folder of checkpoints": name == "saves",
        "folder above": name == "",
        "every folder": made == "mkdir",
    }[kind]


KINDS = (
    "data",
    "manifest",
    "record",
    "latest",
    "folder of a checkpoint",
    "folder of an older attempt",
    "folder of records",
    "folder of checkpoints",
    "folder above",
    "every folder",
)


def _without(calls: list[Call], kind: str) -> list[Call]:
    left, first_names = [], {}
    for call in calls:
        if call[0] in ("create", "mkdir"):
            first_names[call[3]] = (call[2], call[0])
        if call[0] != "sync" or not _is_dropped(kind, *first_names.get(call[1], ("", "mkdir"))):
            left.append(call)
    return left


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_sync_is_found(recording: Recording, kind: str) -> None:
    calls = _without(recording.calls, kind)
    assert len(calls) < len(recording.calls)
    with pytest.raises(PowerLossError, match=r"the same tag, after call \d+"):
        try_all(replace(recording, calls=calls), 8, 0)


def test_files_that_are_written_over_before_their_checkpoint_is_durably_gone_are_found() -> None:
    recorded = record(next(scenario for scenario in SCENARIOS if scenario.name == "over removed ones"))
    calls, is_removal = [], False
    for call in recorded.calls:
        is_removal = (is_removal or call[0] == "retire") and call[0] != "mark"
        if not (is_removal and call[0] == "sync"):
            calls.append(call)
        is_removal = is_removal and call[0] != "sync"  # the first sync of a removal makes it durable
    assert len(calls) == len(recorded.calls) - sum(call[0] == "retire" for call in recorded.calls)
    assert sum(call[0] == "rename" and call[4].endswith(".partial") for call in calls) >= 2, "some are written over"
    with pytest.raises(PowerLossError, match=r"over removed ones, after call \d+"):
        try_all(replace(recorded, calls=calls), 8, 0)


# --- the model of the disk


def _trees(calls: list[Call], choices: int = 60) -> list[Tree]:
    disk = Disk(ROOT)
    for call in calls:
        disk.apply(call)
    return [disk.tree(choice, "seed") for choice in range(choices)]


def test_bytes_that_are_not_synced_are_lost_by_blocks() -> None:
    new = b"a" * 4096 + b"b" * 4096 + b"c"
    made: list[Call] = [("create", ROOT, "f", FILE), ("write", FILE, 0, bytes(9000)), ("sync", FILE), ("sync", ROOT)]
    found = {tree["f"] for tree in _trees([*made, ("write", FILE, 0, new)])}
    assert {data[:1] + data[4096:4097] + data[8192:8193] for data in found if data is not None} >= {
        b"\0\0\0",
        b"abc",
        b"a\0\0",
        b"\0b\0",
    }
    assert {tree["f"] for tree in _trees([*made, ("write", FILE, 0, new), ("sync", FILE)])} == {
        new + bytes(9000 - 8193)
    }


def test_sizes_that_are_not_synced_are_old_or_new() -> None:
    made: list[Call] = [("create", ROOT, "f", FILE), ("allocate", FILE, 100), ("truncate", FILE, 7), ("sync", ROOT)]
    assert {len(tree["f"] or b"") for tree in _trees(made)} == {0, 7, 100}
    assert {len(tree["f"] or b"") for tree in _trees([*made, ("sync", FILE)])} == {7}


def test_names_are_lost_one_by_one_until_their_folder_is_synced() -> None:
    made: list[Call] = [
        ("mkdir", ROOT, "d", FOLDER),
        ("create", FOLDER, "f", FILE),
        ("create", FOLDER, "g", OTHER),
        ("sync", FILE),
    ]
    assert {tuple(sorted(tree)) for tree in _trees(made)} == {
        (),
        ("d",),
        ("d", "d/f"),
        ("d", "d/g"),
        ("d", "d/f", "d/g"),
    }
    assert {tuple(sorted(tree)) for tree in _trees([*made, ("sync", FOLDER)])} == {(), ("d", "d/f", "d/g")}
    assert {tuple(sorted(tree)) for tree in _trees([*made, ("sync", FOLDER), ("sync", ROOT)])} == {("d", "d/f", "d/g")}


def test_a_rename_is_whole_in_one_folder_and_may_leave_the_old_name_in_another() -> None:
    made: list[Call] = [("mkdir", ROOT, "d", FOLDER), ("create", ROOT, "f", FILE), ("sync", ROOT)]
    here = [*made, ("rename", ROOT, "f", ROOT, "g")]
    assert {tuple(sorted(tree)) for tree in _trees(here)} == {("d", "f"), ("d", "g")}
    there = [*made, ("rename", ROOT, "f", FOLDER, "f")]
    assert {tuple(sorted(tree)) for tree in _trees(there)} == {("d", "f"), ("d", "d/f", "f"), ("d", "d/f")}
    assert {tuple(sorted(tree)) for tree in _trees([*there, ("sync", FOLDER)])} == {("d", "d/f", "f"), ("d", "d/f")}
    assert {tuple(sorted(tree)) for tree in _trees([*there, ("sync", ROOT)])} == {("d", "d/f")}


def test_changes_of_one_name_keep_their_order() -> None:
    made: list[Call] = [("create", ROOT, "f", FILE), ("remove", ROOT, "f"), ("create", ROOT, "f", OTHER)]
    calls = [*made, ("write", OTHER, 0, b"x"), ("sync", OTHER), ("rename", ROOT, "f", ROOT, "g")]
    assert {tuple(sorted(tree.items())) for tree in _trees(calls)} == {
        (),
        (("f", b""),),
        (("f", b"x"),),
        (("g", b"x"),),
    }


def test_the_model_sees_what_the_system_sees(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    disk = Disk.of(str(root))
    log = str(tmp_path / "log")
    with contextlib.closing(Recorder(log, str(root))) as recorder, recorder.installed():
        make = os.open(root / "a", os.O_CREAT | os.O_WRONLY)
        os.pwrite(make, b"12345", 3)
        os.ftruncate(make, 6)
        os.mkdir(root / "d")
        os.replace(root / "a", root / "d" / "b")
        os.posix_fallocate(make, 0, 50)
        os.close(make)
        os.close(os.open(root / "x", os.O_CREAT | os.O_RDWR))
        os.unlink(root / "x")
        os.mkdir(tmp_path / "outside")
    calls = read_log(log)
    for call in calls:
        disk.apply(call)
    assert len(calls) == 8
    assert disk.whole() == read_tree(str(root)) == {"d": None, "d/b": b"\0\0\x00123".ljust(50, b"\0")}
    assert Disk.of(str(root)).tree(0, "") == read_tree(str(root))


# --- what the power losses taught


def test_names_are_made_durable_up_to_a_folder_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def fsync_directory(path: str) -> None:
        if path == str(tmp_path / "a"):
            raise PermissionError
        synced.append(path)

    monkeypatch.setattr("datastates.directories.fsync_directory", fsync_directory)
    folder = tmp_path / "a" / "b" / "c"
    make_names_durable([str(folder / "f"), str(folder / "sub" / "g"), str(folder / "h")])
    assert synced == [str(folder), str(folder.parent), str(folder / "sub")]
    synced.clear()
    make_names_durable([str(folder / "f")], str(folder))
    assert synced == [str(folder)]
    with pytest.raises(PermissionError):
        make_names_durable([str(tmp_path / "a" / "f")])


def test_leftovers_in_subfolders_go_but_not_those_of_checkpoints_below(tmp_path: Path) -> None:
    with Rig() as rig:
        rig.checkpoint(tmp_path / "group" / "s1", {"f": b"abc"}, "run-1")
    mine = tmp_path / "group" / "sub" / ".h.a-0.datastates.partial"
    theirs = tmp_path / "group" / "s1" / ".h.a-0.datastates.partial"
    mine.parent.mkdir()
    for path in (mine, theirs):
        path.touch()
    assert clean_leftovers(str(tmp_path)) == [str(tmp_path / "group")]
    assert not mine.exists() and theirs.exists()
    assert clean_leftovers(str(tmp_path / "group")) == [str(tmp_path / "group" / "s1")]
    assert not theirs.exists()
