"""The engine without DeepSpeed: what is promised of single files and of checkpoints, with real processes and files."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import threading
import weakref
from pathlib import Path

import pytest
import safetensors
import torch
from torch.optim import optimizer

import datastates
from datastates import manifest
from datastates.checkpoint_engine import CheckpointEngine
from datastates.errors import (
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
    CorruptCheckpointError,
    DataStatesError,
    StateError,
    StorageError,
    WaitTimeoutError,
)
from datastates.integrity import verify

SMALL = {"host_cache_size": 2**-8, "slab_bytes": 1 << 20}  # 4 MiB


@pytest.fixture
def engine():
    made = CheckpointEngine(SMALL, rank=0)
    yield made
    made.close()


def test_the_public_name_is_the_contract_of_deepspeed():
    assert datastates.CheckpointEngine is CheckpointEngine


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_state_comes_back(engine, tmp_path, make_state, assert_same_state, suffix):
    state = make_state(3 << 20)
    path = tmp_path / f"state.{suffix}"
    assert engine.save(state, str(path)) is True
    engine.wait(persist=True)
    assert_same_state(engine.load(str(path)), state)
    assert_same_state(datastates.load(str(path)), state)


def test_a_torch_file_is_read_by_torch(engine, tmp_path, make_state, assert_same_state):
    state = make_state(3 << 20)
    engine.save(state, str(tmp_path / "state.pt"))
    engine.wait(persist=True)
    for options in ({}, {"mmap": True}):
        assert_same_state(torch.load(tmp_path / "state.pt", weights_only=True, **options), state)


def test_a_safetensors_file_is_read_by_safetensors(engine, tmp_path):
    state = {"a": {"w": torch.randn(400, 400)}, "b": torch.arange(5)}
    engine.save(state, str(tmp_path / "state.safetensors"))
    engine.wait(persist=True)
    with safetensors.safe_open(tmp_path / "state.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("a.w"), state["a"]["w"])
        assert torch.equal(file.get_tensor("b"), state["b"])


def test_the_config_chooses_the_format_for_all(tmp_path):
    engine = CheckpointEngine({**SMALL, "format": "safetensors"}, rank=0)
    engine.save({"w": torch.ones(4)}, str(tmp_path / "state.pt"))
    engine.close()
    with safetensors.safe_open(tmp_path / "state.pt", "pt") as file:
        assert list(file.keys()) == ["w"]


def test_after_wait_everything_may_change(engine, tmp_path, make_state, assert_same_state):
    state = make_state(16 << 20)  # four times the cache
    expected = copy.deepcopy(state)
    engine.save(state, str(tmp_path / "state.pt"))
    engine.wait()
    for tensor in state["module"].values():
        tensor.data.fill_(-1)
    state["optimizer"]["state"][0]["step"].fill_(0)
    state["module"].clear()
    engine.wait(persist=True)
    assert_same_state(engine.load(str(tmp_path / "state.pt")), expected)


def test_objects_and_small_tensors_may_change_at_once(engine, tmp_path):
    state = {"step": torch.tensor(3.0), "small": torch.ones(1000), "list": [1, 2], "rng": torch.get_rng_state()}
    expected = {key: value.clone() if isinstance(value, torch.Tensor) else list(value) for key, value in state.items()}
    engine.save(state, str(tmp_path / "state.pt"))
    state["step"].fill_(9)
    state["small"].fill_(9)
    state["list"].append(3)
    torch.rand(3)
    engine.wait(persist=True)
    found = engine.load(str(tmp_path / "state.pt"))
    assert found["list"] == expected["list"]
    for key in ("step", "small", "rng"):
        assert torch.equal(found[key], expected[key])


def test_small_tensors_beyond_the_budget_are_copied_before_save_returns(tmp_path):
    engine = CheckpointEngine({**SMALL, "eager_bytes": 1 << 20, "eager_budget_bytes": 1 << 16}, rank=0)
    state = {str(number): torch.full((1 << 15,), float(number)) for number in range(40)}
    engine.save(state, str(tmp_path / "state.pt"))
    for tensor in state.values():
        tensor.fill_(-1)
    engine.wait(persist=True)
    found = engine.load(str(tmp_path / "state.pt"))
    engine.close()
    assert all(bool((found[str(number)] == number).all()) for number in range(40))


def test_named_tensors_are_eager_whatever_their_size(engine, tmp_path):
    state = {"lazy": torch.ones(8), "average": torch.ones(100_000)}
    engine.save(state, str(tmp_path / "state.pt"), is_eager=lambda fqn, tensor: fqn == "average")
    state["average"].data.fill_(2)
    engine.wait(persist=True)
    assert float(engine.load(str(tmp_path / "state.pt"))["average"].max()) == 1


def test_the_file_is_not_there_before_it_is_durable(engine, tmp_path):
    os.kill(engine.saver.flusher_pid, signal.SIGSTOP)
    engine.save({"w": torch.ones(100_000)}, str(tmp_path / "state.pt"))
    engine.wait()
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == []
    os.kill(engine.saver.flusher_pid, signal.SIGCONT)
    engine.wait(persist=True)
    assert os.listdir(tmp_path) == ["state.pt"]


def test_the_flusher_may_die_during_a_save(engine, tmp_path, make_state, assert_same_state):
    state = make_state(16 << 20)
    first = engine.saver.flusher_pid
    os.kill(first, signal.SIGSTOP)
    engine.save(state, str(tmp_path / "state.pt"))
    os.kill(first, signal.SIGKILL)
    engine.wait(persist=True, timeout=60)
    assert engine.saver.flusher_pid != first
    assert_same_state(engine.load(str(tmp_path / "state.pt")), state)


def test_a_failed_save_is_told_and_the_next_one_works(engine, tmp_path):
    (tmp_path / "file").write_text("in the way")
    engine.save({"w": torch.ones(100_000)}, str(tmp_path / "file" / "state.pt"))
    with pytest.raises(StorageError, match="file") as caught:
        engine.wait(persist=True)
    assert caught.value.errno is not None
    engine.save({"w": torch.ones(3)}, str(tmp_path / "state.pt"))
    engine.wait(persist=True)
    assert torch.equal(engine.load(str(tmp_path / "state.pt"))["w"], torch.ones(3))


def test_a_failed_save_is_told_at_the_next_save_at_the_latest(engine, tmp_path):
    (tmp_path / "file").write_text("in the way")
    engine.save({"w": torch.ones(8)}, str(tmp_path / "file" / "state.pt"))
    engine.saver.settle(30)
    with pytest.raises(StorageError):
        engine.save({"w": torch.ones(8)}, str(tmp_path / "state.pt"))


def test_a_full_disk_harms_nothing_and_is_told_by_name(engine, small_disk):
    disk = small_disk(8 << 20)
    engine.save({"w": torch.ones(1 << 20)}, str(disk / "first.pt"))
    engine.wait(persist=True)
    engine.save({"w": torch.zeros(2 << 20)}, str(disk / "second.pt"))
    with pytest.raises(StorageError, match=r"second\.pt") as caught:
        engine.wait(persist=True)
    assert caught.value.errno == 28
    assert os.listdir(disk) == ["first.pt"]
    os.unlink(disk / "first.pt")
    engine.save({"w": torch.ones(1 << 20)}, str(disk / "third.pt"))
    engine.wait(persist=True)
    assert float(engine.load(str(disk / "third.pt"))["w"].sum()) == 1 << 20


def test_what_cannot_be_saved_is_named_before_anything_is_written(engine, tmp_path):
    with pytest.raises(StateError, match=r"deep\.lock"):
        engine.save({"w": torch.ones(100_000), "deep": {"lock": threading.Lock()}}, str(tmp_path / "state.pt"))
    engine.wait(persist=True)
    assert os.listdir(tmp_path) == []


def test_a_changed_tensor_loses_the_save_by_name(engine, tmp_path):
    first = engine.saver.flusher_pid
    os.kill(first, signal.SIGSTOP)
    tensor = torch.ones(3 << 20)  # three times the cache: cannot be staged while the flusher stands still
    engine.save({"weights": tensor}, str(tmp_path / "state.pt"))
    tensor.add_(1)
    os.kill(first, signal.SIGCONT)
    with pytest.raises(DataStatesError, match="weights"):
        engine.wait(persist=True)
    engine.close()
    assert os.listdir(tmp_path) == []


def test_files_of_a_checkpoint_appear_together_and_latest_names_them(engine, tmp_path):
    folder = tmp_path / "step1"
    with engine.checkpoint(str(folder), "step1"):
        engine.save({"w": torch.ones(8)}, str(folder / "a.pt"))
        engine.save({"w": torch.ones(100_000)}, str(folder / "b.safetensors"))
    engine.wait(persist=True)
    assert (tmp_path / "latest").read_text() == "step1"
    assert sorted(manifest.committed_files(str(folder))) == ["a.pt", "b.safetensors"]
    assert verify(str(folder)) == []


def test_an_exception_inside_drops_the_checkpoint_and_only_that(engine, tmp_path):
    with engine.checkpoint(str(tmp_path / "step1"), "step1"):
        engine.save({"w": torch.ones(8)}, str(tmp_path / "step1" / "a.pt"))
    with pytest.raises(KeyError), engine.checkpoint(str(tmp_path / "step2"), "step2"):
        engine.save({"w": torch.ones(8)}, str(tmp_path / "step2" / "a.pt"))
        raise KeyError("user's own")
    with engine.checkpoint(str(tmp_path / "step3"), "step3"):
        engine.save({"w": torch.ones(8)}, str(tmp_path / "step3" / "a.pt"))
    engine.wait(persist=True)
    assert (tmp_path / "latest").read_text() == "step3"
    assert not (tmp_path / "step2" / "a.pt").exists()
    assert manifest.read_commit(str(tmp_path / "step2")) is None


def test_saving_a_tag_again_replaces_it(engine, tmp_path):
    for value in (1.0, 2.0):
        with engine.checkpoint(str(tmp_path / "best"), "best"):
            engine.save({"w": torch.full((100_000,), value)}, str(tmp_path / "best" / f"only{value:.0f}.pt"))
            engine.save({"w": torch.full((100_000,), value)}, str(tmp_path / "best" / "both.pt"))
        engine.wait(persist=True)
    assert float(engine.load(str(tmp_path / "best" / "both.pt"))["w"][0]) == 2.0
    assert sorted(os.listdir(tmp_path / "best")) == [".datastates", "both.pt", "only2.pt"]
    assert verify(str(tmp_path / "best")) == []


def test_a_committed_file_of_another_size_is_refused(engine, tmp_path):
    folder = tmp_path / "step1"
    with engine.checkpoint(str(folder), "step1"):
        engine.save({"w": torch.ones(8)}, str(folder / "a.pt"))
    engine.wait(persist=True)
    with (folder / "a.pt").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CorruptCheckpointError, match="expected by its manifest"):
        engine.load(str(folder / "a.pt"))


def test_a_checkpoint_that_was_never_completed_is_refused(engine, tmp_path):
    folder = tmp_path / "step1"
    (folder / ".datastates" / "run-000001").mkdir(parents=True)
    torch.save({"w": 1}, folder / "a.pt")
    with pytest.raises(CheckpointNotFoundError, match="never completed"):
        engine.load(str(folder / "a.pt"))


def test_load_waits_for_the_save_in_flight(engine, tmp_path):
    path = str(tmp_path / "state.pt")
    engine.save({"w": torch.full((1 << 20,), 5.0)}, path)
    assert float(engine.load(path)["w"].min()) == 5.0


def test_load_does_not_pass_an_older_file_for_one_whose_save_failed(engine, tmp_path):
    path = tmp_path / "d" / "state.pt"
    engine.save({"w": 1}, str(path))
    engine.wait(persist=True)
    os.kill(engine.saver.flusher_pid, signal.SIGSTOP)
    tensor = torch.ones(3 << 20)
    engine.save({"w": tensor}, str(path))
    tensor.add_(1)
    os.kill(engine.saver.flusher_pid, signal.SIGCONT)
    with pytest.raises(DataStatesError, match="w"):
        engine.load(str(path))
    engine.saver.settle(30)
    with pytest.raises(DataStatesError, match="w"):
        engine.load(str(path))  # long settled, and still nobody has been told otherwise
    with pytest.raises(DataStatesError, match="w"):
        engine.wait(persist=True)
    assert engine.load(str(path)) == {"w": 1}


def test_what_changed_too_early_once_is_copied_at_once_from_then_on(engine, tmp_path):
    tensor = torch.ones(3 << 20)
    os.kill(engine.saver.flusher_pid, signal.SIGSTOP)
    engine.save({"weights": tensor}, str(tmp_path / "state.pt"))
    tensor.add_(1)
    os.kill(engine.saver.flusher_pid, signal.SIGCONT)
    with pytest.raises(DataStatesError, match="weights"):
        engine.wait(persist=True)
    engine.save({"weights": tensor}, str(tmp_path / "state.pt"))
    tensor.add_(1)
    engine.wait(persist=True)
    assert float(engine.load(str(tmp_path / "state.pt"))["weights"].max()) == 2.0


def test_a_state_that_cannot_be_saved_takes_nothing_of_the_budget(engine, tmp_path):
    for suffix in ("pt", "safetensors"):
        with pytest.raises(StateError):
            engine.save({"a": torch.ones(1000), "lock": threading.Lock()}, str(tmp_path / f"state.{suffix}"))
    assert "(0 of" in repr(engine.saver._budget)


def test_a_path_twice_in_one_checkpoint_takes_nothing_of_the_budget(engine, tmp_path):
    state = {"a": torch.ones(1000)}
    with pytest.raises(ValueError, match="before"), engine.checkpoint(str(tmp_path / "x"), "x"):
        engine.save(state, str(tmp_path / "x" / "a.pt"))
        engine.save(state, str(tmp_path / "x" / "a.pt"))
    engine.saver.wait_staged(30)
    assert "(0 of" in repr(engine.saver._budget)


def test_checkpoints_cannot_be_nested_and_are_per_thread(engine, tmp_path):
    with engine.checkpoint(str(tmp_path / "a"), "a"):
        with pytest.raises(ValueError, match="nested"), engine.checkpoint(str(tmp_path / "b"), "b"):
            pass
        other = threading.Thread(target=lambda: engine.save({"n": 1}, str(tmp_path / "lone.pt")))
        other.start()
        other.join(30)
        engine.save({"n": 2}, str(tmp_path / "a" / "file.pt"))
    engine.wait(persist=True)
    assert sorted(manifest.committed_files(str(tmp_path / "a"))) == ["file.pt"]
    assert (tmp_path / "lone.pt").exists()


def test_a_failed_checkpoint_is_told_at_the_next_one(engine, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with engine.checkpoint(str(tmp_path / "file" / "a"), "a"):
        engine.save({"n": 1}, str(tmp_path / "file" / "a" / "x.pt"))
    engine.saver.settle(30)
    with pytest.raises(DataStatesError), engine.checkpoint(str(tmp_path / "b"), "b"):
        pytest.fail("the body must not run")


def test_failing_to_start_leaves_nothing_behind(monkeypatch):
    hooks = len(optimizer._global_optimizer_pre_hooks)
    monkeypatch.setattr("datastates.machinery.Fence", lambda *_: (_ for _ in ()).throw(RuntimeError("no fence")))
    with pytest.raises(RuntimeError, match="no fence"):
        CheckpointEngine(SMALL, rank=0)
    assert len(optimizer._global_optimizer_pre_hooks) == hooks


def test_closing_is_bounded_when_the_flusher_stands_still(tmp_path):
    engine = CheckpointEngine({**SMALL, "close_timeout_seconds": 0.3}, rank=0)
    pid = engine.saver.flusher_pid
    os.kill(pid, signal.SIGSTOP)
    engine.save({"w": torch.ones(3 << 20)}, str(tmp_path / "state.pt"))
    with pytest.raises(WaitTimeoutError):
        engine.close()
    os.kill(pid, signal.SIGKILL)


def test_waiting_is_bounded_when_the_flusher_stands_still(engine, tmp_path):
    pid = engine.saver.flusher_pid
    os.kill(pid, signal.SIGSTOP)
    engine.save({"w": torch.ones(8)}, str(tmp_path / "state.pt"))
    with pytest.raises(WaitTimeoutError, match="not committed"):
        engine.wait(persist=True, timeout=0.1)
    os.kill(pid, signal.SIGCONT)
    engine.wait(persist=True)


def test_load_reads_what_torch_saved(engine, tmp_path):
    torch.save({"w": torch.ones(3), "n": 1}, tmp_path / "foreign.pt")
    found = engine.load(str(tmp_path / "foreign.pt"), map_location=lambda storage, location: storage)
    assert torch.equal(found["w"], torch.ones(3))


def test_close_is_idempotent_and_final(tmp_path):
    engine = CheckpointEngine({"datastates_ckpt": SMALL}, rank=0)
    engine.save({"w": torch.ones(100_000)}, str(tmp_path / "state.pt"))
    engine.close()
    engine.close()
    assert os.listdir(tmp_path) == ["state.pt"]
    with pytest.raises(ClosedError, match="closed"):
        engine.save({}, str(tmp_path / "late.pt"))
    assert engine.wait(persist=True) is True
    assert float(engine.load(str(tmp_path / "state.pt"))["w"].sum()) == 100_000


@pytest.mark.parametrize("config", [None, {}, {"host_cache_size": "1"}, {"datastates_ckpt": {"host_cash_size": 1}}])
def test_wrong_settings_leave_nothing_behind(config):
    with pytest.raises(ConfigError, match="host_cache_size"):
        CheckpointEngine(config, rank=0)


def test_a_forked_child_is_refused_and_harms_nothing(engine, tmp_path):
    pid = os.fork()
    if pid == 0:
        try:
            engine.save({}, str(tmp_path / "child.pt"))
        except ClosedError:
            parameter = torch.nn.Parameter(torch.ones(2))
            parameter.grad = torch.ones(2)
            torch.optim.SGD([parameter], lr=0.1).step()
            engine.close()
            os._exit(17)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
    engine.save({"w": torch.ones(8)}, str(tmp_path / "parent.pt"))
    engine.wait(persist=True)
    assert os.listdir(tmp_path) == ["parent.pt"]


SCRIPT_HEAD = """
import os, signal, sys, torch
from datastates import CheckpointEngine
engine = CheckpointEngine({"host_cache_size": 2**-8}, rank=0)
state = {"w": torch.arange(4 << 20, dtype=torch.float32)}
"""


def test_the_end_of_the_script_finishes_the_saves_in_flight(run_script, tmp_path):
    run_script(SCRIPT_HEAD + "engine.save(state, 'state.pt')")
    assert float(torch.load(tmp_path / "state.pt")["w"][-1]) == (4 << 20) - 1


def test_an_uncaught_exception_finishes_the_saves_in_flight(run_script, tmp_path):
    done = run_script(SCRIPT_HEAD + "engine.save(state, 'state.pt')\nraise KeyError('training broke')", expect=1)
    assert "training broke" in done.stderr
    assert float(torch.load(tmp_path / "state.pt")["w"][-1]) == (4 << 20) - 1


def test_a_lost_last_save_is_told_on_stderr(run_script, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = run_script(SCRIPT_HEAD + "engine.save(state, 'file/state.pt')")
    assert "file/state.pt" in done.stderr


def test_memory_stays_within_the_cache_for_a_state_of_ten_times_its_size(run_script):
    code = """
import os, torch
from datastates import CheckpointEngine

def status(pid):
    with open(f"/proc/{pid}/status") as lines:
        return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("Vm", "Rss"))}

cache = 32 << 20
state = {str(n): torch.full((4 << 20,), float(n)) for n in range(20)}  # 320 MiB
engine = CheckpointEngine({"host_cache_size": cache / 2**30}, rank=0)
engine.save({"w": torch.ones(1)}, "warm.pt")
engine.wait(persist=True)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status(os.getpid())
anonymous = before["RssAnon"] + before["RssFile"]
engine.save(state, "state.pt")
engine.wait(persist=True)
flusher = status(engine.saver.flusher_pid)
trainer = status(os.getpid())["VmHWM"] - anonymous  # the shared pages that it maps are in the high-water mark
extra = max(trainer, cache >> 10) + flusher["VmHWM"] - flusher["RssShmem"]
print(extra >> 10, "MiB")
assert extra <= (cache + (64 << 20)) >> 10, extra
engine.close()
"""
    assert "MiB" in run_script(code).stdout


def test_events_are_written_for_machines(tmp_path):
    engine = CheckpointEngine({**SMALL, "events_dir": str(tmp_path / "events")}, rank=3)
    engine.save({"w": torch.ones(100_000)}, str(tmp_path / "state.pt"))
    engine.close()
    lines = Path(tmp_path / "events" / "events-rank00003.jsonl").read_text().splitlines()
    names = [json.loads(line)["event"] for line in lines]
    assert {"save", "stage", "staged", "flush", "durable", "committed"} <= set(names)


def test_closing_at_once_starts_no_second_flusher_and_logs_nothing(caplog):
    for _ in range(3):
        with CheckpointEngine({"host_cache_size": 1}, rank=0):
            pass
    assert caplog.records == []


def test_leaving_the_block_makes_everything_durable(tmp_path):
    with CheckpointEngine(SMALL, rank=0) as engine:
        engine.save({"w": torch.ones(100_000)}, str(tmp_path / "state.pt"))
    assert os.listdir(tmp_path) == ["state.pt"]


@pytest.mark.parametrize("name", ["nul\0.pt", "lone\ud800.pt"])
def test_a_name_that_cannot_be_one_harms_no_other_save(engine, tmp_path, name):
    pid = engine.saver.flusher_pid
    engine.save({"w": torch.ones(1 << 20)}, str(tmp_path / "good.pt"))
    with pytest.raises(ValueError, match="cannot be a path"):
        engine.save({"n": 1}, str(tmp_path / name))
    engine.wait(persist=True)
    assert os.listdir(tmp_path) == ["good.pt"]
    assert engine.saver.flusher_pid == pid


@pytest.mark.parametrize("tag", [5, Path("x"), "", None])
def test_a_tag_that_is_no_text_is_refused_at_once(engine, tmp_path, tag):
    with pytest.raises(ValueError, match="tag is"), engine.checkpoint(str(tmp_path / "x"), tag):
        pytest.fail("the body must not run")


def test_what_is_no_file_is_never_replaced(engine, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(StorageError, match="no regular file"):
            engine.save({"n": 1}, str(tmp_path / name))
    engine.wait(persist=True)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_one_folder_under_two_names_is_one_folder(engine, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    engine.save({"n": 1}, str(tmp_path / "real" / "state.pt"))
    engine.wait(persist=True)
    os.kill(engine.saver.flusher_pid, signal.SIGSTOP)
    engine.save({"n": 2}, str(tmp_path / "real" / "state.pt"))
    engine.save({"n": 3}, str(tmp_path / "link" / "state.pt"))
    os.kill(engine.saver.flusher_pid, signal.SIGCONT)
    assert engine.load(str(tmp_path / "link" / "state.pt"))["n"] == 3


def test_a_storage_that_is_freed_too_early_loses_the_save_and_not_the_process(engine, tmp_path):
    tensor = torch.ones(3 << 20)
    os.kill(engine.saver.flusher_pid, signal.SIGSTOP)
    engine.save({"filler": torch.ones(1 << 20), "freed": tensor}, str(tmp_path / "state.pt"))
    tensor.untyped_storage().resize_(0)
    os.kill(engine.saver.flusher_pid, signal.SIGCONT)
    with pytest.raises(DataStatesError, match="freed"):
        engine.wait(persist=True)


class Buffer(bytearray):
    """Memory of a tensor that a weak reference can watch."""


def test_the_state_is_let_go_without_a_garbage_collection(engine, tmp_path):
    gc.disable()
    try:
        for suffix in ("pt", "safetensors"):
            buffer = Buffer(1 << 20)
            is_alive = weakref.ref(buffer)
            tensor = torch.frombuffer(buffer, dtype=torch.float32)
            engine.save({"w": tensor, "view": tensor[:10]}, str(tmp_path / f"state.{suffix}"))
            engine.wait(persist=True)
            del tensor, buffer
            assert is_alive() is None
    finally:
        gc.enable()


def test_objects_of_saves_that_wait_do_not_pile_up_in_memory(tmp_path):
    engine = CheckpointEngine({**SMALL, "eager_budget_bytes": 1_500_000}, rank=0)
    flusher = engine.saver.flusher_pid
    os.kill(flusher, signal.SIGSTOP)
    engine.save({"w": torch.ones(3 << 20)}, str(tmp_path / "large.pt"))
    engine.save({"blob": b"x" * (1 << 20)}, str(tmp_path / "0.pt"))
    saved = threading.Event()
    saver = threading.Thread(
        target=lambda: (engine.save({"blob": b"y" * (1 << 20)}, str(tmp_path / "1.pt")), saved.set())
    )
    saver.start()
    saver.join(0.2)
    assert not saved.is_set()
    os.kill(flusher, signal.SIGCONT)
    saver.join(30)
    engine.close()
    assert torch.load(tmp_path / "1.pt")["blob"] == b"y" * (1 << 20)


def test_a_child_of_multiprocessing_finishes_its_saves(run_script, tmp_path):
    code = """
import multiprocessing, torch

def child():
    from datastates import CheckpointEngine
    engine = CheckpointEngine({"host_cache_size": 2**-8}, rank=0)
    engine.save({"w": torch.ones(3 << 20)}, "child.pt")

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    run_script(code)
    assert float(torch.load(tmp_path / "child.pt")["w"].sum()) == 3 << 20
