"""Single things that a DeepSpeed job does with checkpoints, each as a job of its own."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import os
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine import DataStatesCheckpointEngine
from deepspeed.runtime.zero import GatheredParameters
from torch import distributed

from datastates import manifest
from datastates.errors import CheckpointNotFoundError, TopologyError
from integrations.deepspeed_compare import compare_side_files
from integrations.deepspeed_configurations import BF16, CONFIGURATIONS, CPU_OFFLOAD, Configuration, zero
from integrations.deepspeed_models import WIDTH, Net
from integrations.deepspeed_runs import Trainer, compare_files, join, make_engine, save
from integrations.deepspeed_worker import Expected, assert_equal, say


class Phase(enum.Enum):
    WARM = "warm"


def client_state() -> dict[Any, Any]:
    """All sorts of things that a script hands over."""
    return {
        "args": argparse.Namespace(lr=0.1, names=["a", "b"]),
        "rng": torch.get_rng_state(),
        "numpy rng": numpy.random.RandomState(3).get_state(),
        "array": numpy.arange(50_000, dtype=numpy.int16).reshape(200, 250),
        "tensor": torch.full((60, 60), 2.0),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "counter": collections.Counter("abca"),
        "default": collections.OrderedDict([("z", 1), ("a", None)]),
        "phase": Phase.WARM,
        "text.with.dots": "ü\n",
        "bytes": b"\0\1",
        "tuple": (1, 2.5, 3j, float("inf")),
        "nested": {"deep": [{"er": {4: "int key", "4": "text key"}}]},
        "set": {1, 2},
        7: "an int as key",
        (1, 2): "a tuple as key",
    }


def tags_and_client_states(folder: str) -> None:
    """Own tags, ``save_latest=False``, all sorts of client_state, which the script changes right after the save."""
    place, configuration = Path(folder), CONFIGURATIONS["zero1-bf16"]
    join(place)
    engine = make_engine(configuration, place)
    trainer = Trainer(configuration, engine)
    trainer.steps(1)
    given, kept = client_state(), client_state()
    engine.save_checkpoint(str(place), tag="my tag, v1.0", client_state=given)
    for key in ("array", "tensor", "scalar", "rng"):
        given[key].fill(0) if isinstance(given[key], numpy.ndarray) else given[key].fill_(0)
    given["nested"]["deep"].clear()
    given["args"].lr = None
    trainer.steps(1)
    engine.save_checkpoint(str(place), tag=17, save_latest=False)
    trainer.steps(1)
    _, found = engine.load_checkpoint(str(place))
    assert (place / "latest").read_text() == "my tag, v1.0"
    for key, value in kept.items():
        if isinstance(value, numpy.ndarray):
            assert numpy.array_equal(found[key], value), key
        elif key == "numpy rng":
            assert all(numpy.array_equal(a, b) for a, b in zip(found[key], value, strict=True))
        else:
            assert_equal(found[key], value, str(key))
    assert engine.global_steps == 1
    engine.load_checkpoint(str(place), tag="17")
    assert engine.global_steps == 2
    engine.destroy()
    say("tags and client states")


def partial_loads(folder: str) -> None:
    """Weights alone, without the optimizer's files; and into a model that has more."""
    place = Path(folder)
    join(place)
    for stage in (1, 2):
        configuration = Configuration(BF16 | zero(stage))
        directory = place / f"zero{stage}"
        engine = make_engine(configuration, place)
        Trainer(configuration, engine).steps(2)
        weights = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
        engine.save_checkpoint(str(directory), tag="t")
        engine.destroy()
        distributed.barrier()
        if distributed.get_rank() == 0:
            for path in (directory / "t").glob("*optim_states.pt"):
                path.unlink()
        distributed.barrier()
        for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
            resumed = make_engine(configuration, place, seed=8)
            path, _ = resumed.load_checkpoint(str(directory), **options)
            assert path is not None
            assert_equal(dict(resumed.module.state_dict()), weights)
            assert resumed.global_steps == (0 if "load_module_only" in options else 2)
            Trainer(configuration, resumed).steps(1)
            resumed.destroy()
        larger = Configuration(BF16 | zero(stage), make_model=LargerNet)
        resumed = make_engine(larger, place, seed=8)
        resumed.load_checkpoint(str(directory), load_module_strict=False, load_module_only=True)
        found = resumed.module.state_dict()
        assert_equal({name: found[name] for name in weights}, weights)
        resumed.destroy()
    say("partial loads")


class LargerNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, WIDTH)


def adapters(folder: str) -> None:
    """An adapter saved alone takes the room of the adapter, and what is left out is what the new model has."""
    place, configuration = Path(folder), CONFIGURATIONS["adapter-zero2"]
    join(place)
    engine = make_engine(configuration, place)
    Trainer(configuration, engine).steps(2)
    weights = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    for tag, is_excluded in (("full", False), ("alone", True), ("full again", False)):
        engine.save_checkpoint(str(place), tag=tag, exclude_frozen_parameters=is_excluded)
    engine.destroy()
    distributed.barrier()
    nbytes = {path.parent.name: path.stat().st_size for path in place.glob("*/mp_rank_00_model_states.pt")}
    frozen_nbytes = sum(value.nbytes for name, value in weights.items() if name.startswith(("first", "second")))
    assert nbytes["full"] - nbytes["alone"] > 0.95 * frozen_nbytes, nbytes
    assert nbytes["full again"] == nbytes["full"]
    resumed = make_engine(configuration, place, seed=8)
    fresh = {name: value.detach().clone() for name, value in resumed.module.state_dict().items()}
    resumed.load_checkpoint(str(place), tag="alone", load_module_strict=False)
    found = dict(resumed.module.state_dict())
    for name, value in found.items():
        is_saved = name in ("up.weight", "down.weight", "average")
        assert_equal(value, weights[name] if is_saved else fresh[name], name)
    resumed.destroy()
    say("adapters")


def several_engines(folder: str) -> None:
    """Two engines in one process save and train in turns, and each gets its own back."""
    place = Path(folder)
    join(place)
    configurations = [CONFIGURATIONS["zero1-bf16"], CONFIGURATIONS["tied-zero3"]]
    engines = [make_engine(configuration, place, seed=seed) for seed, configuration in enumerate(configurations)]
    trainers = [Trainer(*pair) for pair in zip(configurations, engines, strict=True)]
    for trainer in trainers:
        trainer.steps(2)
    for index, engine in enumerate(engines):
        save(engine, configurations[index], place / str(index), "t")
    losses = [trainer.steps(2) for trainer in trainers]
    engines[0].destroy()
    losses[1] += trainers[1].steps(1)
    engines[1].destroy()
    distributed.barrier()
    for index, configuration in enumerate(configurations):
        compare_files(place / str(index), "t")
        resumed = make_engine(configuration, place, seed=9)
        resumed.load_checkpoint(str(place / str(index)))
        assert Trainer(configuration, resumed).steps(len(losses[index])) == losses[index]
        resumed.destroy()
    say("several engines")


def sixteen_bit_weights(folder: str) -> None:
    """``save_16bit_model`` beside a lazy save in flight, of ZeRO 1, and gathered of ZeRO 3."""
    place = Path(folder)
    join(place)
    for stage in (1, 3):
        settings = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
        configuration = Configuration(BF16 | zero(stage, **settings))
        directory = place / f"zero{stage}"
        engine = make_engine(configuration, place)
        trainer = Trainer(configuration, engine)
        trainer.steps(2)
        save(engine, configuration, directory, "t")
        engine.save_16bit_model(str(directory / "half"))
        with GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
            weights = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
        if distributed.get_rank() == 0:
            assert_equal(dict(torch.load(directory / "half" / "pytorch_model.bin", weights_only=True)), weights)
        trainer.steps(1)
        engine.destroy()
        distributed.barrier()
        compare_files(directory, "t")
    say("16-bit weights")


def files_at_once(folder: str) -> None:
    """With ``wait_on_save`` the files are there when ``save_checkpoint`` returns, on every rank."""
    place, configuration = Path(folder), CONFIGURATIONS["zero2-bf16"]
    join(place)
    engine = make_engine(configuration, place, wait_on_save=True)
    Trainer(configuration, engine).steps(1)
    expected = Expected(engine)
    engine.save_checkpoint(str(place), tag="t")
    expected.stop()
    for path, state in expected.states.items():
        assert_equal(torch.load(path, map_location="cpu", weights_only=False), state, path)
    assert manifest.read_commit(str(place / "t")) is not None
    engine.destroy()
    say("files at once")


def swap_files(folder: str) -> None:
    """Swapped states: the same tag twice, two engines in the process, one of which gets its checkpoint back."""
    place, configuration = Path(folder), CONFIGURATIONS["zero3-nvme"]
    join(place)
    engines = [make_engine(configuration, place, seed=seed) for seed in (1, 2)]
    trainers = [Trainer(configuration, engine) for engine in engines]
    for trainer in trainers:
        trainer.steps(1)
    directory = place / "second engine"
    save(engines[1], configuration, directory, "t")
    for trainer in trainers:
        trainer.steps(1)
    save(engines[1], configuration, directory, "t")
    losses = trainers[1].steps(2)
    for engine in engines:
        engine.destroy()
    distributed.barrier()
    names = set(manifest.committed_files(str(directory / "t")))
    swapped = {name for name in names if name.startswith(f"offloaded_tensors/rank{distributed.get_rank():02d}/")}
    assert len(swapped) > 3, names  # three for each of several sub-groups
    assert f"offloaded_tensors/rank{distributed.get_rank():02d}/exp_avg-0_0.tensor.swp" in swapped, swapped
    compare_files(directory, "t")
    compare_side_files(directory / "t", directory / "expected side files" / "t")
    resumed = make_engine(configuration, place, seed=3)
    resumed.load_checkpoint(str(directory))
    assert Trainer(configuration, resumed).steps(2) == losses
    resumed.destroy()
    refuse_swap_files(configuration, place, directory)
    say("swap files")


def refuse_swap_files(configuration: Configuration, place: Path, directory: Path) -> None:
    """A checkpoint of another offload, of which a file of one rank is missing: each refused on every rank."""
    resident = make_engine(dataclasses.replace(configuration, section=BF16 | zero(3, **CPU_OFFLOAD)), place)
    assert_refused(TopologyError, 'was saved with offload_optimizer.device "nvme"', resident, directory)
    resident.save_checkpoint(str(place / "resident"))
    fresh = make_engine(configuration, place)
    assert_refused(TopologyError, 'was saved without offload_optimizer.device "nvme"', fresh, place / "resident")
    resident.destroy()
    (directory / "t" / "offloaded_tensors" / "rank02").mkdir(exist_ok=True)
    assert_refused(TopologyError, "was saved by 3 ranks, here are 2", fresh, directory)
    distributed.barrier()
    if distributed.get_rank() == 1:
        (directory / "t" / "offloaded_tensors" / "rank01" / "exp_avg-0_0.tensor.swp").unlink()
    assert_refused(CheckpointNotFoundError, "is missing from the checkpoint", fresh, directory)
    fresh.destroy()


def assert_refused(kind: type[Exception], text: str, engine: Any, directory: Path) -> None:
    distributed.barrier()
    try:
        engine.load_checkpoint(str(directory))
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError("it was loaded")


def repaired_adapter(folder: str) -> None:
    """An adapter that has been repaired upstream keeps its methods, and all is as right as with ours."""
    adapter = DataStatesCheckpointEngine

    def get_commit_info(self: Any) -> Any:
        return self.commit_info

    def commit(self: Any, info: Any) -> bool:
        self.ckpt_engine.wait(persist=True)
        self.commit_info = None
        return True

    def cleanup(self: Any) -> None:
        inner, self.ckpt_engine = vars(self).get("ckpt_engine"), None
        if inner is not None:
            inner.wait(persist=True)

    adapter.get_commit_info, adapter.commit, adapter.cleanup = get_commit_info, commit, cleanup
    methods = dict(vars(adapter))
    place, configuration = Path(folder), CONFIGURATIONS["zero1-bf16"]
    join(place)
    engine = make_engine(configuration, place, eager_bytes=0)
    assert dict(vars(adapter)) == methods
    trainer = Trainer(configuration, engine)
    trainer.steps(1)
    save(engine, configuration, place, "t")
    losses = trainer.steps(2)
    assert (place / "latest").read_text() == "t"
    distributed.barrier()
    compare_files(place, "t")
    engine.load_checkpoint(str(place))
    assert trainer.steps(2) == losses
    inner = engine.checkpoint_engine.ckpt_engine
    engine.destroy()
    inner.close()
    say("repaired adapter")


def numeric_names(folder: str) -> None:
    """Layer 1 is not taken for 10 or 11: every stage gets its own layers back."""
    place, configuration = Path(folder), CONFIGURATIONS["pipeline-zero0"]
    join(place)
    engine = make_engine(configuration, place)
    Trainer(configuration, engine).steps(2)
    weights = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    engine.save_checkpoint(str(place), tag="t")
    engine.destroy()
    distributed.barrier()
    names = sorted(os.listdir(place / "t"))
    assert [name for name in names if name.startswith("layer_")] == [
        f"layer_{index:02d}-model_states.pt" for index in range(12)
    ]
    resumed = make_engine(configuration, place, seed=8)
    resumed.load_checkpoint(str(place))
    assert_equal(dict(resumed.module.state_dict()), weights)
    resumed.destroy()
    say("numeric names")
