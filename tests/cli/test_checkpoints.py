"""``datastates ls``, ``show`` and ``verify`` on real checkpoints, sound and damaged."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import types

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from datastates import CheckpointEngine
from datastates.cli import main
from datastates.cli.checkpoints import find_checkpoint
from datastates.cli.exit_codes import Fault
from datastates.errors import CheckpointNotFoundError

STEPS = (9, 10, 100)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Three checkpoints; ``latest`` names the last one."""
    folder = tmp_path_factory.mktemp("checkpoints")
    weights = torch.arange(30_000.0).reshape(100, 300)
    with CheckpointEngine({"host_cache_size": 0.00390625, "pin_host_cache": False}) as engine:
        for step in STEPS:
            directory = folder / f"global_step{step}"
            with engine.checkpoint(str(directory), directory.name):
                state = {
                    "module": {"layers.0.weight": weights, "layers.0.bias": torch.zeros(100), "tied": weights},
                    "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
                    "step": step,
                }
                engine.save(state, str(directory / "mp_rank_00_model_states.pt"))
                engine.save({"w": torch.ones(2, 3, dtype=torch.bfloat16)}, str(directory / "w.safetensors"))
        engine.wait(persist=True)
    return folder


@pytest.fixture
def folder(originals, tmp_path):
    return shutil.copytree(originals, tmp_path / "checkpoints")


def run(*arguments, expect=0):
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == expect, done.output
    return done


def rows(text):
    return [line.split() for line in text.splitlines()]


# ----------------------------------------------------------------------------------------------------------- ls


def test_ls_names_the_checkpoints_oldest_first_and_stars_the_latest(folder):
    done = run("ls", folder)
    header, *found = rows(done.stdout)
    assert header == ["step", "size", "ranks", "age", "checkpoint", "state"]
    assert [row[-2:] for row in found] == [[f"global_step{step}", "complete"] for step in STEPS]
    assert [row[0] for row in found] == ["9", "10", "*"]


def test_ls_says_what_is_missing(folder):
    (folder / "global_step9" / "w.safetensors").unlink()
    (folder / "global_step10" / ".datastates" / "commit.json").unlink()
    first, second, third = json.loads(run("ls", folder, "--json").stdout)
    assert (first["step"], first["is_complete"], first["is_committed"]) == (9, False, True)
    assert "the file is missing" in first["problem"]
    assert (second["step"], second["is_complete"], second["is_committed"]) == (10, False, False)
    assert (third["step"], third["is_complete"], third["is_latest"]) == (100, True, True)
    assert "the file is missing" in run("ls", folder).stdout


def test_paths_are_told_from_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "global_step10" / "w.safetensors").unlink()
    assert rows(run("ls").stdout)[2][-5:] == ["the", "file", "is", "missing:", "w.safetensors"]
    assert run("show", "global_step9").stdout.startswith("global_step9/mp_rank_00_model_states.pt: ")
    sound, missing = rows(run("verify", "global_step9", "global_step10", expect=12).stdout)
    assert sound[:2] == ["sound", "global_step9"]
    assert missing[:2] == ["missing", "global_step10/w.safetensors"]


def test_verdicts_stand_in_columns(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "global_step10" / "w.safetensors").unlink()
    sound, missing = run("verify", "global_step9", "global_step10", expect=12).stdout.splitlines()
    assert sound.index("global_step9") == missing.index("global_step10")


def test_ls_finds_checkpoints_one_folder_deeper(folder, tmp_path):
    for step in STEPS:
        outer = tmp_path / "out" / f"checkpoint-{step}"
        outer.mkdir(parents=True)
        (folder / f"global_step{step}").rename(outer / f"global_step{step}")
    found = json.loads(run("ls", tmp_path / "out", "--json").stdout)
    assert [entry["step"] for entry in found] == list(STEPS)
    assert "checkpoint-9/global_step9" in run("ls", tmp_path / "out").stdout


def test_ls_of_nothing(tmp_path):
    done = run("ls", tmp_path)
    assert done.stdout == ""
    assert done.stderr == f"{tmp_path} holds no checkpoint of datastates\n"
    assert run("ls", tmp_path, "--json").stdout == "[]\n"
    assert "no folder" in run("ls", tmp_path / "none", expect=4).stderr


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_folder_of_single_files_leads_on_to_them(tmp_path, command):
    for step in range(3):
        torch.save({"w": torch.ones(2)}, tmp_path / f"{step}.pt")
    words = f"{tmp_path} holds no checkpoint of datastates, but single files: name one of them, 0.pt, 1.pt, 2.pt\n"
    assert run(command, tmp_path, expect=0 if command == "ls" else 4).stderr.endswith(words)


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_folder_above_that_of_the_checkpoints_leads_down_to_them(folder, command):
    above = folder.parent
    words = "below it are checkpoints/global_step9, checkpoints/global_step10, checkpoints/global_step100\n"
    assert run(command, above, expect=4).stderr.endswith(words)


# --------------------------------------------------------------------------------------------------------- show


def test_show_is_a_tree_of_names_with_what_stands_under_them(folder):
    text = run("show", folder / "global_step10").stdout
    assert "mp_rank_00_model_states.pt: 4 tensors" in text
    assert "w.safetensors: 1 tensor, 12 B" in text
    found = rows(text)
    assert ["weight", "float32", "[100,", "300]", "117.2", "KiB"] in found
    assert ["bias", "float32", "[100]", "400", "B"] in found
    assert ["w", "bfloat16", "[2,", "3]", "12", "B"] in found
    assert ["step", "int", "10"] in found
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_show_selects_by_pattern(folder):
    (listing, other) = json.loads(run("show", folder / "global_step9", "--match", "*.bias", "--json").stdout)
    assert [tensor["fqn"] for tensor in listing["tensors"]] == ["module.layers.0.bias"]
    assert (listing["values"], other["tensors"]) == ([], [])
    (listing, _) = json.loads(run("show", folder / "global_step9", "--tensors", "--json").stdout)
    assert listing["values"] == [] and len(listing["tensors"]) == 4
    assert "no name like 'nothing'" in run("show", folder / "global_step9", "--match", "nothing", expect=4).stderr


def test_show_takes_the_checkpoint_that_latest_names_or_one_file(folder):
    assert "global_step100" in run("show", folder).stdout.splitlines()[0]
    path = folder / "global_step9" / "w.safetensors"
    assert run("show", path).stdout.splitlines()[0] == f"{path}: 1 tensor, 12 B"


def test_show_reads_files_of_others_and_imports_nothing_of_them(tmp_path, run_script):
    module = types.ModuleType("trainpkg")
    module.Config = type("Config", (), {"__module__": "trainpkg"})
    sys.modules["trainpkg"] = module
    try:
        state = {"w": torch.ones(2), "config": module.Config(), "args": argparse.Namespace(lr=1)}
        torch.save(state, tmp_path / "theirs.pt")
    finally:
        del sys.modules["trainpkg"]
    safetensors.torch.save_file({"a.b": torch.ones(3)}, tmp_path / "theirs.safetensors")
    done = run_script(
        "import sys\n"
        "from datastates.cli import main\n"
        "for name in sys.argv[1:]:\n"
        "    main(['show', name], standalone_mode=False)\n"
        "print(sorted({'torch', 'numpy', 'trainpkg'} & set(sys.modules)))\n",
        tmp_path / "theirs.pt",
        tmp_path / "theirs.safetensors",
    )
    assert "trainpkg.Config" in done.stdout
    assert "argparse.Namespace" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_show_of_what_is_no_checkpoint(tmp_path):
    (tmp_path / "x.pt").write_text("hello, this is no checkpoint at all")
    assert "x.pt" in run("show", tmp_path / "x.pt", expect=5).stderr
    assert "none.pt" in run("show", tmp_path / "none.pt", expect=4).stderr
    assert "holds no checkpoint" in run("show", tmp_path, expect=4).stderr


# ------------------------------------------------------------------------------------------------------- verify


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_sound_checkpoint_verifies(folder):
    assert run("verify", folder).stdout.startswith(f"sound  {folder}/global_step100")
    (found,) = json.loads(run("verify", folder / "global_step9", "--json").stdout)
    assert (found["is_sound"], found["problems"]) == (True, [])
    assert run("verify", folder / "global_step9" / "mp_rank_00_model_states.pt").stdout.startswith("sound")


def make_missing(directory):
    (directory / "w.safetensors").unlink()


def make_short(directory):
    os.truncate(directory / "w.safetensors", 20)


def damage_bytes(directory):
    path = directory / "mp_rank_00_model_states.pt"
    flip(path, path.read_bytes().index(torch.arange(30_000.0).numpy().tobytes()) + 4000)


def damage_records(directory):
    (directory / ".datastates" / "commit.json").write_text("{}")


def lose_records(directory):
    for path in directory.glob(".datastates/*/rank-00000.json"):
        path.unlink()


def never_complete(directory):
    (directory / ".datastates" / "commit.json").unlink()


@pytest.mark.parametrize(
    ("harm", "fault", "code"),
    [
        (never_complete, Fault.INCOMPLETE, 4),
        (damage_bytes, Fault.DAMAGED, 5),
        (damage_records, Fault.RECORDS, 11),
        (lose_records, Fault.RECORDS, 11),
        (make_missing, Fault.MISSING, 12),
        (make_short, Fault.SIZE, 13),
    ],
)
def test_each_kind_of_fault_has_its_exit_code(folder, harm, fault, code):
    harm(folder / "global_step9")
    assert fault.exit_code == code
    done = run("verify", folder / "global_step9", expect=code)
    assert done.stdout.startswith(f"{fault.value}  {folder}/global_step9")
    (found,) = json.loads(run("verify", folder / "global_step9", "--json", expect=code).stdout)
    assert found["is_sound"] is False
    assert [problem["fault"] for problem in found["problems"]] == [fault.value]


def test_damage_is_named_by_file_tensor_and_offset(folder):
    damage_bytes(folder / "global_step9")
    (found,) = json.loads(run("verify", folder / "global_step9", "--json", expect=5).stdout)
    (problem,) = found["problems"]
    assert problem["path"] == str(folder / "global_step9" / "mp_rank_00_model_states.pt")
    assert problem["fqn"] == "module.layers.0.weight"
    assert problem["offset"] <= (folder / "global_step9" / "mp_rank_00_model_states.pt").stat().st_size
    assert problem["expected"] != problem["found"]


def test_the_worst_fault_of_several_decides(folder):
    damage_bytes(folder / "global_step9")
    make_short(folder / "global_step9")
    make_missing(folder / "global_step10")
    done = run("verify", folder / "global_step9", folder / "global_step10", folder / "global_step100", expect=12)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["size", "damaged", "missing", "sound"]


def test_a_single_file_is_compared_with_what_there_is(folder, tmp_path):
    theirs = tmp_path / "theirs.pt"
    torch.save({"w": torch.arange(1000.0)}, theirs)
    assert run("verify", theirs).stdout.startswith("sound")
    flip(theirs, theirs.read_bytes().index(torch.arange(1000.0).numpy().tobytes()) + 100)
    assert "damaged" in run("verify", theirs, expect=5).stdout
    make_short(folder / "global_step9")
    assert "size" in run("verify", folder / "global_step9" / "w.safetensors", expect=13).stdout
    plain = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3)}, plain)
    assert "nothing to compare with" in run("verify", plain, expect=1).stdout
    (found,) = json.loads(run("verify", plain, "--json", expect=1).stdout)
    assert (found["is_sound"], found["is_checked"]) == (False, False)


def test_verify_of_what_is_not_there(tmp_path):
    assert "no file or folder" in run("verify", tmp_path / "none", expect=4).stderr
    assert run("verify", expect=2).stderr


# -------------------------------------------------------------------------------------------- which one is meant


def test_a_folder_means_its_latest_or_its_only_checkpoint(folder):
    assert find_checkpoint(str(folder)).tag == "global_step100"
    assert find_checkpoint(str(folder / "global_step9")).tag == "global_step9"
    (folder / "latest").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"several checkpoints.*global_step9, global_step10"):
        find_checkpoint(str(folder))
    (folder / "latest").write_text("global_step77")
    with pytest.raises(CheckpointNotFoundError, match="its latest names 'global_step77'"):
        find_checkpoint(str(folder))
    (folder / "latest").unlink()
    for step in (9, 10):
        shutil.rmtree(folder / f"global_step{step}")
    assert find_checkpoint(str(folder)).tag == "global_step100"
