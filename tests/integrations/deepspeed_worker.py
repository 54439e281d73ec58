"""One rank of a small DeepSpeed job: as a script, the first argument names what it shall do.

Prints ``ok NAME`` for each thing that it has seen to be right; an assertion ends it.
"""

from __future__ import annotations

import copy
import enum
import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import distributed

from datastates.errors import CheckpointNotFoundError
from integrations.fork_server import announce

logging.basicConfig(level=logging.INFO)
WIDTH = 96
MODEL_FILES = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"


class Net(torch.nn.Module):
    """Large enough for lazy tensors, with a large buffer that forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 4 * WIDTH * 2)
        self.second = torch.nn.Linear(4 * WIDTH * 2, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.register_buffer("average", torch.zeros(300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average += 1.0
        return self.norm(self.second(torch.relu(self.first(x)))).square().mean()


def make_engine(stage: int, **section: object) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(7)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": stage > 0},
        "datastates_ckpt": {"host_cache_size": 0.03125, "eager_bytes": 4096, **section},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train(engine: deepspeed.DeepSpeedEngine, num_steps: int) -> list[str]:
    losses = []
    for _ in range(num_steps):
        generator = torch.Generator().manual_seed(100 * engine.global_steps + distributed.get_rank())
        batch = torch.randn(4, WIDTH, generator=generator)
        loss = engine(batch.to(torch.bfloat16) if engine.bfloat16_enabled() else batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    return losses


class Expected:
    """What ``torch.save`` would have stored: a deep copy of each file's state at the moment of its save."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self.states: dict[str, object] = {}
        self._adapter = engine.checkpoint_engine
        self._save = self._adapter.save
        self._adapter.save = self._record  # on the instance: the class stays as the package has repaired it

    def _record(self, state_dict: object, path: str) -> object:
        self.states[path] = copy.deepcopy(without_graph(state_dict))
        return self._save(state_dict, path)

    def stop(self) -> None:
        del self._adapter.save

    def write(self, folder: Path) -> None:
        """Write the states with ``torch.save`` to files of the same names, for others to compare."""
        folder.mkdir(parents=True, exist_ok=True)
        for path, state in self.states.items():
            torch.save(state, folder / Path(path).name)


def without_graph(node: object) -> object:
    """The same state with detached tensors: non-leaf tensors cannot be deep-copied."""
    if isinstance(node, torch.Tensor):
        return node.detach()
    if isinstance(node, dict):
        clone = copy.copy(node)
        clone.clear()
        clone.update({key: without_graph(value) for key, value in node.items()})
        return clone
    if type(node) in (list, tuple):
        return type(node)(without_graph(value) for value in node)
    return node


def assert_equal(found: object, expected: object, where: str = "state") -> int:
    """Compare two states to the last bit; returns how many tensors there were."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        left, right = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found, expected))
        assert torch.equal(left, right), f"{where}: bytes differ"
        return 1
    if isinstance(expected, dict):
        assert list(found) == list(expected), f"{where}: keys differ"
        return sum(assert_equal(found[key], expected[key], f"{where}.{key}") for key in expected)
    if type(expected) in (list, tuple):
        assert len(found) == len(expected), where
        return sum(assert_equal(a, b, f"{where}.{i}") for i, (a, b) in enumerate(zip(found, expected, strict=True)))
    if hasattr(expected, "__dict__") and not isinstance(expected, (type, enum.Enum)):
        assert type(found) is type(expected), where
        return assert_equal(vars(found), vars(expected), where)
    assert found == expected, f"{where}: {found!r} is not {expected!r}"
    return 0


def say(what: str) -> None:
    print(f"ok {what}", flush=True)


def overlap(folder: Path) -> None:
    """Saves in a row, without a step between them, custom tags, save_latest=False, 16-bit weights, and a reload."""
    engine = make_engine(1)
    train(engine, 1)
    engine.save_checkpoint(str(folder), tag="one")
    engine.save_checkpoint(str(folder), tag="two")
    train(engine, 1)
    engine.save_checkpoint(str(folder), tag="three", save_latest=False)
    engine.save_16bit_model(str(folder / "half"))
    if distributed.get_rank() == 0:
        half = torch.load(folder / "half" / "pytorch_model.bin", weights_only=True)
        assert torch.equal(half["first.weight"], engine.module.first.weight)
    say("save_16bit_model is on disk when it returns")
    weight = engine.module.first.weight.detach().clone()
    train(engine, 1)
    path, _ = engine.load_checkpoint(str(folder), tag="three")
    assert path is not None
    assert torch.equal(engine.module.first.weight.detach(), weight)
    assert (folder / "latest").read_text() == "two"
    say("load_checkpoint drains the saves in flight")
    distributed.barrier()
    engine.save_checkpoint(str(folder), tag="two")
    train(engine, 1)
    engine.load_checkpoint(str(folder))
    assert torch.equal(engine.module.first.weight.detach(), weight)
    say("an existing tag is replaced")
    engine.save_checkpoint(str(folder), tag="read at once")
    path = folder / "read at once" / "mp_rank_00_model_states.pt"
    assert torch.equal(torch.load(path, weights_only=False)["module"]["first.weight"], engine.module.first.weight)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), "read at once")
    assert torch.equal(weights["first.weight"].bfloat16(), engine.module.first.weight.detach())
    say("tools of DeepSpeed that run in this process find what is in flight")
    engine.save_checkpoint(str(folder), tag=f"of rank {distributed.get_rank()}")
    engine.save_checkpoint(str(folder), tag="four")
    train(engine, 1)
    other = make_engine(1)
    path, _ = other.load_checkpoint(str(folder))
    assert path is not None
    assert (folder / "latest").read_text() == "four"
    assert torch.equal(other.module.first.weight.detach(), weight)
    assert not list(folder.glob("of rank*/*.pt"))
    say("another engine of the process loads what this one has in flight")
    other.destroy()
    engine.destroy()


def exit_without_destroy(folder: Path) -> None:
    """The script ends with a save in flight."""
    engine = make_engine(1)
    train(engine, 1)
    engine.save_checkpoint(str(folder))
    say("end of script")


def die_staged(folder: Path) -> None:
    """Stopped flushers, a save, everything staged; then the test kills this process and wakes the flushers."""
    engine = make_engine(1)
    train(engine, 1)
    engine.save_checkpoint(str(folder))
    engine.checkpoint_engine.ckpt_engine.wait(persist=True)
    train(engine, 1)
    inner = engine.checkpoint_engine.ckpt_engine
    flusher = inner.saver.flusher_pid
    os.kill(flusher, signal.SIGSTOP)
    expected = Expected(engine)
    engine.save_checkpoint(str(folder))
    expected.write(folder / "expected")
    inner.wait()
    announce(str(flusher))
    threading.Event().wait(120)


def die_unstaged(folder: Path) -> None:
    """A save whose bytes do not fit the host cache, with stopped flushers: it cannot be staged when the job dies."""
    engine = make_engine(1, host_cache_size=0.00390625)
    train(engine, 1)
    engine.save_checkpoint(str(folder))
    inner = engine.checkpoint_engine.ckpt_engine
    inner.wait(persist=True)
    train(engine, 1)
    flusher = inner.saver.flusher_pid
    os.kill(flusher, signal.SIGSTOP)
    state = {"filler": torch.zeros(4 << 20)}
    engine.save_checkpoint(str(folder), client_state={"note": "never"})
    with inner.checkpoint(str(folder / "filler"), "filler"):
        inner.save(state, str(folder / "filler" / f"rank{distributed.get_rank()}.pt"))
    announce(str(flusher))
    threading.Event().wait(120)


def resume(folder: Path, expected_tag: str) -> None:
    engine = make_engine(1)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    assert Path(path).parent.name == expected_tag, path
    say(f"resumed from {expected_tag}")
    train(engine, 1)
    engine.destroy()


def flusher_dies(folder: Path) -> None:
    """The flusher is killed while a save is on its way; training goes on, and the save commits."""
    engine = make_engine(1, host_cache_size=0.00390625)
    train(engine, 1)
    inner = engine.checkpoint_engine.ckpt_engine
    first = inner.saver.flusher_pid
    os.kill(first, signal.SIGSTOP)
    expected = Expected(engine)
    engine.save_checkpoint(str(folder))
    expected.stop()
    os.kill(first, signal.SIGKILL)
    train(engine, 2)
    inner.wait(persist=True, timeout=60)
    assert inner.saver.flusher_pid != first
    for path, state in expected.states.items():
        assert_equal(torch.load(path, map_location="cpu", weights_only=False), state, path)
    distributed.barrier()  # rank 0 writes `latest` after the commit that the others hear of
    assert (folder / "latest").read_text() == "global_step1"
    say("the save committed")
    engine.destroy()


def lose_the_first_tier(folder: Path) -> None:
    """What is not whole in the directory that is loaded from comes from the other tier: by tag, and by ``latest``."""
    run = folder / "near" / "run"
    engine = make_engine(1, tiers=[str(folder / "near"), str(folder / "far")])
    train(engine, 1)
    engine.save_checkpoint(str(run), tag="one")
    train(engine, 1)
    engine.save_checkpoint(str(run), tag="two")
    engine.checkpoint_engine.ckpt_engine.wait_carried(120)
    losses = train(engine, 2)

    def lose(*names: str) -> None:
        distributed.barrier()
        if distributed.get_rank() == 0:
            for name in names:
                shutil.rmtree(run / name)
        distributed.barrier()

    lose("one", "two")
    assert Path(engine.load_checkpoint(str(run))[0]).parent.name == "two"
    assert engine.global_steps == 2 and train(engine, 2) == losses
    say("latest comes from the other tier")
    assert not (run / "one").exists()
    engine.load_checkpoint(str(run), tag="one")
    assert engine.global_steps == 1 and (run / "latest").read_text() == "two"
    say("a tag comes from the other tier")
    lose("")
    engine.load_checkpoint(str(run))
    assert engine.global_steps == 2 and (run / "latest").read_text() == "two"
    say("an empty disk is filled again")
    lose("two")
    distributed.barrier()
    if distributed.get_rank() == 0:
        shutil.rmtree(folder / "far" / "run" / "two")
    distributed.barrier()
    for tag in ("two", "never"):
        try:
            engine.load_checkpoint(str(run), tag=tag)
        except CheckpointNotFoundError as error:
            assert f"{run / tag} is whole in no tier" in str(error) and "far" in str(error), error
            say(f"{tag} is nowhere")
    engine.destroy()


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo needs no compiler
    deepspeed.init_distributed()
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    distributed.destroy_process_group()
