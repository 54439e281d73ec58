"""What is saved is the state at the moment of the save, whatever changes it, as far as a fence stands in between."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path

import pytest
import torch

from datastates.checkpoint_engine import CheckpointEngine
from datastates.errors import TornSnapshotError

SETTINGS = {"host_cache_size": 2**-8, "slab_bytes": 1 << 20}
WIDTH = 700  # one weight is 1.9 MiB: half of the cache


@pytest.fixture
def engine():
    made = CheckpointEngine(SETTINGS, rank=0)
    yield made
    made.close()


class StoppedFlusher:
    """While inside, nothing leaves the host cache: a state larger than it cannot be staged."""

    def __init__(self, engine: CheckpointEngine) -> None:
        self._pid = engine.saver.flusher_pid

    def __enter__(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGCONT)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x.square().mean()


class HandMade:
    """An optimizer that is no ``torch.optim.Optimizer``: no hook sees it."""

    def __init__(self, parameters, engine: CheckpointEngine) -> None:
        self.parameters = list(parameters)
        self.momentum = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.engine = engine

    @torch.no_grad()
    def step(self) -> None:
        self.engine.wait()  # the explicit form of the fence
        for parameter, momentum in zip(self.parameters, self.momentum, strict=True):
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.data -= 0.1 * momentum

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self):
        return {"momentum": self.momentum}


OPTIMIZERS = {
    "adamw foreach": lambda parameters, engine: torch.optim.AdamW(parameters, foreach=True),
    "adamw fused": lambda parameters, engine: torch.optim.AdamW(parameters, fused=True),
    "adamw single": lambda parameters, engine: torch.optim.AdamW(parameters, foreach=False),
    "adamw amsgrad": lambda parameters, engine: torch.optim.AdamW(parameters, amsgrad=True),
    "sgd momentum": lambda parameters, engine: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters, engine: torch.optim.Adagrad(parameters),
    "hand made": HandMade,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_at_once_and_the_file_has_the_state_of_the_save(engine, tmp_path, assert_same_state, name):
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters(), engine)

    def step() -> None:
        model(torch.randn(4, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    saved = []
    for number in range(4):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        saved.append(copy.deepcopy(state))
        engine.save(state, str(tmp_path / f"{number}.pt"))
        step()
    engine.wait(persist=True)
    for number, expected in enumerate(saved):
        assert_same_state(torch.load(tmp_path / f"{number}.pt", weights_only=True), expected)


def test_forward_may_change_batch_norm_before_anything_is_copied(engine, tmp_path):
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with StoppedFlusher(engine):
        engine.save({"filler": torch.zeros(2 << 20), **model.state_dict()}, str(tmp_path / "state.pt"))
        model(torch.randn(4, WIDTH))
        assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])
    engine.wait(persist=True)
    found = torch.load(tmp_path / "state.pt")
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(found[name], before[name])


def test_a_moving_average_that_calls_wait_is_safe(engine, tmp_path):
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    expected = copy.deepcopy(average.state_dict())
    engine.save(average.state_dict(), str(tmp_path / "average.pt"))
    engine.wait()
    for parameter in model.parameters():
        parameter.data.add_(1)
    average.update_parameters(model)
    average.update_parameters(model)
    engine.wait(persist=True)
    found = torch.load(tmp_path / "average.pt")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_tensors_may_be_freed_and_rebound_right_after_the_save(engine, tmp_path):
    state = {str(number): torch.full((1 << 19,), float(number)) for number in range(6)}
    parameter = torch.nn.Parameter(torch.full((1 << 19,), 6.0))
    with StoppedFlusher(engine):
        engine.save({**state, "6": parameter}, str(tmp_path / "state.pt"))
        parameter.data = torch.zeros(1)  # as DeepSpeed's offloading does
        state.clear()
        noise = [torch.full((1 << 19,), -1.0) for _ in range(8)]  # takes the memory again if it was let go
    engine.wait(persist=True)
    found = torch.load(tmp_path / "state.pt")
    assert [float(found[str(number)].detach().min()) for number in range(7)] == list(map(float, range(7)))
    assert len(noise) == 8


@pytest.mark.parametrize("turn", ["first", "known"])
def test_small_tensors_beyond_the_eager_budget_may_change_at_once(tmp_path, turn):
    """There is no room to copy them at once: they are staged first, and the call waits for that."""
    engine = CheckpointEngine({**SETTINGS, "eager_budget_bytes": 1 << 16}, rank=0)
    try:
        state = {"large": torch.ones(1 << 19), "small": [torch.full((256,), float(n)) for n in range(2000)]}
        if turn == "known":
            engine.save(state, str(tmp_path / "before.pt"))
            engine.wait(persist=True)
        engine.save(state, str(tmp_path / "state.pt"))
        torch._foreach_zero_(state["small"])
        engine.wait(persist=True)
    finally:
        engine.close()
    assert engine.saver._budget._taken_bytes == 0
    found = torch.load(tmp_path / "state.pt")
    assert [float(tensor.min()) for tensor in found["small"]] == list(map(float, range(2000)))
    assert torch.equal(found["large"], state["large"])


@pytest.mark.parametrize("turn", ["first", "known"])
def test_a_change_before_the_copy_is_named_among_many(engine, tmp_path, turn):
    state = {str(number): torch.full((1 << 16,), float(number)) for number in range(40)}
    if turn == "known":
        engine.save(state, str(tmp_path / "state.pt"))
        engine.wait(persist=True)
    with StoppedFlusher(engine):
        engine.save(state, str(tmp_path / "state.pt"))
        state["38"].add_(1)
    with pytest.raises(TornSnapshotError, match="38") as caught:
        engine.wait(persist=True)
    assert caught.value.fqns == ("38",)
    engine.close()
    assert sorted(os.listdir(tmp_path)) == (["state.pt"] if turn == "known" else [])


def test_two_saves_of_the_same_tensors_in_flight(engine, tmp_path):
    tensor = torch.arange(3 << 19, dtype=torch.float32)
    with StoppedFlusher(engine):
        engine.save({"w": tensor}, str(tmp_path / "first.pt"))
        engine.save({"w": tensor}, str(tmp_path / "second.pt"))
    engine.wait(persist=True)
    for name in ("first.pt", "second.pt"):
        assert torch.equal(torch.load(tmp_path / name)["w"], tensor)


def test_the_same_path_twice_in_flight_ends_with_the_younger_state(engine, tmp_path):
    with StoppedFlusher(engine):
        for value in (1.0, 2.0, 3.0):
            engine.save({"w": torch.full((1 << 17,), value)}, str(tmp_path / "state.pt"))
    engine.wait(persist=True)
    assert float(torch.load(tmp_path / "state.pt")["w"].min()) == 3.0
    assert os.listdir(tmp_path) == ["state.pt"]


def test_saving_to_the_file_that_the_tensors_are_mapped_from(engine, tmp_path):
    path = tmp_path / "state.pt"
    engine.save({"w": torch.arange(1 << 19)}, str(path))
    engine.wait(persist=True)
    mapped = torch.load(path, mmap=True)
    engine.save({"w": mapped["w"], "more": 1}, str(path))
    engine.wait(persist=True)
    assert torch.equal(mapped["w"], torch.arange(1 << 19))
    assert torch.equal(torch.load(path)["w"], torch.arange(1 << 19))


class TestVerifyStaging:
    @pytest.fixture
    def engine(self):
        made = CheckpointEngine({**SETTINGS, "verify_staging": True}, rank=0)
        yield made
        made.close()

    def test_a_write_that_no_version_counter_sees_is_found_by_name(self, engine, tmp_path):
        state = {"still": torch.ones(1 << 19), "moved": torch.ones(1 << 19)}
        engine.save(state, str(tmp_path / "state.pt"))
        state["moved"].data.add_(1)
        with pytest.raises(TornSnapshotError, match="moved") as caught:
            engine.wait(persist=True)
        assert caught.value.fqns == ("moved",)
        engine.close()
        assert os.listdir(tmp_path) == []

    def test_a_state_at_rest_is_committed_at_the_fence(self, engine, tmp_path):
        parameter = torch.nn.Parameter(torch.ones(1 << 19))
        optimizer = torch.optim.AdamW([parameter], fused=True)
        for number in range(3):
            folder = tmp_path / f"step{number}"
            with engine.checkpoint(str(folder), folder.name):
                engine.save({"w": parameter, "t": parameter.detach().view(2, -1).t()}, str(folder / "state.pt"))
            parameter.grad = torch.ones(1 << 19)
            optimizer.step()
        engine.wait(persist=True)
        assert (tmp_path / "latest").read_text() == "step2"

    def test_a_rank_without_files_needs_no_fence(self, engine, tmp_path):
        with engine.checkpoint(str(tmp_path / "step1"), "step1"):
            pass
        engine.wait(persist=True)
        assert (tmp_path / "latest").read_text() == "step1"


class TestWhenBusy:
    def make(self, policy: str) -> CheckpointEngine:
        return CheckpointEngine({**SETTINGS, "when_busy": policy, "events_dir": str(self.folder)}, rank=0)

    @pytest.fixture(autouse=True)
    def events(self, tmp_path_factory):
        self.folder = tmp_path_factory.mktemp("events")

    def save(self, engine: CheckpointEngine, folder: Path, number: int) -> bool:
        with engine.checkpoint(str(folder / f"step{number}"), f"step{number}"):
            return engine.save({"w": torch.full((1 << 17,), float(number))}, str(folder / f"step{number}" / "state.pt"))

    def committed(self, folder: Path) -> list[str]:
        return sorted(path.parent.parent.name for path in folder.glob("*/.datastates/commit.json"))

    def skipped(self) -> int:
        return (self.folder / "events-rank00000.jsonl").read_text().count('"event": "skipped"')

    def test_queue_keeps_all(self, tmp_path):
        engine = self.make("queue")
        with StoppedFlusher(engine):
            assert [self.save(engine, tmp_path, number) for number in range(4)] == [True] * 4
        engine.close()
        assert self.committed(tmp_path) == [f"step{number}" for number in range(4)]

    def test_skip_makes_no_save_while_one_is_in_flight_and_says_so(self, tmp_path, caplog):
        engine = self.make("skip")
        with StoppedFlusher(engine):
            assert [self.save(engine, tmp_path, number) for number in range(3)] == [True, False, False]
        engine.wait(persist=True)
        assert self.save(engine, tmp_path, 3) is True
        engine.close()
        assert self.committed(tmp_path) == ["step0", "step3"]
        assert sorted(os.listdir(tmp_path)) == ["latest", "step0", "step3"]
        assert self.skipped() == 2
        assert "step1: not saved, 1 earlier saves are in flight" in caplog.text

    def test_replace_drops_what_waits_behind_the_oldest(self, tmp_path, caplog):
        engine = self.make("replace")
        with StoppedFlusher(engine):
            assert [self.save(engine, tmp_path, number) for number in range(5)] == [True] * 5
        engine.close()
        assert self.committed(tmp_path) == ["step0", "step4"]
        assert (tmp_path / "latest").read_text() == "step4"
        assert self.skipped() == 3
        assert "step2: dropped" in caplog.text

    def test_lone_files_are_saves_of_their_own(self, tmp_path):
        engine = self.make("skip")
        with StoppedFlusher(engine):
            assert engine.save({"w": torch.ones(8)}, str(tmp_path / "a.pt")) is True
            assert engine.save({"w": torch.ones(8)}, str(tmp_path / "b.pt")) is False
        engine.close()
        assert os.listdir(tmp_path) == ["a.pt"]
