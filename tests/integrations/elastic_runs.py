"""What the ranks of a job do: save ZeRO checkpoints, and load those that another number of ranks has saved."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import distributed

from datastates import reader
from datastates.conversion import convert_to_torch
from datastates.errors import TopologyError
from datastates.universal import convert_to_universal
from integrations.deepspeed_runs import join
from integrations.deepspeed_worker import assert_equal, say

WIDTH = 33
"""Odd, so that no partition ends where a parameter does."""

NUM_STEPS = 3


class OddNet(torch.nn.Module):
    """Odd sizes, a parameter of one element, a tied and a frozen weight, buffers that forward changes."""

    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, hidden)
        self.second = torch.nn.Linear(hidden, WIDTH)
        self.tied = torch.nn.Linear(hidden, WIDTH, bias=False)
        self.tied.weight = self.second.weight
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.few = torch.nn.Parameter(torch.arange(5.0))
        self.frozen = torch.nn.Parameter(torch.randn(7, 3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(11))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.count += 1
        hidden = torch.relu(self.first(x))
        output = self.norm(self.second(hidden) + self.tied(hidden) + self.frozen.mean()) * self.scale
        return (output + self.few.sum()).square().mean()

    def groups(self) -> list[dict[str, Any]]:
        """Three groups with settings of their own, one of a single element."""
        apart = [self.few, self.first.bias]
        names = {id(parameter) for parameter in (self.scale, *apart)}
        rest = [parameter for parameter in self.parameters() if parameter.requires_grad and id(parameter) not in names]
        return [{"params": rest}, {"params": apart, "lr": 3e-3}, {"params": [self.scale], "weight_decay": 0.0}]


def pipeline() -> PipelineModule:
    layers = [LayerSpec(torch.nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    return PipelineModule(layers, num_stages=2, loss_fn=lambda output, _: output.square().mean())


@dataclass(frozen=True)
class Kind:
    """A kind of engine."""

    zero: dict[str, Any]
    rest: dict[str, Any] = field(default_factory=dict)
    datastates: dict[str, Any] = field(default_factory=dict)
    make_model: Callable[[], Any] = OddNet
    has_groups: bool = True

    @property
    def stage(self) -> int:
        return int(self.zero["stage"])


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 9, "loss_scale_window": 2, "hysteresis": 1}}
SMALL_SUB_GROUPS: dict[str, Any] = {"stage": 3, "sub_group_size": 3000, "stage3_param_persistence_threshold": 10}

KINDS = {
    "zero1": Kind({"stage": 1}, BF16),
    "zero2 fp16": Kind({"stage": 2}, FP16),
    "zero2 offload safetensors": Kind(
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"zero_force_ds_cpu_optimizer": False},
        {"format": "safetensors"},
    ),
    "zero2 elastic_checkpoint": Kind({"stage": 2, "elastic_checkpoint": True}, BF16),
    "zero3": Kind(SMALL_SUB_GROUPS, BF16),
    "zero3 safetensors": Kind(SMALL_SUB_GROUPS, BF16, {"format": "safetensors"}),
    "bf16 optimizer": Kind({"stage": 1}, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "pipeline": Kind({"stage": 1}, BF16, make_model=pipeline, has_groups=False),
}

NOT_FOR_STOCK = ("zero2 elastic_checkpoint", "bf16 optimizer")
"""Kinds that DeepSpeed's own converter fails on: a list of states; a group of fewer elements than ranks."""


def make_engine(kind: Kind, seed: int = 7, model: torch.nn.Module | None = None, **rest: Any) -> Any:
    torch.manual_seed(seed)
    model = kind.make_model() if model is None else model
    parameters = model.groups() if kind.has_groups else list(model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": kind.zero,
        "datastates_ckpt": {"host_cache_size": 0.03125, "eager_bytes": 1024, **kind.datastates},
        **kind.rest,
        **rest,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    return engine


def train(engine: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        generator = torch.Generator().manual_seed(engine.global_steps)
        batch = torch.randn(4, WIDTH, generator=generator).to(engine.get_data_types()[0])
        if isinstance(engine.module, PipelineModule):
            engine.train_batch(data_iter=iter([(batch, batch)]))
        else:
            engine.backward(engine(batch))
            engine.step()


def save(folder: str, names: list[str]) -> None:
    """Train and save one checkpoint of each kind, with a client_state of each rank's own."""
    join(Path(folder))
    for name in names:
        engine = make_engine(KINDS[name])
        train(engine, NUM_STEPS)
        write(engine, Path(folder) / name, "first")
        engine.destroy()
        say(f"saved {name}")


def write(engine: Any, place: Path, tag: str, **options: Any) -> None:
    """Save, and wait until it is committed by all ranks."""
    client_state = {"rank": distributed.get_rank(), "position": 41, "rng": torch.get_rng_state()}
    engine.save_checkpoint(str(place), tag=tag, client_state=client_state, **options)
    engine.checkpoint_engine.ckpt_engine.wait(persist=True)
    distributed.barrier()


def load(folder: str, names: list[str]) -> None:
    """Load each kind on these ranks, save it at once, and compare both checkpoints put together."""
    join(Path(folder))
    for name in names:
        place = Path(folder) / name
        engine = make_engine(KINDS[name], seed=8)
        train(engine, 1)
        with warnings_of("datastates.integrations.resharding") as warnings:
            path, client = engine.load_checkpoint(str(place))
        assert path is not None
        assert client["rank"] == engine.checkpoint_mp_rank  # with data-parallel rank 0 of each stage of a pipeline
        assert client["position"] == 41
        assert engine.global_steps == NUM_STEPS
        has_told = any("differed in rank:" in text for text in warnings)
        assert has_told == (KINDS[name].stage == 3 and distributed.get_rank() == 0 and is_told_of(place)), warnings
        again = f"again{distributed.get_world_size()}"
        write(engine, place, again, save_latest=False)
        if distributed.get_rank() == 0:
            compare(place, "first", again)
        distributed.barrier()
        train(engine, 1)
        steps = {float(state["step"]) for state in engine.optimizer.optimizer.state.values() if "step" in state}
        assert steps == {engine.global_steps - engine.skipped_steps}, "no two groups count on one step"
        engine.destroy()
        say(f"loaded {name} on {distributed.get_world_size()}")


def is_told_of(place: Path) -> bool:
    """More than one rank had a client_state of its own."""
    return len(list((place / "first").glob("zero_pp_rank_*_model_states.pt"))) > 1


@contextlib.contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """The warnings of a logger."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger(name).removeHandler(handler)


def compare(place: Path, *tags: str) -> None:
    """Two checkpoints of any numbers of ranks are one state: put together by DeepSpeed's converter where it can."""
    first, second = (put_together(place, tag) for tag in tags)
    assert first.keys() == second.keys()
    num_tensors = sum(assert_equal(second[name], first[name], name) for name in first)
    assert num_tensors > 20, num_tensors
    models = [model_state(place / tag) for tag in tags]
    for key in ("module", "lr_scheduler", "global_steps", "skipped_steps", "param_shapes", "client"):
        pair = [model.get(key) for model in models]
        if key != "param_shapes" or "zero3" not in place.name:  # sub-groups depend on the number of ranks
            assert_equal(pair[1], pair[0], key)


def put_together(place: Path, tag: str) -> dict[str, Any]:
    """What a universal checkpoint of the tag holds, without what is of rank 0 alone."""
    if place.name in NOT_FOR_STOCK:
        result = place / f"{tag}-universal"
        convert_to_universal(place / tag, result)
    else:
        result = stock_universal(place, tag)
    found = {}
    for path in sorted((result / "zero").rglob("*.pt")):
        name = str(path.relative_to(result))
        found[name] = torch.load(path, weights_only=False)
    common = found.pop("zero/optimizer_state.pt")
    loss_scaler, groups = common.get("loss_scaler"), common.get("param_groups")
    found["loss_scaler"] = vars(loss_scaler) if loss_scaler is not None else None
    found["groups"] = [{key: value for key, value in group.items() if key != "params"} for group in groups or ()]
    found["frozen"] = frozen_of(place / tag)
    return found


def stock_universal(place: Path, tag: str) -> Path:
    """The result of DeepSpeed's own converter."""
    source, result = place / tag, place / f"{tag}-stock"
    if reader.format_of(next(source.glob("*optim_states.pt"))) == "safetensors":
        source = place / f"{tag}-torch"
        convert_to_torch(place / tag, source, trust=True)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    arguments = argparse.Namespace(
        input_folder=str(source), output_folder=str(result), strict=True, inject_missing_state=True, **options
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(arguments)
    return result


def model_state(folder: Path) -> dict[str, Any]:
    path = next(
        path for pattern in ("mp_rank_00_*", "zero_pp_rank_0_mp_rank_00_model*") for path in folder.glob(pattern)
    )
    state: dict[str, Any] = reader.load(path, weights_only=False)
    state["client"] = {key: state[key] for key in ("position",)}
    return state


def frozen_of(folder: Path) -> dict[str, torch.Tensor]:
    """The frozen parameters of ZeRO 3, from the fragments of all ranks."""
    paths = sorted(
        folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt"), key=lambda path: int(path.name.split("_")[3])
    )
    states = [reader.load(path, weights_only=False) for path in paths]
    if not states:
        return {}
    shapes = states[0]["frozen_param_shapes"]
    assert shapes, "the frozen parameter was not saved"
    whole = {
        name: torch.cat([state["frozen_param_fragments"][name].reshape(-1) for state in states]) for name in shapes
    }
    return {name: whole[name][: shape.numel()].reshape(shape) for name, shape in shapes.items()}


def load_parts(folder: str) -> None:
    """What the caller does not want is not loaded: flags and tag hold on another number of ranks, too."""
    join(Path(folder))
    for name in ("zero1", "zero3", "zero3 safetensors"):
        place = Path(folder) / name
        expected = weights_of(place / "first")
        for flags in ({"load_optimizer_states": False}, {"load_module_only": True}):
            engine = make_engine(KINDS[name], seed=8)
            train(engine, 1)
            if "load_optimizer_states" in flags:
                engine.save_checkpoint(str(place), tag="younger")  # `latest` names it now
                engine.checkpoint_engine.ckpt_engine.wait(persist=True)
                distributed.barrier()
            path, _ = engine.load_checkpoint(str(place), tag="first", **flags)
            assert path is not None
            assert engine.global_steps == (1 if "load_module_only" in flags else NUM_STEPS)
            for key, weight in gathered(engine).items():
                assert torch.equal(weight, expected[key].to(weight.dtype)), (name, flags, key)
            write(engine, place, "parts", save_latest=False)
            moments = [state["step"] for state in states_of(place / "parts")]
            assert moments
            assert all(float(step) == 1 for step in moments), "the optimizer was not to be loaded"
            engine.destroy()
        say(f"loaded parts of {name}")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """fp32 weights by name, from DeepSpeed's converter."""
    found = {}
    if distributed.get_rank() == 0:
        stock_universal(folder.parent, folder.name)
    distributed.barrier()
    for path in (folder.parent / f"{folder.name}-stock").glob("zero/*/fp32.pt"):
        value = torch.load(path, weights_only=False)
        found[path.parent.name] = value["param"] if isinstance(value, dict) else value
    frozen = frozen_of(folder)
    return {**found, **frozen}


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            weight = parameter.detach().clone()
        found[name] = weight.reshape(-1) if hasattr(parameter, "ds_id") and parameter.requires_grad else weight
    return found


def states_of(folder: Path) -> list[dict[str, Any]]:
    """The optimizer's states of all groups of data-parallel rank 0."""
    state = reader.load(next(folder.glob("*zero_pp_rank_0_*optim_states.pt")), weights_only=False)[
        "optimizer_state_dict"
    ]
    return list(state.get("optimizer_state_dict", state.get("base_optimizer_state"))["state"].values())


def refuse(folder: str) -> None:
    """What cannot be is refused on every rank, before anything is changed, with what to do about it."""
    place = Path(folder)
    join(place)
    engine = make_engine(KINDS["zero1"], model=OddNet(hidden=4 * WIDTH + 1))
    before = {name: weight.clone() for name, weight in gathered(engine).items()}
    expect_refusal(engine, place / "zero1", "first.weight has shape (132, 33) in it, (133, 33) in the model")
    model = OddNet()
    model.extra = torch.nn.Parameter(torch.ones(2))
    other = make_engine(KINDS["zero3"], model=model)
    expect_refusal(other, place / "zero3", "8 of 9 trained parameters match by name. extra is not in it")
    expect_refusal(engine, place / "pipeline", "datastates convert --to universal")
    expect_refusal(engine, place / "zero3", "with ZeRO 3, not 1: convert it")
    engine.has_moe_layers = True
    expect_refusal(
        engine, place / "zero1", "experts of a mixture of experts are not brought to other ranks; resume it on 2"
    )
    engine.has_moe_layers = False
    engine.optimizer.swap_optimizer = True  # as with NVMe
    expect_refusal(engine, place / "zero1", '"offload_optimizer": {"device": "cpu"}')
    del engine.optimizer.swap_optimizer
    assert all(torch.equal(weight, before[name]) for name, weight in gathered(engine).items())
    for one in (other, engine):
        one.destroy()
    say("refused")


def expect_refusal(engine: Any, place: Path, text: str) -> None:
    try:
        engine.load_checkpoint(str(place), tag="first")
    except TopologyError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{place} was loaded")


def load_universal(folder: str) -> None:
    """DeepSpeed's own loader takes what this package has converted, on another number of ranks."""
    join(Path(folder))
    for name in ("zero1", "zero3"):
        place = Path(folder) / name
        if distributed.get_rank() == 0:
            shutil.rmtree(place / "universal", ignore_errors=True)
            convert_to_universal(place / "plain", place / "universal")
        distributed.barrier()
        engine = make_engine(KINDS[name], model=PlainNet(), checkpoint={"load_universal": True})
        train(engine, 1)
        path, client = engine.load_checkpoint(str(place))
        assert path is not None
        assert client["position"] == 41
        write(engine, place, "again universal", save_latest=False)
        if distributed.get_rank() == 0:
            first, second = (put_together(place, tag) for tag in ("plain", "again universal"))
            for states in (first, second):  # not restored by DeepSpeed's loader
                for key in ("frozen", "zero/seen/fp32.pt", "zero/count/fp32.pt", "zero/frozen/fp32.pt"):
                    states.pop(key, None)
            assert sum(assert_equal(second[key], first[key], key) for key in first) > 20
        distributed.barrier()
        engine.destroy()
        say(f"loaded universal {name}")


class PlainNet(OddNet):
    """In one group: DeepSpeed's loader of universal checkpoints gives all groups the settings of the first."""

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [parameter for parameter in self.parameters() if parameter.requires_grad]}]


def save_plain(folder: str) -> None:
    join(Path(folder))
    for name in ("zero1", "zero3"):
        engine = make_engine(KINDS[name], model=PlainNet())
        train(engine, NUM_STEPS)
        write(engine, Path(folder) / name, "plain", save_latest=False)
        engine.destroy()
