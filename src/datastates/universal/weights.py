"""The weights of a ZeRO checkpoint: those that its optimizer keeps, the frozen ones, buffers, and tied names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from datastates.universal.shards import WEIGHT, Group, Shards, share_of
from datastates.universal.source import ZeroCheckpoint

_FRAGMENTS = "frozen_param_fragments"


@dataclass(frozen=True)
class Weight:
    """One tensor of a model.

    Attributes:
        shape: its sizes.
        dtype: what it is to be written as.
        elements: one-dimensional tensors that hold its elements in order, in any dtype; made when they are asked for.
        owner: the name of the weight that it is the same tensor as; its own where it is the first of that tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    elements: Iterable[torch.Tensor]
    owner: str

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


Weights = dict[str, Weight]


def zero_weights(checkpoint: ZeroCheckpoint, mp: int = 0) -> Weights:
    """All weights and buffers of a model, not read yet: what DeepSpeed's ``zero_to_fp32.py`` gives.

    Trained weights and floating-point buffers are fp32; frozen weights and other buffers keep their dtype.
    """
    model = checkpoint.model_state(0, mp)
    found: Weights = {}
    for name in model.get("buffer_names") or ():
        buffer = model["module"][name]
        dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
        found[name] = Weight(buffer.shape, dtype, [buffer.detach().reshape(-1)], name)
    for shards in (frozen_shards(checkpoint, mp), checkpoint.shards(mp)):
        for name in shards.names if shards is not None else ():
            if shards is not None and name in shards.shapes:
                views = shards.views(name, WEIGHT)
                found[name] = Weight(shards.shapes[name], views[0].dtype, views, name)
    for name, owner in dict(model.get("shared_params") or {}).items():
        if owner in found:
            found[name] = found[owner]
    return found


def in_memory(weights: Weights) -> dict[str, torch.Tensor]:
    """The weights as tensors in memory of their own. Those that are tied are the same one."""
    made = {name: _made(one) for name, one in weights.items() if one.owner == name}
    return {name: made[one.owner] for name, one in weights.items()}


def frozen_shards(checkpoint: ZeroCheckpoint, mp: int) -> Shards | None:
    """The frozen parameters of one model-parallel rank, None where there are none or they were left out.

    ZeRO 3 splits each like a trained one; up to ZeRO 2 they are whole in the model file.
    """
    states = [checkpoint.model_state(dp, mp) for dp in range(_num_parts(checkpoint))]
    shapes = states[0].get("frozen_param_shapes")
    if not shapes or not states[0].get(_FRAGMENTS):
        return None
    ranks = [[_group(name, state, shapes, rank, len(states)) for name in shapes] for rank, state in enumerate(states)]
    return Shards(ranks, shapes, checkpoint.directory)


def _made(weight: Weight) -> torch.Tensor:
    return torch.cat(list(weight.elements)).to(weight.dtype).reshape(weight.shape)


def _num_parts(checkpoint: ZeroCheckpoint) -> int:
    return checkpoint.num_data_parallel if checkpoint.stage > 2 else 1


def _group(name: str, state: dict[str, Any], shapes: dict[str, Any], rank: int, num_ranks: int) -> Group:
    fragment = state[_FRAGMENTS][name].detach().reshape(-1)
    numel = torch.Size(shapes[name]).numel()
    share = share_of(numel, num_ranks)
    return Group({WEIGHT: fragment}, {}, {name: (0, max(0, min(share, numel - rank * share)))})
