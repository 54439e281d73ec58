"""The weights of a ZeRO checkpoint beyond what its optimizer splits: the frozen ones, and a whole model in fp32."""

from __future__ import annotations

from typing import Any

import torch

from datastates.universal.shards import WEIGHT, Group, Shards, share_of
from datastates.universal.source import ZeroCheckpoint

_FRAGMENTS = "frozen_param_fragments"


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


def fp32_weights(checkpoint: ZeroCheckpoint, mp: int = 0) -> dict[str, torch.Tensor]:
    """All weights and buffers of a model in memory, as fp32: what DeepSpeed's ``zero_to_fp32.py`` gives.

    Frozen parameters keep their dtype. Tensors of tied parameters are the same one.
    """
    model = checkpoint.model_state(0, mp)
    found: dict[str, torch.Tensor] = {}
    for name in model.get("buffer_names") or ():
        buffer = model["module"][name]
        found[name] = buffer.float() if buffer.is_floating_point() else buffer.clone()
    for shards in (frozen_shards(checkpoint, mp), checkpoint.shards(mp)):
        for name in shards.names if shards is not None else ():
            if shards is not None and name in shards.shapes:
                found[name] = torch.cat(shards.views(name, WEIGHT)).reshape(shards.shapes[name])
    for name, owner in dict(model.get("shared_params") or {}).items():
        if owner in found:
            found[name] = found[owner]
    return found


def _num_parts(checkpoint: ZeroCheckpoint) -> int:
    return checkpoint.num_data_parallel if checkpoint.stage > 2 else 1


def _group(name: str, state: dict[str, Any], shapes: dict[str, Any], rank: int, num_ranks: int) -> Group:
    fragment = state[_FRAGMENTS][name].detach().reshape(-1)
    numel = torch.Size(shapes[name]).numel()
    share = share_of(numel, num_ranks)
    return Group({WEIGHT: fragment}, {}, {name: (0, max(0, min(share, numel - rank * share)))})
