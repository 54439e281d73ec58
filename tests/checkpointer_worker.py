"""What ranks of jobs do that save through `Checkpointer`; `test_checkpointer_ranks` starts them."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it at its first step: once for all that are forked
from torch import distributed

from datastates import Checkpointer
from datastates.errors import (
    CheckpointNotFoundError,
    CommitError,
    DataStatesError,
    MismatchError,
    StateError,
    TopologyError,
    WaitTimeoutError,
)
from datastates.integrity import verify
from integrations.fork_server import announce

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "plain_pytorch.py"
RANK = 0  # set by each rank
REPLICATED = {"model", "optimizer"}
WIDTH = 128


class Position:
    """A place in the data, another on each rank."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Training:
    """The same model on all ranks, and a place in the data of each one's own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)]
        self.model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.position = Position()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "position": self.position}

    def step(self, value: float) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        self.optimizer.step()
        self.position.value = 100 * RANK + int(value)

    def is_same(self, other: Training) -> bool:
        mine, its = self.optimizer.state_dict(), other.optimizer.state_dict()
        pairs = [(self.model.state_dict(), other.model.state_dict())]
        pairs += [(mine["state"][index], its["state"][index]) for index in its["state"]]
        return mine["param_groups"] == its["param_groups"] and all(
            torch.equal(tensor, found[name]) for found, expected in pairs for name, tensor in expected.items()
        )


class Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        logging.getLogger("datastates").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


LOG = Log()


def make(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(
        folder,
        **{"host_cache_gb": 2**-7, "pin_host_cache": False, "commit_timeout_seconds": 30.0, **options},
    )


def raised(kind: type[BaseException], call: Any, *arguments: Any, **options: Any) -> str:
    """The message of the exception that a call must raise."""
    try:
        call(*arguments, **options)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def is_written_once_and_comes_back_everywhere(folder: Path, pair: Any, alone: Any) -> None:
    with make(folder, replicated=REPLICATED, keep_last=2) as checkpointer:
        training = Training()
        for step in (1, 2, 3):
            training.step(step)
            checkpointer.save(step, training.state, metrics={"loss": 1.0 / step})
        torch.manual_seed(50 + RANK)
        checkpointer.save(4, training.state)
        expected_draw = torch.rand(1).item()
        checkpointer.wait()
        distributed.barrier()  # rank 0 deletes
        assert checkpointer.steps() == [3, 4], checkpointer.steps()
        assert verify(str(folder / "step4")) == []
        sizes = [(folder / "step4" / f"rank-0000{rank}.pt").stat().st_size for rank in range(3)]
        whole = 3 * 4 * sum(parameter.numel() for parameter in training.model.parameters())
        assert whole < sum(sizes) < 1.3 * whole, (whole, sizes)
        assert max(sizes) < 1.4 * whole / 3, sizes
        other = Training()
        assert checkpointer.resume(other.state) == 4
        assert other.is_same(training)
        assert other.position.value == 100 * RANK + 3
        assert torch.rand(1).item() == expected_draw
        assert checkpointer.metrics(3) == {"loss": 1 / 3}
        loaded = checkpointer.load(3)
        assert list(loaded.state) == ["model", "optimizer", "position"]
        assert list(loaded.state["model"]) == list(training.model.state_dict())

    # another number of ranks: what is replicated comes back, the rest is refused by name
    group = pair if RANK < 2 else alone
    with make(folder, replicated=REPLICATED, group=group) as smaller:
        other = Training()
        shared = {"model": other.model, "optimizer": other.optimizer}
        LOG.text = ""
        assert smaller.resume(shared) == 4
        assert other.is_same(training)
        size = 2 if RANK < 2 else 1
        assert f"was saved by 3 ranks, this job has {size}: the random states are not restored" in LOG.text
        told = raised(TopologyError, smaller.load_latest, {"position": Position()})
        assert f"was saved by 3 ranks, this job has {size}: position cannot be loaded" in told, told
        assert list(smaller.load_latest().state) == ["model", "optimizer"]


def all_fall_back_together(folder: Path) -> None:
    with make(folder, replicated={"model"}) as checkpointer:
        training = Training()
        for step in (1, 2):
            training.step(step)
            checkpointer.save(step, training.state)
        checkpointer.wait()
        distributed.barrier()
        if RANK == 0:
            with open(folder / "step2" / "rank-00002.pt", "r+b") as file:
                file.seek(20_000)
                byte = file.read(1)
                file.seek(20_000)
                file.write(bytes([byte[0] ^ 1]))
        distributed.barrier()
        other = Training()
        found = checkpointer.load_latest(other.state)
        assert found is not None
        assert found.step == 1
        assert other.position.value == 100 * RANK + 1
        assert "rank-00002.pt" in found.skipped["step2"], found.skipped


def what_was_not_the_same_is_not_loaded(folder: Path) -> None:
    with make(folder, replicated=True) as checkpointer:
        state = {"model": {"a": torch.zeros(9), "b": torch.zeros(9)}}
        other = {"model": {**state["model"], "c": torch.zeros(9)}}
        told = raised(StateError, checkpointer.save, 1, other if RANK == 1 else state)
        assert "'model' is declared as replicated, and is not the same on all ranks" in told, told
        assert f"of rank {0 if RANK == 1 else 1} are others than those of rank {RANK}" in told, told
        checkpointer.save(2, state)
        checkpointer.save(3, other if RANK == 1 else state)  # compared at the first save only
        told = raised(MismatchError, checkpointer.load_latest)
        assert "'model' was saved as replicated, and was not the same on all ranks" in told, told
        assert "of rank 1" in told, told
    with make(folder, replicated=True, commit_timeout_seconds=1.0) as checkpointer:
        if RANK == 0:
            told = raised(WaitTimeoutError, checkpointer.save, 4, state)
            assert "ranks 1, 2 have not come within 1 s" in told, told
        distributed.barrier()
    with make(folder, replicated={"modle"}) as checkpointer:
        told = raised(StateError, checkpointer.save, 2, {"model": {"a": torch.zeros(9)}})
        assert "'modle' is declared as replicated, and is not in the state" in told, told


def what_fails_on_one_rank_is_told_on_all_and_the_next_is_saved(folder: Path) -> None:
    checkpointer = make(folder)
    state: dict[str, Any] = {"w": torch.full((3,), float(RANK))}
    checkpointer.save(1, state, block=True)
    distributed.barrier()
    if RANK == 1:
        raised(StateError, checkpointer.save, 2, {"w": lambda: None})
    else:
        error = checkpointer.save(2, state).committed.exception(60)
        assert isinstance(error, CommitError), error
        assert "StateError" in error.ranks[1], error.ranks
    distributed.barrier()
    checkpointer.save(3, state, block=True)
    distributed.barrier()
    assert checkpointer.steps() == [1, 3]
    checkpointer.pin(3)  # all of them at once
    distributed.barrier()
    assert checkpointer.pinned() == [3]
    assert "pinned" in raised(StateError, checkpointer.save, 3, state)
    found = checkpointer.load(3)
    assert found.state["w"][0] == RANK
    assert "step 7" in raised(CheckpointNotFoundError, checkpointer.load, 7)
    checkpointer.close()


def a_late_rank_and_one_that_fails_keep_nobody_from_saving(folder: Path) -> None:
    state = {"model": {"a": torch.zeros(9), "b": torch.zeros(9)}}
    with make(folder, replicated=True, commit_timeout_seconds=1.0) as checkpointer:
        if RANK == 0:
            assert "ranks 1, 2 have not come within 1 s" in raised(WaitTimeoutError, checkpointer.save, 1, state)
        distributed.barrier()
        if RANK > 0:  # they find what rank 0 has told
            checkpointer.save(1, state).committed.exception(60)
        distributed.barrier()
        checkpointer.save(2, state).committed.result(60)
        distributed.barrier()
        assert checkpointer.steps() == [2]
    with make(folder, replicated=True) as checkpointer:
        for step in (3, 4):  # one fails before it says what its structure is
            metrics = {"loss": "none" if RANK == 1 else 1.0}
            if RANK == 1:
                assert "the metric 'loss'" in raised(StateError, checkpointer.save, step, state, metrics=metrics)
            else:
                error = checkpointer.save(step, state, metrics=metrics).committed.exception(20)
                assert isinstance(error, CommitError), error
                assert "'loss'" in error.ranks[1], error.ranks
        distributed.barrier()
        checkpointer.save(5, state, block=True)
        distributed.barrier()
        assert checkpointer.steps() == [2, 5]


def a_load_that_fails_on_one_rank_fails_on_all(folder: Path) -> None:
    class Refusing(Position):
        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError(f"not {state['value']}")

    with make(folder) as checkpointer:
        checkpointer.save(1, {"position": Position()})
        for load in (checkpointer.load_latest, checkpointer.resume):
            target = {"position": Refusing() if RANK == 1 else Position()}
            told = raised(KeyError if RANK == 1 else DataStatesError, load, target)
            assert ("not 0" if RANK == 1 else "has failed on rank 1: KeyError: 'not 0'") in told, told
        assert checkpointer.resume({"position": Position()}) == 1


def different_steps_and_busy_ranks(folder: Path) -> None:
    with make(folder, when_busy="skip") as checkpointer:
        if RANK == 0:
            os.kill(checkpointer._saver.flusher_pid, signal.SIGSTOP)
        checkpointer.save(1, {"w": torch.ones(3)})
        assert checkpointer.save(2, {"w": torch.ones(3)}).nbytes == 0
        if RANK == 0:
            os.kill(checkpointer._saver.flusher_pid, signal.SIGCONT)
        checkpointer.wait()
        handle = checkpointer.save(3 + RANK, {"w": torch.ones(3)})
        assert "the ranks save different checkpoints" in str(handle.committed.exception(30))
        raised(DataStatesError, checkpointer.wait)
        distributed.barrier()
        assert checkpointer.steps() == [1]


def one_signal_ends_all_at_the_same_step(folder: Path) -> None:
    with make(folder) as checkpointer, checkpointer.preemption(check_every=2) as preemption:
        for step in range(1, 100):
            if RANK == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if preemption.requested:
                checkpointer.save(step, {"w": torch.ones(3)})
                break
    with contextlib.closing(make(folder)) as checkpointer:
        assert checkpointer.steps() == [4], checkpointer.steps()
        assert checkpointer.load_latest() is not None
    assert ("received SIGTERM" if RANK == 1 else "another rank has received a signal") in LOG.text, LOG.text


def act_as_one(path: str) -> None:
    """All cases of three ranks, in one job. Groups of them stand for jobs of other sizes."""
    global RANK
    RANK = int(os.environ["RANK"])
    threading.excepthook = lambda args: (sys.__excepthook__(*args[:3]), os._exit(3))
    folder = Path(path)
    distributed.init_process_group("gloo", f"file://{folder}/ranks", rank=RANK, world_size=3)
    pair, alone = distributed.new_group([0, 1]), distributed.new_group([2])
    is_written_once_and_comes_back_everywhere(folder / "shared", pair, alone)
    for case in (
        all_fall_back_together,
        what_was_not_the_same_is_not_loaded,
        what_fails_on_one_rank_is_told_on_all_and_the_next_is_saved,
        a_late_rank_and_one_that_fails_keep_nobody_from_saving,
        a_load_that_fails_on_one_rank_fails_on_all,
        different_steps_and_busy_ranks,
        one_signal_ends_all_at_the_same_step,
    ):
        distributed.barrier()
        case(folder / case.__name__)
        print(f"ok {case.__name__}", flush=True)
    distributed.destroy_process_group()


def example(port: int, *arguments: object) -> None:
    """Run the example as a launcher would."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    spec = importlib.util.spec_from_file_location("plain_pytorch", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = [str(EXAMPLE), *map(str, arguments)]
    module.main()


def end_at_a_signal(path: str) -> None:
    """Train until a signal comes; announces the process id, then what was saved."""
    with make(Path(path), keep_last=2) as checkpointer, checkpointer.preemption() as preemption:
        checkpointer.save(1, {"w": torch.ones(3)}, block=True)
        announce(f"{os.getpid()} {checkpointer._saver.flusher_pid}")
        step = 1
        while not preemption.requested:
            step += 1
            time.sleep(0.001)
        while preemption._num_signals < 3:  # it goes on noticing, and is not ended by them
            time.sleep(0.001)
        announce("enough")
        while not Path(f"{path}-go").exists():  # no signal comes any more: its handler is about to be put back
            time.sleep(0.001)
        checkpointer.save(step, {"w": torch.zeros(3)})
        left = preemption.seconds_left
        assert left is not None
        assert 0 < left < 30
    print(f"saved {step}", LOG.text, sep="\n", flush=True)


def end_too_late(path: str) -> None:
    """The flusher is stopped: nothing can be committed within the grace time."""
    checkpointer = make(Path(path))
    with checkpointer.preemption(grace_seconds=0.5) as preemption:
        checkpointer.save(1, {"w": torch.ones(3)}, block=True)
        flusher = checkpointer._saver.flusher_pid
        os.kill(flusher, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.requested
        checkpointer.save(2, {"w": torch.ones(3)})
        checkpointer.wait_staged()
    raised(WaitTimeoutError, checkpointer.close)
    print(f"flusher {flusher}", LOG.text, sep="\n", flush=True)
