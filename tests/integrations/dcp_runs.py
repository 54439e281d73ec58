"""What the ranks of `test_dcp_ranks` do; each function is the life of one rank."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from datastates.config import CheckpointConfig
from datastates.errors import DataStatesError
from datastates.integrations.dcp import DataStatesReader, DataStatesWriter, newest_checkpoint
from integrations.fork_server import announce, job_number

WIDTH = 302  # 2 × 151: tensor parallelism needs halves, and nothing else divides it
SETTINGS = {"host_cache_bytes": 4 << 20, "slab_bytes": 1 << 20, "eager_bytes": 2048, "commit_timeout_seconds": 20.0}


class Model(nn.Module):
    """A block whose halves tensor parallelism splits, and buffers that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, WIDTH)
        self.down = nn.Linear(WIDTH, 64)
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.num_passes += 1
        self.mean.mul_(0.9).add_(batch.mean(0), alpha=0.1)
        return self.down(torch.relu(self.up(batch))).clone()  # FSDP warns of views


class Position:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "seen": list(range(self.step)), "nested": {"tuple": (self.step, "x")}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == list(range(state["step"])), state
        assert state["nested"] == {"tuple": (state["step"], "x")}, state
        self.step = state["step"]


def join(folder: Path) -> distributed.ProcessGroup:
    """The process group of training; gives another one, for saves in the background."""
    warnings.simplefilter("error")
    logging.basicConfig(level=logging.INFO)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{folder}/rendezvous-{job_number()}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    return distributed.new_group(backend="gloo")


def make(num_tensor_parallel: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, DeviceMesh]:
    torch.manual_seed(1)
    model = Model()
    size = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size // num_tensor_parallel, num_tensor_parallel), mesh_dim_names=("dp", "tp"))
    if num_tensor_parallel > 1:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), mesh


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(100 + step)
    loss = model(torch.randn(4, 64)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, position: Position, **options: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": weights, "optimizer": moments, "position": position, "note": {"lr": 0.01, "none": None}}


def gathered(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of all tensors as wholes, on every rank."""
    found: dict[str, torch.Tensor] = {}

    def walk(prefix: str, node: Any) -> None:
        if isinstance(node, DTensor):
            found[prefix] = node.full_tensor().detach().clone()
        elif isinstance(node, torch.Tensor):
            found[prefix] = node.detach().clone()
        elif isinstance(node, dict):
            for key, child in node.items():
                walk(f"{prefix}.{key}", child)

    walk("", {key: state[key] for key in ("model", "optimizer")})
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert len(expected) > 10


def resumed(
    folder: Path, num_tensor_parallel: int, reader: Callable[[str], Any]
) -> tuple[dict[str, torch.Tensor], Any]:
    """A fresh job of these ranks loads the newest checkpoint."""
    model, optimizer, _ = make(num_tensor_parallel)
    position = Position()
    newest = newest_checkpoint(folder)
    assert newest is not None
    state = state_of(model, optimizer, position)
    used = reader(newest)
    dcp.load(state, storage_reader=used)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = gathered(state_of(model, optimizer, position))
    assert_equal(found, torch.load(f"{newest}.reference"))
    assert position.step == int(Path(newest).name.removeprefix("step")), (position.step, newest)
    assert state["note"] == {"lr": 0.01, "none": None}
    train(model, optimizer, position.step)
    return found, used


def keep_reference(folder: Path, step: int, state: dict[str, Any]) -> None:
    whole = gathered(state)
    if distributed.get_rank() == 0:
        torch.save(whole, folder / f"step{step}.reference")


def writer_of(group: distributed.ProcessGroup, **options: Any) -> DataStatesWriter:
    return DataStatesWriter(config=CheckpointConfig(**SETTINGS), process_group=group, **options)


# ------------------------------------------------------------------------------------------- lives


def saves_while_training(folder_name: str, num_tensor_parallel: int) -> None:
    """Save lazily, step at once, many times; the last save is killed in the middle of training."""
    folder = Path(folder_name)
    group = join(folder)
    model, optimizer, _ = make(num_tensor_parallel)
    position, writer = Position(), writer_of(group)
    future: Future[Any] | None = None
    for step in range(1, 4):
        train(model, optimizer, step)
        position.step = step
        state = state_of(model, optimizer, position, cpu_offload=step == 2)
        keep_reference(folder, step, state)
        if future is not None:
            future.result()
        planner = DefaultSavePlanner(enable_plan_caching=True)  # whose later plans are those of the first save
        where = str(folder / f"step{step}")
        future = dcp.async_save(state, checkpoint_id=where, storage_writer=writer, process_group=group, planner=planner)
        del state
        position.step = 99
        train(model, optimizer, 50 + step)
    writer.wait_staged(30)
    distributed.barrier()
    announce("staged")
    threading.Event().wait()  # until it is killed


def loads(folder_name: str, num_tensor_parallel: int) -> None:
    """Load on these ranks, with our reader and with torch's; of a part of the rows only that part is read."""
    folder = Path(folder_name)
    join(folder)
    _, used = resumed(folder, num_tensor_parallel, DataStatesReader)
    resumed(folder, num_tensor_parallel, dcp.FileSystemReader)
    assert used.report.nbytes > used.report.verified_nbytes > 0 or not used.report.unverified, used.report
    distributed.destroy_process_group()


def saves_and_waits(folder_name: str) -> None:
    """``dcp.save`` is committed on every rank when it returns; replicated tensors are stored once, and read in part."""
    folder = Path(folder_name)
    group = join(folder)
    rank = distributed.get_rank()
    writer = writer_of(group)
    same, own = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024), torch.full((1 << 16,), float(rank))
    state = {"same": same, f"own{rank}": own, "objects": {"rank": [rank]}}
    dcp.save(state, checkpoint_id=folder / "plain", storage_writer=writer, process_group=group)
    target = {"same": torch.zeros_like(same), f"own{rank}": torch.zeros_like(own), "objects": {"rank": None}}
    reader = DataStatesReader(folder / "plain")
    dcp.load(target, storage_reader=reader, process_group=group)
    assert torch.equal(target["same"], same) and torch.equal(target[f"own{rank}"], own)
    assert target["objects"]["rank"] in ([0], [1])
    assert reader.report is not None and reader.report.unverified == ()
    stored = sum(path.stat().st_size for path in (folder / "plain").glob("*.distcp"))
    assert stored < same.nbytes + 2 * own.nbytes + (64 << 10), stored
    alone = {"same": same}  # one of the ranks has nothing to write
    where = folder / "alone"
    future = dcp.async_save(alone, checkpoint_id=where, storage_writer=writer, process_group=group)
    writer.saver.fence.close(60)
    same = same.add_(1).clone()
    future.result(60)
    target = {"same": torch.zeros_like(same)}
    dcp.load(target, storage_reader=DataStatesReader(where), process_group=group)
    assert torch.equal(target["same"], same - 1)
    same -= 1
    writer.close()
    position = {f"own{rank + 1}": torch.zeros(1 << 16)}  # of ranks 1 and 2, of which the second was not there
    try:
        dcp.load(position, storage_reader=DataStatesReader(folder / "plain"), process_group=group)
    except CheckpointException as error:
        assert "own2" in str(error.failures[1][0]), error
    else:
        raise AssertionError("a rank has got a state of nobody")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as it is meant to be
        with DataStatesWriter(config=CheckpointConfig(**SETTINGS), no_dist=True) as own_writer:
            where = folder / f"of{rank}" / "x"
            dcp.async_save({"w": own}, checkpoint_id=where, storage_writer=own_writer, no_dist=True).result(60)
        alone = {"w": torch.zeros_like(own)}
        dcp.load(alone, storage_reader=DataStatesReader(where), no_dist=True)
        assert torch.equal(alone["w"], own)
    mesh = init_device_mesh("cpu", (2,))
    for dim, limit in ((0, same.nbytes // 2 + 4096), (1, same.nbytes)):
        part = distribute_tensor(torch.zeros_like(same), mesh, [Shard(dim)])
        reader = DataStatesReader(folder / "plain")
        dcp.load({"same": part}, storage_reader=reader, process_group=group)
        assert torch.equal(part.to_local(), same.chunk(2, dim)[rank])
        assert reader.report is not None and reader.report.nbytes <= limit, reader.report
        assert reader.report.unverified == ("same",), reader.report
    distributed.destroy_process_group()


def saves_sharded_tensors(folder_name: str) -> None:
    """The sharded state of the first FSDP, whose tensors are no `DTensor`, is saved while the optimizer steps on."""
    folder = Path(folder_name)
    group = join(folder)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and in use
        model = FullyShardedDataParallel(Model(), use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        FullyShardedDataParallel.set_state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(_use_dtensor=False),
            ShardedOptimStateDictConfig(_use_dtensor=False),
        )
        train(model, optimizer, 1)
        weights = model.state_dict()
        expected = {name: [tensor.clone() for tensor in shards_of(value)] for name, value in weights.items()}
        assert sum(isinstance(value, ShardedTensor) for value in weights.values()) == 4
        with writer_of(group) as writer:
            state = {"model": weights, "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
            where = folder / "sharded"
            future = dcp.async_save(state, checkpoint_id=where, storage_writer=writer, process_group=group)
            train(model, optimizer, 2)
            future.result(60)
        for reader in (DataStatesReader(where), dcp.FileSystemReader(where)):
            found = model.state_dict()
            dcp.load({"model": found}, storage_reader=reader, process_group=group)
            for name, shards in expected.items():
                for one, other in zip(shards_of(found[name]), shards, strict=True):
                    assert torch.equal(one, other), name
                    one.zero_()
    distributed.destroy_process_group()


def shards_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What this rank holds of it."""
    return [shard.tensor for shard in tensor.local_shards()] if isinstance(tensor, ShardedTensor) else [tensor]


class FailingPlanner(DefaultSavePlanner):
    """Fails on one rank at one of its calls, else as torch's own."""

    def __init__(self, call: str, rank: int = 1) -> None:
        super().__init__()
        self._call = call
        self._rank = rank

    def create_local_plan(self) -> Any:
        self._fail("create_local_plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan: Any) -> Any:
        self._fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._fail("resolve_data")
        return super().resolve_data(write_item)

    def _fail(self, call: str) -> None:
        if call == self._call and distributed.get_rank() == self._rank:
            raise KeyError("out of luck")


def one_rank_fails(folder_name: str) -> None:
    """Whatever one rank fails at, all futures say so, no step hangs, and the next save under the same name works."""
    folder = Path(folder_name)
    group = join(folder)
    model, optimizer, _ = make()
    writer, position = writer_of(group), Position()
    train(model, optimizer, 1)
    where = str(folder / "again")
    for call in ("create_local_plan", "finish_plan", "resolve_data", "stage"):
        state = state_of(model, optimizer, position)
        planner = FailingPlanner(call)
        if call == "stage" and distributed.get_rank() == 1:
            state["note"]["lock"] = threading.Lock()
        future = dcp.async_save(state, checkpoint_id=where, storage_writer=writer, process_group=group, planner=planner)
        train(model, optimizer, 2)
        error = future.exception(60)
        assert isinstance(error, CheckpointException), error
        assert "lock" in str(error) if call == "stage" else "out of luck" in str(error), error
        assert not (folder / "latest").exists()
    state = state_of(model, optimizer, position)
    expected = gathered(state)
    dcp.async_save(state, checkpoint_id=where, storage_writer=writer, process_group=group).result(60)
    train(model, optimizer, 3)
    writer.close()
    target = state_of(model, optimizer, position)
    dcp.load(target, storage_reader=DataStatesReader(where))
    assert_equal(gathered(target), expected)
    if distributed.get_rank() == 0:
        assert (folder / "latest").read_text() == "again"
    distributed.destroy_process_group()


def one_rank_fails_late(folder_name: str) -> None:
    """What one rank fails at when the others have written their parts is over for all, also before the next save."""
    folder = Path(folder_name)
    group = join(folder)
    state = {"same": torch.ones(1 << 16), f"own{distributed.get_rank()}": torch.ones(1 << 16)}
    config = CheckpointConfig(**{**SETTINGS, "commit_timeout_seconds": 600.0})
    with DataStatesWriter(config=config, process_group=group) as writer:
        dcp.save(state, checkpoint_id=folder / "before", storage_writer=writer, process_group=group)
        for rank in range(distributed.get_world_size()):
            for call in ("finish_plan", "resolve_data"):
                planner = FailingPlanner(call, rank)
                try:
                    dcp.save(
                        state,
                        checkpoint_id=folder / "x",
                        storage_writer=writer,
                        process_group=group,
                        planner=planner,
                    )
                except CheckpointException as error:
                    assert "out of luck" in str(error), error
                else:
                    raise AssertionError("nobody was told")
                writer.settle(120)  # as a load does first
        dcp.load(state, storage_reader=DataStatesReader(folder / "before"), process_group=group)
        dcp.save(state, checkpoint_id=folder / "x", storage_writer=writer, process_group=group)
    assert newest_checkpoint(folder, group) == str(folder / "x")
    distributed.destroy_process_group()


def one_rank_dies(folder_name: str) -> None:
    """Rank 1 never plans, then dies: rank 0 steps on, and is told by the next save and by the future; nothing hangs."""
    folder = Path(folder_name)
    group = join(folder)
    store = distributed.distributed_c10d._get_default_store()
    if distributed.get_rank() == 1:
        writer_of(group)
        store.wait(["told"])
        os.kill(os.getpid(), signal.SIGKILL)
    writer = writer_of(group, planning_seconds=0.5)
    weights = nn.Parameter(torch.ones(1 << 16))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    weights.grad = torch.ones_like(weights)
    future = dcp.async_save({"w": weights}, checkpoint_id=folder / "x", storage_writer=writer, process_group=group)
    optimizer.step()
    assert torch.all(weights != 1.0)
    try:
        writer.stage({"w": weights})
    except DataStatesError as error:
        assert "is not planned yet" in str(error), error
    else:
        raise AssertionError("nobody was told")
    store.set("told", "")
    assert future.exception(60) is not None
    writer.close()
    os._exit(0)  # the process group has lost a rank: it cannot be taken down in order


def runs_the_example(folder_name: str, port: int, *arguments: str) -> None:
    """``examples/fsdp2.py`` as a launcher would start it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    path = Path(__file__).parents[2] / "examples" / "fsdp2.py"
    sys.argv = [str(path), "--save", folder_name, *arguments]
    runpy.run_path(str(path), run_name="__main__")
