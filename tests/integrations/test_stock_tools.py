"""DeepSpeed's own tools on lazily saved files, in processes where datastates cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from datastates import CheckpointEngine, load
from datastates.cli import main

STAGES = ["zero1", "zero2 fp16", "zero3"]
IN_SAFETENSORS = ["zero3 safetensors", "zero2 offload safetensors"]

BLOCKED = """
import json, runpy, sys
from pathlib import Path

sys.modules["datastates"] = None  # it cannot be imported here
for script, *arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
try:
    import datastates
except ImportError:
    print("blocked")
"""


def run_without_datastates(*calls: list[object]) -> None:
    """Run scripts one after the other, each as its own main program, in a process that has no datastates."""
    calls_json = json.dumps([[str(part) for part in call] for call in calls])
    command = [sys.executable, "-c", BLOCKED, calls_json]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("blocked\n"), done.stdout


@pytest.fixture(scope="module")
def saved(running_fork_server, tmp_path_factory):
    """Checkpoints of two ranks, with the weights that the live engines had."""
    folder = tmp_path_factory.mktemp("saved")
    names = [*STAGES, *IN_SAFETENSORS, "pipeline"]
    running_fork_server.start("integrations.converter_runs:save_with_weights", folder, names, folder=folder).wait(90)
    return folder


def assert_weights(folder: Path, state: dict[str, torch.Tensor]) -> None:
    expected = torch.load(folder / "expected.pt")
    assert len(expected) == 8
    for name, weight in expected.items():
        assert torch.equal(state[name], weight), name
    assert torch.equal(state["tied.weight"], expected["second.weight"])
    assert float(state["seen"].min()) == 3.0
    if folder.name != "zero1":  # DeepSpeed notes frozen parameters from ZeRO 2 on
        assert state["frozen"].shape == (7, 3)


def test_zero_to_fp32_and_ds_to_universal_read_our_files(saved, tmp_path):
    calls: list[list[object]] = []
    for stage in STAGES:
        place = saved / stage
        assert (place / "zero_to_fp32.py").is_file(), "DeepSpeed drops it there"
        calls.append([place / "zero_to_fp32.py", place, tmp_path / stage])
        options = ["--num_extract_workers", 1, "--num_merge_workers", 1, "--inject_missing_state"]
        script = Path(torch.__file__).parents[1] / "deepspeed" / "checkpoint" / "ds_to_universal.py"
        folders = ["--input_folder", place / "first", "--output_folder", tmp_path / stage / "universal"]
        calls.append([script, *folders, *options])
    run_without_datastates(*calls)
    for stage in STAGES:
        stock = torch.load(tmp_path / stage / "pytorch_model.bin")
        assert_weights(saved / stage, stock)
        assert_our_consolidation_is(stock, saved / stage, tmp_path / f"{stage}.safetensors")
        for name, weight in torch.load(saved / stage / "expected.pt").items():
            value = torch.load(tmp_path / stage / "universal" / "zero" / name / "fp32.pt")
            whole = value["param"] if isinstance(value, dict) else value.reshape(weight.shape)
            assert torch.equal(whole, weight), name


def assert_our_consolidation_is(stock: dict[str, torch.Tensor], place: Path, out: Path) -> None:
    done = CliRunner().invoke(main, ["convert", "--to", "fp32", str(place), str(out)])
    assert (done.exit_code, done.stderr.count("\n")) == (6, 1) and "--trust" in done.stderr, done.output
    done = CliRunner().invoke(main, ["convert", "--to", "fp32", str(place), str(out), "--trust"])
    assert done.exit_code == 0, done.output
    ours = load(out)
    assert ours.keys() == stock.keys()
    for name, weight in stock.items():
        assert torch.equal(ours[name].float(), weight.float()), name
        assert ours[name].dtype is torch.float32 or not ours[name].is_floating_point(), name
    assert ours["tied.weight"].data_ptr() == ours["second.weight"].data_ptr()


def test_our_converter_writes_what_deepspeeds_does(saved, fork_server, tmp_path):
    """Files of real runs of all stages, in both formats, and of a pipeline; then rules of tensor parallelism."""
    names = [*STAGES, *IN_SAFETENSORS, "pipeline"]
    jobs = "integrations.converter_runs:"
    log = fork_server.start(jobs + "compare_converters", saved, names, folder=tmp_path, num_ranks=1).wait(60)
    log += fork_server.start(jobs + "compare_rules", tmp_path / "rules", folder=tmp_path, num_ranks=1).wait(60)
    for name in [*names, "rules one", "rules two", "rules stages"]:
        assert f"ok {name}: " in log, log


def test_converted_to_torch_files_of_the_safetensors_format_are_read_by_zero_to_fp32(saved, tmp_path):
    calls = []
    for name in IN_SAFETENSORS:
        place = tmp_path / name / "first"
        arguments = ["convert", "--to", "torch", "--trust", str(saved / name), str(place)]
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
        assert (place.parent / "latest").read_text() == "first"
        calls.append([place.parent / "zero_to_fp32.py", place.parent, tmp_path / name / "out"])
        assert sorted(path.name for path in place.iterdir()) == sorted(
            path.name for path in (saved / name / "first").iterdir() if path.name[0] != "."
        )
    run_without_datastates(*calls)
    for name in IN_SAFETENSORS:
        assert_weights(saved / name, torch.load(tmp_path / name / "out" / "pytorch_model.bin"))


def test_converting_to_torch_changes_no_value_and_copies_what_is_no_safetensors(tmp_path):
    source = tmp_path / "save" / "step1"
    (source / "more").mkdir(parents=True)
    state = {"weight": torch.arange(6.0).view(2, 3), 7: ("a", None), "tied": torch.zeros(2)}
    state["again"] = state["tied"]
    engine_file = source / "mp_rank_00_model_states.pt"
    with CheckpointEngine({"host_cache_size": 2**-8, "format": "safetensors"}) as engine:
        engine.save(state, str(engine_file))
    (source / "more" / "notes.txt").write_text("kept")
    (source / ".hidden").write_text("not kept")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "latest").write_text("older")
    done = CliRunner().invoke(main, ["convert", "--to", "torch", str(source), str(tmp_path / "out" / "step1")])
    assert done.exit_code == 0, done.output
    found = torch.load(tmp_path / "out" / "step1" / engine_file.name, weights_only=True)
    assert list(found) == list(state)
    assert torch.equal(found["weight"], state["weight"])
    assert found[7] == ("a", None)
    assert found["again"].data_ptr() == found["tied"].data_ptr()
    assert (tmp_path / "out" / "step1" / "more" / "notes.txt").read_text() == "kept"
    assert not (tmp_path / "out" / "step1" / ".hidden").exists()
    assert (tmp_path / "out" / "latest").read_text() == "older"
