"""The universal layout straight from the files of ZeRO, whatever happens meanwhile.

`test_stock_tools` compares it with what DeepSpeed's converter writes.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates import locks
from datastates.checksum import crc32
from datastates.cli import main
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, TopologyError
from datastates.universal import convert_to_universal, result_folder
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.names import read_names
from datastates.universal.result_folder import ResultFolder
from datastates.universal.shards import Shards
from datastates.universal.source import ZeroCheckpoint
from datastates.universal.writing import Written
from integrations.zero_files import Model, write_zero2, write_zero3

GROUPS = [{"layer.weight": (33, 7), "layer.bias": (33,)}, {"scale": (1,), "few": (5,)}]
WRITERS = {2: write_zero2, 3: write_zero3}


# --- the layouts


def read_back(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for path in folder.glob("zero/*/*.pt"):
        value = torch.load(path, weights_only=True)
        if path.stem != "step":
            found.setdefault(path.parent.name, {})[path.stem] = value["param"] if isinstance(value, dict) else value
    return found


def assert_holds(folder: Path, model: Model) -> None:
    found = read_back(folder)
    assert found.keys() == model.values.keys()
    for name, values in model.values.items():
        assert found[name].keys() == values.keys()
        for key, value in values.items():
            assert torch.equal(found[name][key].reshape(value.shape), value), (name, key)


@pytest.mark.parametrize("stage", WRITERS)
@pytest.mark.parametrize("num_ranks", [1, 4, 7])
def test_no_padding_gets_into_a_parameter_however_many_ranks_there_were(stage, num_ranks, tmp_path):
    model = Model(GROUPS)
    WRITERS[stage](tmp_path / "ckpt", model, num_ranks)
    done = convert_to_universal(tmp_path / "ckpt", tmp_path / "out", num_workers=2)
    assert_holds(tmp_path / "out", model)
    assert done.num_kept == 0
    assert done.nbytes == sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert (tmp_path / "latest_universal").read_text() == "out"


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    before=st.integers(1, 6),
    after=st.integers(1, 8),
    stage=st.sampled_from(sorted(WRITERS)),
)
def test_any_cut_into_any_number_of_parts_gathers_to_the_same(tmp_path_factory, sizes, before, after, stage):
    model = Model([{f"p{index}": (size,) for index, size in enumerate(sizes)}])
    folder = tmp_path_factory.mktemp("cut")
    WRITERS[stage](folder, model, before)
    with MappedFiles() as files:
        shards = ZeroCheckpoint(str(folder), files).shards(0)
        for name, values in model.values.items():
            for key, value in values.items():
                share = -(-value.numel() // after)
                parts = [torch.empty(max(0, min(share, value.numel() - rank * share))) for rank in range(after)]
                for rank, part in enumerate(parts):
                    shards.copy(name, key, rank * share, part)
                assert torch.equal(torch.cat(parts), value)


def test_every_state_of_any_optimizer_is_there(tmp_path):
    """One moment, as Lion and SGD keep it, under its own name; no step; weights alone before the first step."""
    model = Model(GROUPS)
    write_zero2(tmp_path / "ckpt", model, 2)
    for path in (tmp_path / "ckpt").glob("*optim*"):
        state = torch.load(path, weights_only=False)
        states = state["optimizer_state_dict"]["base_optimizer_state"]["state"]
        states[0] = {"momentum_buffer": states[0]["exp_avg"]}
        states[1] = {}
        torch.save(state, path)
    convert_to_universal(tmp_path / "ckpt", tmp_path / "out")
    found = read_back(tmp_path / "out")
    assert torch.equal(found["layer.weight"]["momentum_buffer"], model.values["layer.weight"]["exp_avg"])
    assert found["layer.weight"].keys() == {"fp32", "momentum_buffer"}
    assert torch.equal(found["few"]["fp32"], model.values["few"]["fp32"])
    assert not (tmp_path / "out" / "zero" / "few" / "step.pt").exists()


def test_numbers_in_names_are_numbers_and_the_record_says_which_files_belong(tmp_path):
    names = [f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt" for dp in (0, 1, 10, 100) for mp in (0, 9, 100)]
    for name in [*names, "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt.bak", "layer_1.pt"]:
        (tmp_path / name).touch()
    found = read_names(str(tmp_path))
    assert sorted(found.optimizer) == [(dp, mp) for dp in (0, 1, 10, 100) for mp in (0, 9, 100)]
    assert found.data_parallel_ranks(9) == [0, 1, 10, 100]
    assert found.model_parallel_ranks == [0, 9, 100]


# --- killed, damaged, in the way


def test_a_killed_conversion_is_taken_up_and_what_is_damaged_is_made_again(tmp_path, run_script):
    model = Model([{f"p{index}": (50, 100) for index in range(40)}])
    write_zero2(tmp_path / "ckpt", model, 3)
    code = (
        "import os, signal, sys\n"
        "from datastates.universal import convert_to_universal\n"
        "def progress(done, total):\n"
        "    if done > total // 2:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert_to_universal(sys.argv[1], sys.argv[2], num_workers=1, progress=progress)\n"
    )
    env = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    run_script(code, tmp_path / "ckpt", tmp_path / "out", expect=-signal.SIGKILL, env=env)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "latest_universal").exists()
    partial = tmp_path / ".out.conversion.datastates.partial"
    finished = [json.loads(line)["item"] for line in (partial / ".journal").read_bytes().splitlines()[1:]]
    assert 5 < len(finished) < 40
    victim = partial / next(name for name in finished if name.startswith("zero/p")) / "exp_avg.pt"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = convert_to_universal(tmp_path / "ckpt", tmp_path / "out")
    assert done.num_kept == len(finished) - 1
    assert_holds(tmp_path / "out", model)
    assert not partial.exists()
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_a_journal_that_was_cut_in_a_line_is_continued(tmp_path):
    path = str(tmp_path / "out")
    for item in ("first", "second"):
        with ResultFolder(path, "origin") as folder:
            (Path(folder.directory) / item).write_bytes(b"abc")
            folder.record(item, [Written(item, 3, crc32(b"abc"))])
            with open(Path(folder.directory) / ".journal", "ab") as journal:
                journal.write(b'{"item": "th')
    with ResultFolder(path, "origin") as folder:
        assert [folder.is_finished(item) for item in ("first", "second", "third")] == [True, True, False]
        folder.publish()
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["first", "second"]


def test_a_second_one_that_comes_while_the_first_publishes_harms_nothing(tmp_path, monkeypatch):
    """It must not take the lock, and what is finished for leftovers."""
    monkeypatch.setattr(locks, "_TIMEOUT_SECONDS", 0)
    path, seen = str(tmp_path / "out"), []

    def fsync(directory):
        with pytest.raises(StorageError), ResultFolder(path, "origin"):
            pass
        seen.append(directory)

    with ResultFolder(path, "origin") as folder:
        (Path(folder.directory) / "file").write_bytes(b"abc")
        folder.record("file", [Written("file", 3, crc32(b"abc"))])
        monkeypatch.setattr(result_folder, "fsync_directory", fsync)
        folder.publish()
    assert seen[0] == folder.directory
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["file"]


def test_what_was_begun_from_another_checkpoint_is_not_kept(tmp_path):
    first, second = Model(GROUPS, seed=1), Model(GROUPS, seed=2)
    write_zero2(tmp_path / "ckpt", first, 2)

    def stop(done, total):
        if done > total // 2:
            raise KeyError("stopped")

    with pytest.raises(KeyError):
        convert_to_universal(tmp_path / "ckpt", tmp_path / "out", num_workers=1, progress=stop)
    assert not (tmp_path / "out").exists()
    for path in (tmp_path / "ckpt").iterdir():
        path.unlink()
    write_zero2(tmp_path / "ckpt", second, 2)
    assert convert_to_universal(tmp_path / "ckpt", tmp_path / "out").num_kept == 0
    assert_holds(tmp_path / "out", second)


def test_a_place_that_is_taken_is_left_alone(tmp_path, monkeypatch):
    write_zero2(tmp_path / "ckpt", Model(GROUPS), 2)
    (tmp_path / "out").mkdir()
    with pytest.raises(StorageError, match="is there already") as caught:
        convert_to_universal(tmp_path / "ckpt", tmp_path / "out")
    assert caught.value.errno == errno.EEXIST
    monkeypatch.setattr(locks, "_TIMEOUT_SECONDS", 0.0)
    other = tmp_path / ".new.conversion.datastates.partial"
    other.mkdir()
    descriptor = locks.open_locked(str(other / ".lock"), os.O_RDWR | os.O_CREAT)
    with pytest.raises(StorageError, match="another process owns it"):
        convert_to_universal(tmp_path / "ckpt", tmp_path / "new")
    os.close(descriptor)
    other.joinpath(".lock").unlink()
    other.rmdir()


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, small_disk):
    write_zero2(tmp_path / "ckpt", Model([{"p": (500, 500)}]), 2)
    disk = small_disk(1 << 20)
    with pytest.raises(StorageError, match="bytes needed") as caught:
        convert_to_universal(tmp_path / "ckpt", disk / "out")
    assert caught.value.errno == errno.ENOSPC
    assert not list(disk.iterdir())


@pytest.mark.parametrize(
    ("break_it", "error", "text"),
    [
        (
            lambda folder: (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
            CorruptCheckpointError,
            "the optimizer file of data-parallel rank 1, model-parallel rank 0 is missing",
        ),
        (
            lambda folder: (folder / "mp_rank_00_model_states.pt").unlink(),
            CorruptCheckpointError,
            "the model file of data-parallel rank 0",
        ),
        (
            lambda folder: [path.unlink() for path in folder.glob("*optim*")],
            CheckpointNotFoundError,
            "no optimizer files of ZeRO",
        ),
        (
            lambda folder: change(folder, lambda state: state["base_optimizer_state"]["state"][0].update(step=9)),
            CorruptCheckpointError,
            "the ranks are at different steps",
        ),
        (
            lambda folder: change(folder, lambda state: state["param_slice_mappings"][0].clear()),
            CorruptCheckpointError,
            "elements on all ranks, expected",
        ),
        (
            lambda folder: change(
                folder, lambda state: state.update(single_partition_of_fp32_groups=[torch.empty(0)] * 2)
            ),
            TopologyError,
            "offloaded to NVMe",
        ),
        (
            lambda folder: change(
                folder, lambda state: state.update(universal_checkpoint_info={}), "mp_rank*", ds_autoep_layers=[{}]
            ),
            TopologyError,
            "AutoEP",
        ),
    ],
    ids=["no optimizer file", "no model file", "no ZeRO", "steps differ", "a piece is missing", "NVMe", "AutoEP"],
)
def test_what_is_wrong_is_told_with_its_name(break_it, error, text, tmp_path):
    write_zero2(tmp_path / "ckpt", Model(GROUPS), 3)
    break_it(tmp_path / "ckpt")
    with pytest.raises(error, match=text):
        convert_to_universal(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def change(folder: Path, how, pattern: str = "zero_pp_rank_1_*", **extra: object) -> None:
    path = next(folder.glob(pattern))
    state = torch.load(path, weights_only=False)
    how(state.get("optimizer_state_dict", state))
    torch.save({**state, **extra}, path)


def test_a_source_that_is_cut_short_meanwhile_is_an_error(tmp_path):
    write_zero2(tmp_path / "ckpt", Model([{"p": (300, 300)}]), 1)
    path = tmp_path / "ckpt" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with MappedFiles() as files:
        shards: Shards = ZeroCheckpoint(str(tmp_path / "ckpt"), files).shards(0)
        files.locate()
        os.truncate(path, 4096)
        with pytest.raises(CorruptCheckpointError, match="cut short"):
            list(files.blocks(shards.views("p", "fp32")[0]))


# --- its cost


def test_memory_and_space_do_not_grow_with_the_model(tmp_path, run_script):
    """96 MiB of states in one parameter: far less than that in memory, and no more space than the result takes."""
    model = Model([{"large": (1 << 23,)}])
    write_zero2(tmp_path / "ckpt", model, 2)
    code = (
        "import os, sys\n"
        "from datastates.universal import convert_to_universal\n"
        "def peak():\n"
        "    with open('/proc/self/status') as status:\n"
        "        return next(int(line.split()[1]) for line in status if line.startswith('VmHWM')) >> 10\n"
        "space = 0\n"
        "def progress(done, total):\n"
        "    global space\n"
        "    folders = os.walk(os.path.dirname(sys.argv[2]))\n"
        "    files = [os.path.join(top, name) for top, _, names in folders if '/.out.' in top for name in names]\n"
        "    space = max(space, sum(map(os.path.getsize, files)))\n"
        "convert_to_universal(sys.argv[1], sys.argv[3], num_workers=1)\n"
        "before = peak()\n"
        "done = convert_to_universal(sys.argv[1], sys.argv[2], num_workers=2, progress=progress)\n"
        "print(peak() - before, space / done.nbytes)\n"
    )
    write_zero2(tmp_path / "small", Model(GROUPS), 2)
    env = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    code = code.replace("sys.argv[1], sys.argv[3], num_workers=1", "sys.argv[4], sys.argv[3], num_workers=1")
    done = run_script(code, tmp_path / "ckpt", tmp_path / "out", tmp_path / "warm", tmp_path / "small", env=env)
    grown_mib, share = map(float, done.stdout.split())
    assert grown_mib < 16
    assert 0.5 < share <= 1.01


# --- the command


def test_the_command_converts_and_says_so(tmp_path):
    write_zero2(tmp_path / "save" / "step5", Model(GROUPS), 2)
    (tmp_path / "save" / "latest").write_text("step5")
    arguments = ["convert", "--to", "universal", str(tmp_path / "save"), str(tmp_path / "out")]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["path"] == str(tmp_path / "out")
    assert answer["num_items"] == 6  # four parameters, the common state, the model file
    assert_holds(tmp_path / "out", Model(GROUPS))
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 9
    assert again.stderr.count("\n") == 1
    assert "is there already" in again.stderr
    told = CliRunner().invoke(main, [*arguments[:-1], str(tmp_path / "second"), "--workers", "1"])
    assert "6 parameters and files" in told.stdout


def test_an_empty_latest_names_no_checkpoint(tmp_path):
    write_zero2(tmp_path / "ckpt", Model(GROUPS), 2)
    (tmp_path / "ckpt" / "latest").write_text("")
    with pytest.raises(CheckpointNotFoundError, match="its latest names ''"):
        convert_to_universal(tmp_path / "ckpt", tmp_path / "out")
