"""What one process does with saved checkpoints: both converters side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param

from datastates.universal import convert_to_universal
from integrations.deepspeed_worker import assert_equal, say
from integrations.elastic_runs import KINDS, join, make_engine, stock_universal, train, write
from integrations.zero_files import Model, write_zero2

RULES: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*norm\.weight"],
    "parameter_to_average_patterns": [r".*average\.weight"],
    "parameter_with_row_parallelism_patterns": [r".*dense\.weight"],
    "vocabulary_parameter_patterns": [r"embedding\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*swiglu\.weight"],
    "pipeline_replicated_parameter_patterns": [r"embedding\.weight"],
    "original_vocab_size": 13,
}


def save_with_weights(folder: str, names: list[str]) -> None:
    """Train and save; rank 0 also writes the fp32 weights as the live engine has them."""
    join(Path(folder))
    for name in names:
        engine = make_engine(KINDS[name])
        train(engine, 3)
        weights = {key: safe_get_full_fp32_param(p) for key, p in engine.module.named_parameters() if p.requires_grad}
        place = Path(folder) / name
        write(engine, place, "first")
        if engine.global_rank == 0:
            torch.save(weights, place / "expected.pt")
        engine.destroy()


def compare_converters(folder: str, names: list[str]) -> None:
    """Ours and DeepSpeed's write the same files, with the same keys and tensors in them."""
    for name in names:
        place = Path(folder) / name
        num_tensors = compare_one(place, "first")
        say(f"{name}: {num_tensors} tensors equal")


def compare_rules(folder: str) -> None:
    """The rules for tensor parallelism and pipelines, on checkpoints made by hand: one and two ranks, two stages."""
    for name, num_tensor, num_pipeline in (("one", 1, 1), ("two", 2, 1), ("stages", 2, 2)):
        place = Path(folder) / name
        for mp in range(num_tensor * num_pipeline):
            write_zero2(
                place / "first",
                model_of(mp % num_tensor, mp // num_tensor),
                3,
                mp=mp,
                universal_checkpoint_info=RULES,
                checkpoint_parallel_dimensions={"pp_degree": num_pipeline, "tp_degree": num_tensor},
                ds_config={},
            )
        say(f"rules {name}: {compare_one(place, 'first')} tensors equal")


def model_of(tensor_rank: int, stage: int) -> Model:
    """A slice of a stage; what is replicated is the same on all tensor-parallel ranks."""
    shapes = {"norm.weight": (7,), "average.weight": (3, 2), "dense.weight": (5, 4), "swiglu.weight": (4, 3)}
    groups: list[dict[str, tuple[int, ...]]] = [
        {"embedding.weight": (8, 3)},
        {f"layers.{stage}.{name}": shape for name, shape in shapes.items()},
        {f"layers.{stage}.plain.bias": (1,)},
    ]
    model = Model(groups, seed=10 * stage + tensor_rank)
    replicated = f"layers.{stage}.norm.weight"
    model.values[replicated] = Model(groups, seed=10 * stage).values[replicated]
    return model


def compare_one(place: Path, tag: str) -> int:
    theirs, ours = stock_universal(place, tag), place / "ours"
    convert_to_universal(place / tag, ours)
    names = sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(ours)) for path in ours.rglob("*") if path.is_file())
    assert (place / "latest_universal").read_text() == "ours"
    num_tensors = 0
    for name in names:
        found, expected = (torch.load(top / name, weights_only=False) for top in (ours, theirs))
        num_tensors += assert_equal(found, expected, name)
    return num_tensors
