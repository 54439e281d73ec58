"""Optimizers whose step evaluates a closure: the fence closes behind it, not before."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from datastates.checkpoint_engine import CheckpointEngine

WIDTH = 700  # one weight is 1.9 MiB: half of the cache

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),  # evaluates it several times
}


class Impatient(torch.optim.SGD):
    """Writes to the weights before it evaluates the closure."""

    @torch.no_grad()
    def step(self, closure):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(1)
        return super().step(closure)


@pytest.fixture
def engine():
    made = CheckpointEngine({"host_cache_size": 2**-8, "slab_bytes": 1 << 20}, rank=0)
    yield made
    made.close()


@pytest.fixture
def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))


class Closure:
    """One evaluation of loss and gradients; the flusher stands still until it begins."""

    def __init__(self, model, optimizer, engine) -> None:
        self.model, self.optimizer, self.engine = model, optimizer, engine
        self.was_open: list[bool] = []

    def __call__(self) -> torch.Tensor:
        self.was_open.append(self.engine.fence.is_open)
        os.kill(self.engine.saver.flusher_pid, signal.SIGCONT)
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(1, WIDTH)).square().mean()
        loss.backward()
        return loss


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("by_name", [False, True])
def test_training_goes_on_while_the_closure_is_evaluated(engine, model, tmp_path, name, by_name):
    """The state is larger than the host cache, and nothing leaves it: a fence before the closure would never open."""
    optimizer = OPTIMIZERS[name](model.parameters())
    closure = Closure(model, optimizer, engine)
    optimizer.step(closure)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    os.kill(engine.saver.flusher_pid, signal.SIGSTOP)
    engine.save(model.state_dict(), str(tmp_path / "model.pt"))
    closure.was_open.clear()
    optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert closure.was_open[0]
    assert not any(closure.was_open[1:])
    assert not engine.fence.is_open
    engine.wait(persist=True)
    found = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not torch.equal(model.state_dict()["0.weight"], expected["0.weight"])


def clipping(parameters):
    """An optimizer of torch with a hook that writes to the weights before the step begins."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    @torch.no_grad()
    def clip(*_: object) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.clamp_(-0.01, 0.01)

    optimizer.register_step_pre_hook(clip)
    return optimizer


@pytest.mark.parametrize("make", [lambda parameters: Impatient(parameters, lr=0.1), clipping], ids=["own", "hooked"])
def test_an_optimizer_that_may_write_before_the_closure_is_not_trusted(engine, model, tmp_path, make):
    optimizer = make(model.parameters())
    closure = Closure(model, optimizer, engine)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    engine.save(model.state_dict(), str(tmp_path / "model.pt"))
    optimizer.step(closure)
    assert closure.was_open == [False]
    engine.wait(persist=True)
    found = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
