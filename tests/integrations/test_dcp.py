"""One process saves and loads through ``torch.distributed.checkpoint``; `test_dcp_ranks` has several."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from datastates.cli.main import main
from datastates.config import CheckpointConfig
from datastates.conversion.distributed_reading import DistributedCheckpoint, load_metadata
from datastates.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DataStatesError,
    ForeignObjectError,
    StateError,
    TornSnapshotError,
    WaitTimeoutError,
)
from datastates.integrations import dcp_reader
from datastates.integrations.dcp import DataStatesReader, DataStatesWriter, newest_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SETTINGS: dict[str, Any] = {"host_cache_bytes": 4 << 20, "slab_bytes": 1 << 20}
LARGE = 1 << 16  # float32 elements of a tensor that is copied lazily: 256 KiB
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
]


@pytest.fixture
def writer() -> Iterator[DataStatesWriter]:
    with DataStatesWriter(config=CheckpointConfig(**SETTINGS)) as writer:
        yield writer


class GatedPlanner(DefaultSavePlanner):
    """Plans only when the gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def create_local_plan(self) -> Any:
        assert self.gate.wait(60)
        return super().create_local_plan()


class Counter:
    """Has a state of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.history = [count]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.history = state["count"], state["history"]


def blank(state: Any) -> Any:
    """A target for a state: tensors of zeros, and None for values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype and found.shape == expected.shape
        one, other = (tensor.detach().resolve_conj().contiguous().view(-1) for tensor in (found, expected))
        if one.numel():
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        assert torch.equal(one, other)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    else:
        assert type(found) is type(expected) and found == expected


def loaded(state: Any, reader: Any) -> Any:
    target = blank(state)
    dcp.load(target, storage_reader=reader)
    return target


def cause(error: BaseException | None) -> BaseException:
    """What one rank has raised, of the exception that DCP makes for all."""
    assert isinstance(error, CheckpointException), error
    return next(iter(error.failures.values()))[0]


def change(state: Any) -> None:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(7)
        elif isinstance(value, dict):
            change(value)


def various() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "dtypes": {str(dtype): torch.arange(-2, 10).to(dtype) for dtype in DTYPES},
        "lazy": {str(dtype): torch.randn(LARGE * 2).to(dtype) for dtype in DTYPES},
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "turned": torch.randn(300, 500).t(),
        "channels": torch.randn(4, 32, 32, 32).to(memory_format=torch.channels_last),
        "slice": torch.randn(1000, 1000)[3:5, ::7],
        "conjugated": torch.randn(LARGE, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.randn(LARGE)),
        "values": {"text": "x", "list": [1, 2.5, None], "tuple": (1, "2"), "bytes": os.urandom(6 << 20)},
    }


# ------------------------------------------------------------------------------------------- formats


def test_files_are_those_of_torch_and_each_reads_the_other(tmp_path, writer):
    state = various()
    dcp.save(state, checkpoint_id=tmp_path / "ours", storage_writer=writer)
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    assert_same(loaded(state, dcp.FileSystemReader(tmp_path / "ours")), state)
    for name in ("ours", "stock"):
        reader = DataStatesReader(tmp_path / name)
        assert_same(loaded(state, reader), state)
        assert reader.report is not None
        left = {"turned", "channels", "conjugated"} if name == "stock" else set()  # torch keeps strides and flags
        assert set(reader.report.unverified) == left
    converted = DistributedCheckpoint(str(tmp_path / "ours"), weights_only=True)
    assert converted.state["values"] == state["values"]


def test_a_target_of_another_dtype_or_layout_is_filled(tmp_path, writer):
    large, small = torch.randn(700, 301), torch.randn(5, 7)
    dcp.save({"large": large, "small": small}, checkpoint_id=tmp_path / "x", storage_writer=writer)
    target = {"large": torch.zeros(301, 700, dtype=torch.float64).t(), "small": torch.zeros(5, 7, dtype=torch.bfloat16)}
    versions = {name: tensor._version for name, tensor in target.items()}
    dcp.load(target, storage_reader=DataStatesReader(tmp_path / "x"))
    assert torch.equal(target["large"], large.double()) and torch.equal(target["small"], small.bfloat16())
    assert all(tensor._version > versions[name] for name, tensor in target.items())


def test_show_list_and_verify(tmp_path, writer, capsys):
    state = {"model": {"w": torch.randn(LARGE)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "step3", storage_writer=writer)
    folder = str(tmp_path / "step3")
    main(["show", folder, "--json"], standalone_mode=False)
    (listing,) = json.loads(capsys.readouterr().out)
    assert [(one["fqn"], one["dtype"], one["shape"]) for one in listing["tensors"]] == [("model.w", "float32", [LARGE])]
    assert [one["fqn"] for one in listing["values"]] == ["step"]
    main(["ls", str(tmp_path)], standalone_mode=False)
    assert "complete" in capsys.readouterr().out
    flip(tmp_path / "step3" / "__0_0.distcp", 100_000)
    main(["verify", folder, "--json"], standalone_mode=False)
    (result,) = json.loads(capsys.readouterr().out)
    assert [problem["fqn"] for problem in result["problems"]] == ["model.w"]


# ------------------------------------------------------------------------------------------- lazy


def test_the_call_copies_nothing_large_and_the_fence_waits_for_the_plan(tmp_path, writer):
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    optimizer = torch.optim.AdamW(model.parameters())
    counter = Counter(1)

    def train() -> None:
        model(torch.randn(8, 300)).square().sum().backward()
        optimizer.step()

    train()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "counter": counter, "lr": [0.1]}
    expected = copy.deepcopy({**state, "counter": counter.state_dict()})
    planner = GatedPlanner()
    future = dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer, planner=planner)
    model(torch.randn(8, 300))  # changes the running means
    counter.history.append(99)
    counter.count = 2
    state["lr"].append(0.2)
    with pytest.raises(WaitTimeoutError):
        writer.saver.fence.close(0.01)
    stepped = threading.Thread(target=train)
    stepped.start()
    planner.gate.set()
    stepped.join(60)
    change(model.state_dict())
    future.result(60)
    restored = Counter(0)
    target = {**blank({key: expected[key] for key in ("model", "optimizer", "lr")}), "counter": restored}
    dcp.load(target, storage_reader=DataStatesReader(tmp_path / "x"))
    assert_same({**target, "counter": restored.state_dict()}, expected)


def test_a_load_waits_for_the_save_in_flight(tmp_path, writer, monkeypatch):
    state = {"w": torch.ones(LARGE), "n": 1}
    planner = GatedPlanner()
    future = dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer, planner=planner)
    settle = writer.settle

    def settled(timeout: float | None = None) -> None:
        planner.gate.set()  # nothing is saved before the load waits
        settle(timeout)

    monkeypatch.setattr(writer, "settle", settled)
    dcp.load(state, storage_reader=DataStatesReader(tmp_path / "x"))
    assert future.done() and torch.all(state["w"] == 1)


def test_saves_follow_one_another(tmp_path, writer):
    weights = torch.zeros(LARGE)
    futures = []
    for step in range(4):
        weights.fill_(step)
        where = tmp_path / f"step{step}"
        futures.append(dcp.async_save({"w": weights, "step": step}, checkpoint_id=where, storage_writer=writer))
        writer.wait_staged(60)
    weights.fill_(9)
    dcp.save({"w": weights, "step": 9}, checkpoint_id=tmp_path / "step9", storage_writer=writer)
    assert all(future.done() for future in futures)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step9")
    for step in (0, 1, 2, 3, 9):
        found = loaded({"w": weights, "step": 0}, DataStatesReader(tmp_path / f"step{step}"))
        assert found["step"] == step and torch.all(found["w"] == step)


def test_the_same_checkpoint_again(tmp_path):
    with DataStatesWriter(tmp_path / "x", config=CheckpointConfig(**SETTINGS)) as writer:
        for value in (1.0, 2.0):
            dcp.save({"w": torch.full((LARGE,), value)}, storage_writer=writer)
            found = loaded({"w": torch.zeros(LARGE)}, DataStatesReader(tmp_path / "x"))
            assert torch.all(found["w"] == value)


def test_what_exceeds_the_budget_and_the_host_cache_is_staged_before_the_call_returns(tmp_path):
    config = CheckpointConfig(**SETTINGS, eager_budget_bytes=8192)
    state = {f"t{n}": torch.full((10_000,), float(n)) for n in range(80)}  # 3.2 MB; two slabs take 2 MiB
    expected = copy.deepcopy(state)
    with DataStatesWriter(config=config) as writer:
        future = dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer)
        change(state)
        future.result(60)
    assert_same(loaded(state, DataStatesReader(tmp_path / "x")), expected)


def test_what_exceeds_them_is_waited_for_also_where_it_was_submitted_before_dcp_asks(tmp_path):
    answers = []

    class Slow(DataStatesWriter):
        @property
        def should_synchronize_after_execute(self) -> bool:
            assert self._background.last().submitted.wait(60)
            answers.append(super().should_synchronize_after_execute)
            return answers[-1]

    config = CheckpointConfig(**SETTINGS, eager_budget_bytes=8192)
    state = {f"t{n}": torch.full((10_000,), float(n)) for n in range(80)}
    expected = copy.deepcopy(state)
    with Slow(config=config) as writer:
        future = dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer)
        change(state)
        future.result(60)
    assert answers == [True]
    assert_same(loaded(state, DataStatesReader(tmp_path / "x")), expected)


def test_many_small_tensors_beyond_the_budget_hold_up_neither_the_call_nor_the_step(tmp_path):
    config = CheckpointConfig(**SETTINGS, eager_budget_bytes=8192)
    state = {f"t{n}": torch.full((512,), float(n)) for n in range(500)}  # 1 MB, of which the host cache takes the rest
    expected, planner = copy.deepcopy(state), GatedPlanner()
    with DataStatesWriter(config=config) as writer:
        future = dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer, planner=planner)
        writer.saver.fence.close(0)  # the ranks have not planned yet
        change(state)
        planner.gate.set()
        future.result(60)
    assert_same(loaded(state, DataStatesReader(tmp_path / "x")), expected)


def test_large_tensors_that_the_caller_names_are_copied_in_the_call(tmp_path):
    state = {"buffer": torch.ones(LARGE), "w": torch.ones(LARGE)}
    config = CheckpointConfig(**SETTINGS)
    with DataStatesWriter(config=config, is_eager=lambda fqn, _: fqn == "buffer") as writer:
        planner = GatedPlanner()
        future = dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer, planner=planner)
        state["buffer"].fill_(2)
        planner.gate.set()
        future.result(60)
    assert torch.all(loaded(state, DataStatesReader(tmp_path / "x"))["buffer"] == 1)


@pytest.mark.parametrize("is_async", [False, True])
def test_verified_staging_commits_without_a_step(tmp_path, is_async):
    config = CheckpointConfig(**SETTINGS, verify_staging=True)
    state = {"w": torch.randn(LARGE)}
    with DataStatesWriter(config=config) as writer:
        if is_async:
            dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer).result(60)
        else:
            dcp.save(state, checkpoint_id=tmp_path / "x", storage_writer=writer)
    assert_same(loaded(state, DataStatesReader(tmp_path / "x")), state)


def test_a_process_that_ends_at_once_has_saved(tmp_path, run_script):
    run_script(
        "import sys, torch, warnings\n"
        "import torch.distributed.checkpoint as dcp\n"
        "from datastates.integrations.dcp import DataStatesWriter\n"
        "warnings.simplefilter('ignore')\n"
        "writer = DataStatesWriter(host_cache_gb=2**-8)\n"
        "dcp.async_save({'w': torch.ones(1 << 20)}, checkpoint_id=sys.argv[1], storage_writer=writer)\n",
        str(tmp_path / "x"),
    )
    assert torch.all(loaded({"w": torch.zeros(1 << 20)}, DataStatesReader(tmp_path / "x"))["w"] == 1)


# ------------------------------------------------------------------------------------------- failures


def test_a_write_before_the_fence_loses_the_save_by_name_and_is_copied_the_next_time(tmp_path, writer):
    state = {"moving": {"average": torch.ones(LARGE)}, "w": torch.ones(LARGE)}
    for where in ("torn", "whole"):
        planner = GatedPlanner()
        future = dcp.async_save(state, checkpoint_id=tmp_path / where, storage_writer=writer, planner=planner)
        state["moving"]["average"].add_(1)
        planner.gate.set()
        if where == "whole":
            future.result(60)
            continue
        error = cause(future.exception(60))
        assert isinstance(error, TornSnapshotError) and error.fqns == ("moving.average",)
        assert not (tmp_path / "latest").exists()
    assert torch.all(loaded(state, DataStatesReader(tmp_path / "whole"))["moving"]["average"] == 2)


def test_training_is_held_up_no_longer_than_the_limit(tmp_path):
    config = CheckpointConfig(**SETTINGS)
    state, planner = {"w": torch.ones(LARGE)}, GatedPlanner()
    with DataStatesWriter(config=config, planning_seconds=0.05) as writer:
        future = dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer, planner=planner)
        writer.saver.fence.close()
        state["w"].fill_(2)
        with pytest.raises(DataStatesError, match="is not planned yet"):
            dcp.async_save(state, checkpoint_id=tmp_path / "y", storage_writer=writer)
        planner.gate.set()
        assert isinstance(cause(future.exception(60)), WaitTimeoutError)
        dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer).result(60)
    assert torch.all(loaded(state, DataStatesReader(tmp_path / "x"))["w"] == 2)


def test_what_cannot_be_saved_is_named_by_the_future(tmp_path, writer):
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    meta = torch.ones(LARGE, device="meta")
    for state, name in (({"a": {"lock": threading.Lock()}}, "a.lock"), ({"m": meta}, "m"), ({"f": freed}, "f")):
        error = cause(dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer).exception(60))
        assert isinstance(error, StateError) and error.fqn == name
    assert not writer.saver.fence.is_open or writer.saver.fence.close(1) is None


def test_what_was_staged_and_never_saved_is_given_up_for_the_next(tmp_path):
    def fails(fqn: str, _: Any) -> bool:
        if fqn == "wrong":
            raise KeyError("out of luck")
        return False

    config = CheckpointConfig(**SETTINGS)
    with DataStatesWriter(config=config, planning_seconds=0.05, is_eager=fails) as writer:
        writer.stage({"w": torch.ones(LARGE)})
        with pytest.raises(KeyError):
            dcp.async_save({"wrong": torch.ones(LARGE)}, checkpoint_id=tmp_path / "x", storage_writer=writer)
        state = {"w": torch.ones(LARGE)}
        dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer).result(60)
    assert_same(loaded(state, DataStatesReader(tmp_path / "x")), state)


def test_a_save_that_dcp_drops_before_it_has_a_thread_holds_up_nobody(tmp_path, writer):
    state = {"w": torch.ones(LARGE)}
    with pytest.raises(ValueError, match="process group"):  # of torch, whose process-based saves need one
        dcp.async_save(
            state,
            checkpoint_id=tmp_path / "x",
            storage_writer=writer,
            async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
        )
    gc.collect()
    writer.saver.fence.close(0)
    dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer).result(60)


def test_a_planner_that_fails_lets_training_go_on(tmp_path, writer):
    class Failing(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            raise KeyError("out of luck")

    state = {"w": torch.ones(LARGE)}
    future = dcp.async_save(state, checkpoint_id=tmp_path / "x", storage_writer=writer, planner=Failing())
    writer.saver.fence.close(60)
    assert isinstance(cause(future.exception(60)), KeyError)
    assert not (tmp_path / "x").exists()


def test_a_full_disk_is_told(tmp_path, writer):
    (tmp_path / "x").write_text("a file in the place of the folder")
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(LARGE)}, checkpoint_id=tmp_path / "x", storage_writer=writer)
    assert isinstance(cause(caught.value), DataStatesError)
    dcp.save({"w": torch.ones(LARGE)}, checkpoint_id=tmp_path / "y", storage_writer=writer)


def test_what_is_not_supported_says_so(tmp_path, writer):
    with pytest.raises(ConfigError, match="use_collectives"):
        dcp.save({"w": 1}, checkpoint_id=tmp_path / "x", storage_writer=writer, use_collectives=False)
    with pytest.raises(CheckpointException, match="no folder for the checkpoint"):
        dcp.save({"w": 1}, storage_writer=writer)
    with pytest.raises(ConfigError, match="when_busy"):
        DataStatesWriter(config=CheckpointConfig(**SETTINGS, when_busy="skip"))
    with pytest.raises(ConfigError, match="format"):
        DataStatesWriter(config=CheckpointConfig(**SETTINGS, format="safetensors"))
    with pytest.raises(ConfigError, match="both"):
        DataStatesWriter(config=CheckpointConfig(**SETTINGS), host_cache_gb=1)
    with pytest.raises(pickle.PicklingError, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(writer.stage({"w": torch.ones(LARGE)}))
    writer.saver.fence.close(60)


def test_a_closed_writer_refuses_and_closing_again_does_nothing(tmp_path):
    writer = DataStatesWriter(config=CheckpointConfig(**SETTINGS))
    writer.close()
    writer.close()
    with pytest.raises(CheckpointException, match="closed"):
        dcp.save({"w": 1}, checkpoint_id=tmp_path / "x", storage_writer=writer)
    with pytest.raises(DataStatesError, match="closed"):
        dcp.async_save({"w": 1}, checkpoint_id=tmp_path / "x", storage_writer=writer)


# ------------------------------------------------------------------------------------------- damage


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.fixture
def saved(tmp_path: Path, writer: DataStatesWriter) -> tuple[Path, dict[str, Any]]:
    state = {"object": {"text": "x" * 1000}, "small": torch.randn(1000), "large": torch.randn(2 * LARGE)}
    dcp.save(state, checkpoint_id=tmp_path / "x", storage_writer=writer)
    return tmp_path / "x", state


@pytest.mark.parametrize("name", ["object.text", "small", "large"])
def test_a_flipped_bit_is_found_by_name(saved, name):
    folder, state = saved
    path = folder / "__0_0.distcp"
    content = b"xxxx" if name == "object.text" else state[name][500:510].numpy().tobytes()
    flip(path, path.read_bytes().index(content))
    with pytest.raises(CheckpointException) as caught:
        loaded(state, DataStatesReader(folder))
    error = cause(caught.value)
    assert isinstance(error, CorruptCheckpointError) and error.fqn == name
    if name != "object.text":
        found = loaded(state, DataStatesReader(folder, check=False))
        assert (found[name] != state[name]).sum() == 1


def test_cut_missing_and_damaged_files(saved):
    folder, state = saved
    data = folder / "__0_0.distcp"
    metadata = (folder / ".metadata").read_bytes()
    flip(folder / ".metadata", 100)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
        DataStatesReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(metadata)
    os.truncate(data, data.stat().st_size - 1)
    with pytest.raises(CheckpointException, match="expected by the checkpoint's record"):
        loaded(state, DataStatesReader(folder))
    data.unlink()
    with pytest.raises(CheckpointException, match="is missing"):
        loaded(state, DataStatesReader(folder))
    with pytest.raises(CheckpointException, match="holds no distributed checkpoint"):
        loaded(state, DataStatesReader(folder.parent))


@pytest.mark.parametrize("moment", ["metadata", "data"])
def test_a_checkpoint_that_is_saved_again_while_it_is_loaded(saved, writer, monkeypatch, moment):
    folder, state = saved
    newer = {**state, "small": torch.full((1000,), 7.0), "large": torch.full((3 * LARGE,), 7.0)}
    reader = DataStatesReader(folder)
    real, again = (load_metadata if moment == "metadata" else DataStatesReader._read_plan), iter([True])

    def save_again(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs) if moment == "metadata" else None
        if next(again, False):
            dcp.save(newer, checkpoint_id=folder, storage_writer=writer)
        return found or real(*args, **kwargs)

    if moment == "metadata":
        monkeypatch.setattr(dcp_reader, "load_metadata", save_again)
        assert_same(loaded(newer, reader), newer)
        return
    monkeypatch.setattr(DataStatesReader, "_read_plan", save_again)
    with pytest.raises(CheckpointException) as caught:
        loaded(state, reader)
    error = cause(caught.value)
    assert isinstance(error, CheckpointNotFoundError) and "saved again" in str(error)
    assert_same(loaded(newer, reader), newer)


def test_a_checkpoint_that_was_never_completed_is_refused(tmp_path, writer):
    dcp.save({"w": 1}, checkpoint_id=tmp_path / "x", storage_writer=writer)
    (tmp_path / "x" / ".datastates" / "commit.json").unlink()
    (tmp_path / "x" / "__0_0.distcp").unlink()  # else the commit could be completed
    with pytest.raises(CheckpointException, match="never completed"):
        loaded({"w": 1}, DataStatesReader(tmp_path / "x"))
    assert newest_checkpoint(tmp_path) is None


def test_metadata_that_run_code_need_trust(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "x")
    path = tmp_path / "x" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    assert isinstance(metadata, Metadata)
    metadata.planner_data = {"w": threading.Event}
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ForeignObjectError, match=r"threading\.Event"):
        DataStatesReader(tmp_path / "x").read_metadata()
    assert DataStatesReader(tmp_path / "x", trust=True).read_metadata().planner_data["w"] is threading.Event
