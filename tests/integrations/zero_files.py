"""Checkpoints of ZeRO made by hand, in the layout of DeepSpeed's files, without training anything."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

STATES = ("fp32", "exp_avg", "exp_avg_sq")


@dataclass
class Address:
    """Stands for DeepSpeed's ``fragment_address``."""

    numel: int
    start: int


@dataclass
class Model:
    """Parameters by group, each with the fp32 weight and both moments."""

    groups: list[dict[str, tuple[int, ...]]]
    seed: int = 0
    values: dict[str, dict[str, torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.values = {
            name: {key: torch.randn(shape, generator=generator) for key in STATES}
            for group in self.groups
            for name, shape in group.items()
        }

    def shapes(self) -> list[OrderedDict[str, torch.Size]]:
        return [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in self.groups]


def write_zero2(
    folder: Path, model: Model, num_ranks: int, *, mp: int = 0, alignment: int = 2, stage: int = 2, **extra: Any
) -> None:
    """Files of ZeRO 1 or 2: groups laid end to end, padded at the end, cut into equal parts; moments keep the padding.

    Padding is NaN, so that none of it can get into a result unseen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    module = {name: values["fp32"].bfloat16() for name, values in model.values.items()}
    common = {"module": module, "param_shapes": model.shapes(), "dp_world_size": num_ranks, "mp_world_size": 1}
    torch.save({**common, **extra}, folder / f"mp_rank_{mp:02d}_model_states.pt")
    for rank in range(num_ranks):
        weights, states, mappings, paddings = [], {}, [], []
        for index, group in enumerate(model.groups):
            total = sum(torch.Size(shape).numel() for shape in group.values())
            part = -(-total // (num_ranks * alignment)) * alignment
            flats = {key: torch.full((part * num_ranks,), torch.nan) for key in STATES}
            mapping: OrderedDict[str, Address] = OrderedDict()
            position = 0
            for name, shape in group.items():
                numel = torch.Size(shape).numel()
                for key in STATES:
                    flats[key][position : position + numel] = model.values[name][key].reshape(-1)
                first, last = max(position, rank * part), min(position + numel, (rank + 1) * part)
                if first < last:
                    mapping[name] = Address(numel=last - first, start=first - rank * part)
                position += numel
            padding = min(part, max(0, (rank + 1) * part - total))
            own = {key: flat[rank * part : (rank + 1) * part].clone() for key, flat in flats.items()}
            weights.append(own["fp32"][: part - padding])
            states[index] = {"step": torch.tensor(5.0), **{key: own[key] for key in STATES[1:]}}
            mappings.append(mapping)
            paddings.append(padding)
        base = {"state": states, "param_groups": [{"lr": 0.5, "params": [i]} for i in range(len(model.groups))]}
        optimizer = {
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": weights,
            "param_slice_mappings": mappings,
            "group_paddings": paddings,
            "partition_count": [num_ranks] * len(model.groups),
            "zero_stage": stage,
            "loss_scaler": None,
            "ds_version": "0.19.8",
        }
        name = f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, folder / name)


def write_zero3(folder: Path, model: Model, num_ranks: int) -> None:
    """Files of ZeRO 3: each parameter is cut into parts, the last padded (with NaN); parts lie end to end."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(num_ranks):
        flats: list[dict[str, torch.Tensor]] = []
        for group in model.groups:
            parts: dict[str, list[torch.Tensor]] = {key: [] for key in STATES}
            for name, shape in group.items():
                share = -(-torch.Size(shape).numel() // num_ranks)
                for key in STATES:
                    padded = torch.full((share * num_ranks,), torch.nan)
                    value = model.values[name][key].reshape(-1)
                    padded[: value.numel()] = value
                    parts[key].append(padded[rank * share : (rank + 1) * share])
            flats.append({key: torch.cat(found) for key, found in parts.items()})
        states = {i: {"step": torch.tensor(5.0), **{k: flat[k] for k in STATES[1:]}} for i, flat in enumerate(flats)}
        groups = [{"lr": 0.5, "params": list(range(len(flats)))}]
        optimizer = {
            "zero_stage": 3,
            "loss_scaler": None,
            "fp32_flat_groups": [flat["fp32"] for flat in flats],
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "partition_count": num_ranks,
        }
        module = {name: torch.empty(0) for name in model.values}
        state = {"module": module, "param_shapes": model.shapes(), "dp_world_size": num_ranks, "mp_world_size": 1}
        torch.save(state, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, folder / name)
