"""The checkpoints of a folder, complete or not and why, and the newest that loads."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import shutil
from typing import Any

import pytest
import torch

from datastates import CheckpointEngine, catalog, list_checkpoints, load_latest, recovery
from datastates.contents.listing import list_file
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, MismatchError, StorageError
from datastates.manifest import (
    ABORTED_NAME,
    COMMIT_NAME,
    FileRecord,
    Manifest,
    commit_path,
    manifest_path,
    write_causes,
    write_manifest,
)

ATTEMPT = "0123456789ab-0123456789abcdef-0"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Checkpoints of steps 9, 10 and 11, in this order."""
    root = tmp_path_factory.mktemp("saved")
    with CheckpointEngine({"host_cache_size": 0.02}, rank=0) as engine:
        for step in (9, 10, 11):
            folder = root / f"global_step{step}"
            with engine.checkpoint(str(folder), folder.name):
                engine.save({"w": torch.full((1 << 18,), float(step))}, str(folder / "model.pt"))
                engine.save({"step": step}, str(folder / "sub" / "rank_0.pt"))
            engine.wait(persist=True)
    return root


@pytest.fixture
def root(original: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(original, tmp_path / "saved"))


def uncommit(folder: pathlib.Path) -> None:
    """As if one rank of two had finished."""
    record = json.loads(pathlib.Path(commit_path(str(folder))).read_bytes())
    os.unlink(commit_path(str(folder)))
    path = pathlib.Path(manifest_path(str(folder), record["attempt"], 0))
    path.write_bytes(path.read_bytes().replace(b'"world_size": 1', b'"world_size": 2'))


def damage(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[list_file(path).tensors[0].offset + 77] ^= 1
    path.write_bytes(data)


def test_complete_ones_the_oldest_first(root: pathlib.Path) -> None:
    found = list_checkpoints(root)
    assert [(one.tag, one.step, one.world_size, one.is_complete) for one in found] == [
        ("global_step9", 9, 1, True),
        ("global_step10", 10, 1, True),
        ("global_step11", 11, 1, True),
    ]
    assert [one.is_latest for one in found] == [False, False, True]
    assert found[0].created_at < found[1].created_at < found[2].created_at
    sizes = {name: (root / "global_step9" / name).stat().st_size for name in ("model.pt", "sub/rank_0.pt")}
    assert found[0].file_nbytes == sizes and found[0].nbytes == sum(sizes.values())


def test_one_checkpoint(root: pathlib.Path) -> None:
    (found,) = list_checkpoints(root / "global_step11")
    assert (found.tag, found.is_latest) == ("global_step11", True)


def test_folders_of_others_and_files_are_left_out(root: pathlib.Path) -> None:
    (root / "logs").mkdir()
    (root / "notes.txt").write_text("x")
    (root / "loop").symlink_to("loop")
    (root / "nowhere").symlink_to("absent")
    os.mkfifo(root / "pipe")
    assert len(list_checkpoints(root)) == 3
    assert list_checkpoints(root / "logs") == []
    with pytest.raises(CheckpointNotFoundError, match=r"no folder .*absent"):
        list_checkpoints(root / "absent")


def test_what_is_missing_is_said(root: pathlib.Path) -> None:
    (root / "global_step9" / "model.pt").unlink()
    uncommit(root / "global_step10")
    os.truncate(root / "global_step11" / "model.pt", 100)
    found = {one.step: one for one in list_checkpoints(root)}
    assert "the file is missing" in found[9].problem and "model.pt" in found[9].problem
    assert found[10].problem == "not committed: of 2 ranks the parts of 1 are missing: 1"
    assert (found[10].world_size, found[10].is_committed) == (2, False)
    assert "the file has 100 bytes" in found[11].problem and found[11].is_committed


def test_why_it_was_given_up(tmp_path: pathlib.Path) -> None:
    for number in (1, 2, 3, 4):
        (tmp_path / f"step{number}" / ".datastates" / ATTEMPT).mkdir(parents=True)
    write_causes(str(tmp_path / "step1"), ATTEMPT, ABORTED_NAME, {1: "no space"})
    file = FileRecord("a.pt", 5, 4096, (0,))
    write_manifest(str(tmp_path / "step2"), Manifest(ATTEMPT, 1, 3, "step2", (file,), 5.0))
    write_manifest(str(tmp_path / "step3"), Manifest(ATTEMPT, 0, 1, "step3", (file,), 6.0))
    pathlib.Path(commit_path(str(tmp_path / "step4"))).write_bytes(b"nonsense")
    found = {one.tag: one for one in list_checkpoints(tmp_path)}
    assert found["step1"].problem == "given up: rank 1: no space"
    assert found["step2"].problem == "not committed: of 3 ranks the parts of 2 are missing: 0, 2"
    assert (found["step2"].nbytes, found["step2"].created_at) == (5, 5.0)
    assert found["step3"].problem.startswith("not committed: all ranks have finished")
    assert COMMIT_NAME in found["step4"].problem and "not JSON" in found["step4"].problem


@pytest.mark.parametrize("name", ["read_commit", "check"])
def test_what_is_removed_meanwhile_is_left_out(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    original = getattr(catalog, name)

    def removing(directory: str) -> Any:
        if directory.endswith("step10"):
            shutil.rmtree(directory)
        return original(directory)

    monkeypatch.setattr(catalog, name, removing)
    assert [one.step for one in list_checkpoints(root)] == [9, 11]
    shutil.copytree(root / "global_step9", root / "global_step10")
    with pytest.raises(CheckpointNotFoundError, match="global_step10 was removed while"):
        list_checkpoints(root / "global_step10")


def test_what_cannot_be_looked_at_is_told(root: pathlib.Path) -> None:
    """A file stands where a folder of the checkpoint should be."""
    folder = root / "global_step10"
    shutil.rmtree(folder / "sub")
    (folder / "sub").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot look at .*rank_0\.pt: Not a directory"):
        list_checkpoints(root)


def test_listing_loads_no_torch(root: pathlib.Path, run_script: Any) -> None:
    code = (
        "import sys, datastates\n"
        "found = datastates.list_checkpoints(sys.argv[1])\n"
        "assert datastates.verify(found[0].path) == []\n"
        "print(len(found), [name for name in ('torch', 'numpy') if name in sys.modules])\n"
    )
    assert run_script(code, root).stdout == "3 []\n"


# --- the newest that loads


def test_the_newest(root: pathlib.Path) -> None:
    found = load_latest(root)
    assert (found.tag, found.step, found.path, found.skipped) == ("global_step11", 11, str(root / "global_step11"), {})
    assert found.files.keys() == {"model.pt", "sub/rank_0.pt"}
    assert found.files["model.pt"]["w"][0] == 11 and found.files["sub/rank_0.pt"] == {"step": 11}


@pytest.mark.parametrize("names", ["model*", ["model.pt"], "model.pt"])
def test_some_of_its_files(root: pathlib.Path, names: Any) -> None:
    assert load_latest(root, names).files.keys() == {"model.pt"}
    with pytest.raises(MismatchError, match=r"has no file 'modle\.pt'; near names: 'model\.pt'"):
        load_latest(root, "modle.pt")
    with pytest.raises(MismatchError, match=r"has no file 'xyz\*'; it has model\.pt, sub/rank_0\.pt$"):
        load_latest(root, "xyz*")


def test_damaged_and_incomplete_ones_are_skipped_and_named(
    root: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(root / "global_step11" / "model.pt")
    uncommit(root / "global_step10")
    targets = {"w": torch.zeros(1 << 18)}
    with caplog.at_level(logging.WARNING, "datastates.latest"):
        found = load_latest(root, "model.pt", into=targets)
    assert (found.tag, targets["w"][77].item()) == ("global_step9", 9.0)
    assert "w is damaged" in found.skipped["global_step11"]
    assert "parts of 1 are missing: 1" in found.skipped["global_step10"]
    assert [record.message.split(" ")[1] for record in caplog.records] == [
        str(root / "global_step11"),
        str(root / "global_step10"),
    ]


def test_only_incomplete_ones(root: pathlib.Path) -> None:
    for folder in root.glob("global_step*"):
        uncommit(folder)
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint: global_step11: not committed"):
        load_latest(root)
    assert load_latest(root, missing_ok=True) is None
    assert load_latest(root / "absent", missing_ok=True) is None
    with pytest.raises(CheckpointNotFoundError, match="no folder"):
        load_latest(root / "absent")
    (root / "nothing").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="no checkpoints at all"):
        load_latest(root / "nothing")


def test_damaged_ones_are_no_fresh_start(root: pathlib.Path) -> None:
    for folder in root.glob("global_step*"):
        damage(folder / "model.pt")
    with pytest.raises(CheckpointNotFoundError, match="is damaged"):
        load_latest(root, missing_ok=True)
    assert load_latest(root, check=False).tag == "global_step11"


def test_an_interrupted_commit_is_completed(root: pathlib.Path) -> None:
    """As after a crash between the last manifest and the commit."""
    os.unlink(commit_path(str(root / "global_step11")))
    assert "loading completes it" in list_checkpoints(root)[-1].problem
    assert load_latest(root, "sub/*").tag == "global_step11"


def test_a_damaged_commit_record(root: pathlib.Path) -> None:
    pathlib.Path(commit_path(str(root / "global_step11"))).write_bytes(b"{}")
    assert load_latest(root).tag == "global_step10"
    with pytest.raises(CorruptCheckpointError):
        recovery.committed_record(str(root / "global_step11"))
