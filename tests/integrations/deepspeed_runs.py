"""What the ranks of a job do: train, save lazily, be killed; then resume and compare.

Each rank writes beside the checkpoints what ``torch.save`` would have written at the same moment, and its losses.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import distributed

from datastates.errors import CheckpointNotFoundError
from datastates.integrations import nvme
from integrations import deepspeed_worker
from integrations.deepspeed_configurations import CONFIGURATIONS, Configuration
from integrations.deepspeed_worker import Expected, assert_equal
from integrations.fork_server import announce, job_number

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo needs no compiler
# torch computes in fp16 on any CPU; DeepSpeed asks whether oneDNN does it fast
deepspeed.get_accelerator().is_fp16_supported = lambda: True

NUM_STEPS_BEFORE, NUM_STEPS_AFTER = 2, 3
CLIENT_STATE = {"note": "hello", "numbers": (1, 2.5), 7: "an int as key"}


def join(folder: Path) -> None:
    """Meet the other ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = folder / f"rendezvous-{job_number()}"
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
    deepspeed.init_distributed(auto_mpi_discovery=False)


def make_engine(configuration: Configuration, folder: Path, seed: int = 7, **datastates: Any) -> Any:
    torch.manual_seed(seed)
    model = configuration.make_model()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(isinstance(module, MoE) for module in model.modules()):
        parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    config = configuration.as_dict(folder, **datastates)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    return engine


class Trainer:
    """Trains an engine on batches that depend on the number of the step alone."""

    def __init__(self, configuration: Configuration, engine: Any) -> None:
        self._configuration = configuration
        self._engine = engine

    def batch(self, micro_step: int) -> torch.Tensor:
        seed = 1000 * self._engine.global_steps + 10 * micro_step
        if self._configuration.is_data_parallel:
            seed += distributed.get_rank()
        generator = torch.Generator().manual_seed(seed)
        batch = torch.randn(4, self._configuration.width, generator=generator)
        return batch.to(self._engine.get_data_types()[0])

    def micro_steps(self, numbers: range) -> list[str]:
        losses = []
        for number in numbers:
            loss = self._engine(self.batch(number))
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.item().hex())
        return losses

    def steps(self, count: int, first_micro_step: int = 0) -> list[str]:
        """The losses of that many steps, the first of which may have begun already."""
        losses: list[str] = []
        for _ in range(count):
            if self._configuration.is_pipeline:
                pairs = ((self.batch(n), self.batch(n)) for n in range(self._configuration.num_micro_steps))
                losses.append(self._engine.train_batch(data_iter=pairs).item().hex())
            else:
                losses += self.micro_steps(range(first_micro_step, self._configuration.num_micro_steps))
            first_micro_step = 0
        return losses


def save_and_wait(name: str, folder: str) -> None:
    """Train, save, train on; save again and say so, to be killed."""
    place, configuration = Path(folder), CONFIGURATIONS[name]
    join(place)
    engine = make_engine(configuration, place)
    trainer = Trainer(configuration, engine)
    trainer.steps(NUM_STEPS_BEFORE)
    if configuration.save_after_micro_steps:
        trainer.micro_steps(range(configuration.save_after_micro_steps))
    assert engine.skipped_steps == (NUM_STEPS_BEFORE if configuration.is_overflowing else 0)
    save(engine, configuration, place, "first")
    losses = trainer.steps(NUM_STEPS_AFTER, configuration.save_after_micro_steps)
    assert engine.skipped_steps == (NUM_STEPS_BEFORE + 1 if configuration.is_overflowing else 0)
    (place / f"losses{distributed.get_rank()}.json").write_text(json.dumps(losses))
    save(engine, configuration, place, "second", save_latest=False)
    announce(str(engine.checkpoint_engine.ckpt_engine.saver.flusher_pid))
    threading.Event().wait(120)


def run_worker(function: str, folder: str, *arguments: str) -> None:
    """Run a function of `deepspeed_worker`."""
    join(Path(folder))
    getattr(deepspeed_worker, function)(Path(folder), *arguments)


def start_wrongly(folder: str, section: str) -> None:
    """Make an engine with a section that is wrong."""
    join(Path(folder))
    configuration = CONFIGURATIONS["zero0-fp32"]
    wrong = {**configuration.section, "datastates_ckpt": json.loads(section)}
    make_engine(dataclasses.replace(configuration, section=wrong), Path(folder))


def save(engine: Any, configuration: Configuration, place: Path, tag: str, **arguments: Any) -> None:
    """Save lazily, and with ``torch.save`` what is saved; swap files are copied."""
    expected, swapped = Expected(engine), swap_files(engine, place / "expected side files" / tag)
    large = torch.full((50, 50), 5.0)
    client_state = {**CLIENT_STATE, "tensor": large}
    engine.save_checkpoint(str(place), tag=tag, client_state=client_state, **configuration.save, **arguments)
    large.fill_(-1.0)
    expected.stop()
    expected.write(place / "expected" / tag / f"rank{distributed.get_rank()}")
    for path, data in swapped.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def swap_files(engine: Any, directory: Path) -> dict[Path, bytes]:
    """What this rank's swap files hold now, by their paths in a checkpoint."""
    return {Path(path): Path(source).read_bytes() for source, path in nvme.swap_files(engine, str(directory))}


def resume_and_check(name: str, folder: str) -> None:
    """Go on from ``latest`` as the first job did."""
    place, configuration = Path(folder), CONFIGURATIONS[name]
    join(place)
    engine = make_engine(configuration, place, seed=8 if not configuration.save else 7)
    path, client = engine.load_checkpoint(str(place), **configuration.load)
    assert path is not None
    assert Path(path).parent.name == "first"
    assert all(client[key] == value for key, value in CLIENT_STATE.items())
    assert float(client["tensor"].min()) == 5.0
    losses = Trainer(configuration, engine).steps(NUM_STEPS_AFTER)
    expected = json.loads((place / f"losses{distributed.get_rank()}.json").read_text())
    if configuration.are_losses_resumed:
        assert losses == expected, f"{losses}, expected {expected}"
    check_second(place, engine)
    engine.destroy()


def check_second(place: Path, engine: Any) -> None:
    """The save during which the job was killed is there as a whole, or not at all."""
    paths = sorted((place / "second").glob("*.pt"))
    if paths:
        assert engine.checkpoint_engine.load(str(paths[0])) is not None
    else:
        try:
            engine.load_checkpoint(str(place), tag="second")
        except (CheckpointNotFoundError, AssertionError):  # what DeepSpeed says where there is no such folder
            return
        raise AssertionError("an incomplete checkpoint was loaded")


def compare_files(place: Path, tag: str) -> None:
    """This rank's share of the files against what ``torch.save`` wrote of the same moment, to the last bit."""
    expected = {path.name: path for path in sorted((place / "expected" / tag).glob("*/*"))}
    found = {path.name for path in (place / tag).glob("*.pt")}
    assert found == set(expected), f"{sorted(found)}, expected {sorted(expected)}"
    for path in list(expected.values())[distributed.get_rank() :: distributed.get_world_size()]:
        state = torch.load(path, map_location="cpu", weights_only=False)
        assert_equal(torch.load(place / tag / path.name, map_location="cpu", weights_only=False), state, path.name)
