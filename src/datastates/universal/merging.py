"""How the slices of tensor-parallel ranks become one parameter, by the rules that the model has left in the checkpoint.

Without tensor parallelism there is one slice, and the rules only say what is noted beside it.
Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py, ``merge_tp_slices``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from datastates.errors import TopologyError
from datastates.universal.shards import Shards

_UNSUPPORTED = ("parameter_with_sub_params", "affine_map", "autotp_unsupported_parameter_patterns")


@dataclass(frozen=True)
class Merged:
    """One state of a whole parameter.

    Attributes:
        notes: what stands beside it in the file.
        shape: of the whole.
        views: one-dimensional, together its elements.
    """

    notes: dict[str, Any]
    shape: torch.Size
    views: Sequence[torch.Tensor] = field(repr=False)


class Rules:
    """The ``universal_checkpoint_info`` of a checkpoint."""

    def __init__(self, info: Mapping[str, Any], source: str) -> None:
        """Raises:
        TopologyError: there are rules for parts of parameters, which are not followed here.
        """
        self._info = info
        self._source = source
        found = [key for key in _UNSUPPORTED if info.get(key)]
        if found:
            raise TopologyError(
                f"{source}: its rules for tensor parallelism ({', '.join(found)}) are not followed here; convert it"
                " with DeepSpeed's ds_to_universal.py"
            )

    def is_replicated_in_pipeline(self, name: str) -> bool:
        """Whether the first stage's copy of a parameter stands for those of later stages."""
        return self._matches("pipeline_replicated_parameter_patterns", name)

    def merge(self, name: str, key: str, slices: Sequence[Shards]) -> Merged:
        """One state of a parameter from its slices, in the order of the tensor-parallel ranks.

        With one slice nothing is read. With several the parameter is made in memory.

        Raises:
            CorruptCheckpointError: a slice has more or fewer elements than its shape.
            TopologyError: slices that should be the same differ.
        """
        parts = [Merged({}, shards.shapes[name], shards.views(name, key)) for shards in slices]
        merged = self._join(name, parts)
        if not self._matches("vocabulary_parameter_patterns", name):
            return merged
        rows = int(self._info["original_vocab_size"])
        shape = torch.Size((min(rows, merged.shape[0]), *merged.shape[1:]))
        return Merged({**merged.notes, "vocab_tensor": True}, shape, _head(merged.views, shape.numel()))

    def _join(self, name: str, parts: Sequence[Merged]) -> Merged:
        first = parts[0]
        if self._matches("tp_replicated_parameter_patterns", name):
            whole = [_made(part) for part in parts] if len(parts) > 1 else []
            if any(not torch.equal(whole[0], other) for other in whole[1:]):
                raise TopologyError(
                    f"{self._source}: {name} should be the same on all tensor-parallel ranks, and is not"
                )
            return first
        if self._matches("parameter_to_average_patterns", name):
            if len(parts) == 1:
                return first
            return _of({}, sum(_made(part) for part in parts) / len(parts))  # type: ignore[arg-type]
        if self._matches("parameter_with_2_sub_params_cat_dim_0", name):
            notes = {"cat_dim": 0, "param_n_sub_params": 2}
            if len(parts) == 1:
                return Merged(notes, first.shape, first.views)
            halves = [torch.chunk(_made(part), 2) for part in parts]
            return _of(notes, torch.cat([half[which] for which in (0, 1) for half in halves]))
        dim = 1 if self._matches("parameter_with_row_parallelism_patterns", name) else 0
        if len(parts) == 1:
            return Merged({"cat_dim": dim}, first.shape, first.views)
        return _of({"cat_dim": dim}, torch.cat([_made(part) for part in parts], dim=dim))

    def _matches(self, category: str, name: str) -> bool:
        return any(re.match(pattern, name) for pattern in self._info.get(category) or ())


def _made(part: Merged) -> torch.Tensor:
    return torch.cat(list(part.views)).reshape(part.shape)


def _of(notes: dict[str, Any], tensor: torch.Tensor) -> Merged:
    return Merged(notes, tensor.shape, [tensor.reshape(-1)])


def _head(views: Sequence[torch.Tensor], numel: int) -> list[torch.Tensor]:
    """The first elements of consecutive views."""
    found = []
    for view in views:
        found.append(view[:numel])
        numel -= found[-1].numel()
    return found
