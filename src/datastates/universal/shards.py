"""The flat partitions of ZeRO, and which piece of which parameter lies where in them.

ZeRO lays the parameters of a group one after the other and gives each data-parallel rank a part of that. What a rank
saves is the part, as one flat tensor per group: the fp32 weights and each state of the optimizer. `Shards` finds the
elements of a parameter again, by its name, whatever the number of ranks was.

Nothing is copied here: pieces are views of the tensors that the states hold, which may lie in mapped files.
Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py for the layout; runtime/zero/stage_1_and_2.py, stage3.py and
runtime/bf16_optimizer.py, each ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from datastates.errors import CorruptCheckpointError, TopologyError

WEIGHT = "fp32"
"""Name of the fp32 weights among a parameter's states. Source: ``FP32_WEIGHT_KEY`` of DeepSpeed."""

STEP = "step"

_ALIGNED_STAGES = 2  # up to here the layout is written down; ZeRO 3 splits each parameter on its own


@dataclass(frozen=True)
class Group:
    """One group of one rank.

    Attributes:
        flat: the fp32 weights and the states of the optimizer that are split like them, one-dimensional.
        whole: what is not split: the step, and what else an optimizer keeps per group.
        fragments: (first element, number of elements) in the flat tensors, by the name of the parameter. Padding
            belongs to none.
    """

    flat: dict[str, torch.Tensor]
    whole: dict[str, Any]
    fragments: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter: those from ``start`` of a flat tensor of a group."""

    group: Group
    start: int
    numel: int


class Shards:
    """The parameters of one model-parallel rank, from what all of its data-parallel ranks have saved."""

    def __init__(self, ranks: Sequence[Sequence[Group]], shapes: Mapping[str, Sequence[int]], source: str) -> None:
        """Args:
        ranks: the groups of each data-parallel rank, in the order of the ranks.
        shapes: shape of each parameter of the model, as far as it is trained.
        source: names the checkpoint in messages.
        """
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.source = source
        self._pieces: dict[str, list[Piece]] = {name: [] for name in self.shapes}
        for groups in ranks:
            for group in groups:
                for name, (start, numel) in group.fragments.items():
                    self._pieces.setdefault(name, []).append(Piece(group, start, numel))

    @property
    def names(self) -> list[str]:
        """The parameters of which there is anything, in the order of the model."""
        return [name for name, pieces in self._pieces.items() if pieces]

    def keys(self, name: str) -> list[str]:
        """The states of a parameter that are split: the weights first."""
        pieces = self._pieces[name]
        return [key for key in pieces[0].group.flat if all(key in piece.group.flat for piece in pieces)]

    def step(self, name: str) -> Any:
        """The step of a parameter's group, None where the optimizer does not keep it there.

        Raises:
            CorruptCheckpointError: the ranks have made a different number of steps.
        """
        steps = [piece.group.whole.get(STEP) for piece in self._pieces[name]]
        if any(step != steps[0] for step in steps):
            raise CorruptCheckpointError(f"{self.source}: the ranks are at different steps: {steps}", fqn=name)
        return steps[0]

    def views(self, name: str, key: str) -> list[torch.Tensor]:
        """One-dimensional views that hold a state of a parameter, one after the other, without padding.

        Raises:
            CorruptCheckpointError: they are more or fewer elements than the parameter has.
        """
        found = [_narrow(piece, key, name, self.source) for piece in self._pieces[name]]
        total, shape = sum(view.numel() for view in found), self.shapes.get(name)
        if shape is not None and total != shape.numel():
            raise CorruptCheckpointError(
                f"{self.source}: {key} of {name} has {total} elements on all ranks, expected {shape.numel()} for shape"
                f" {tuple(shape)}; the file of a rank is missing, or experts are spread over the ranks",
                fqn=name,
            )
        return found

    def copy(self, name: str, key: str, begin: int, target: torch.Tensor) -> None:
        """Fill ``target``, one-dimensional, with the elements of a state from ``begin`` on. Reads no others."""
        end = begin + target.numel()
        position = 0
        for view in self.views(name, key):
            first, last = max(begin, position), min(end, position + view.numel())
            if first < last:
                target[first - begin : last - begin].copy_(view[first - position : last - position])
            position += view.numel()


def _narrow(piece: Piece, key: str, name: str, source: str) -> torch.Tensor:
    flat = piece.group.flat[key]
    if piece.start + piece.numel > flat.numel():
        hint = "its tensors were offloaded to NVMe when it was saved: resume once with as many ranks, without NVMe"
        raise TopologyError(
            f"{source}: {key} of {name} should end at element {piece.start + piece.numel} of a partition that has"
            f" {flat.numel()}; {hint if flat.numel() == 0 else 'its file is damaged'}"
        )
    return flat.narrow(0, piece.start, piece.numel)


def groups_of(
    optimizer_state: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]], rank: int, num_ranks: int
) -> list[Group]:
    """The groups of one rank, from the optimizer's part of its file.

    Args:
        optimizer_state: what stands under ``optimizer_state_dict``.
        shapes: names and shapes per group, of which the layout of ZeRO 3 follows.
        rank: the data-parallel rank.
        num_ranks: how many there are.
    """
    if stage_of(optimizer_state) > _ALIGNED_STAGES:
        return list(_zero3_groups(optimizer_state, shapes, rank, num_ranks))
    return list(_mapped_groups(optimizer_state))


def stage_of(optimizer_state: Mapping[str, Any]) -> int:
    """The stage of ZeRO; files of the bf16 optimizer do not say and are of stage 1."""
    return int(optimizer_state.get("zero_stage", 1))


def _mapped_groups(optimizer_state: Mapping[str, Any]) -> Iterator[Group]:
    base = optimizer_state["base_optimizer_state"]
    states = base["state"] if isinstance(base, Mapping) else dict(enumerate(base))  # a list with elastic_checkpoint
    paddings = optimizer_state.get("group_paddings") or []
    shared_step = optimizer_state.get("base_optimizer_state_step")
    mappings = optimizer_state["param_slice_mappings"]
    for index, weights in enumerate(optimizer_state["single_partition_of_fp32_groups"]):
        padding = paddings[index] if index < len(paddings) else 0
        state = dict(states.get(index, {}))
        if shared_step is not None:
            state.setdefault(STEP, shared_step)
        fragments = {name: (address.start, address.numel) for name, address in mappings[index].items()}
        yield _group(weights, state, {weights.numel(), weights.numel() + padding}, fragments)


def _zero3_groups(
    optimizer_state: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]], rank: int, num_ranks: int
) -> Iterator[Group]:
    states = optimizer_state["optimizer_state_dict"]["state"]
    for index, weights in enumerate(optimizer_state["fp32_flat_groups"]):
        fragments, start = {}, 0
        for name, shape in shapes[index].items():
            numel = torch.Size(shape).numel()
            share = share_of(numel, num_ranks)
            fragments[name] = (start, max(0, min(share, numel - rank * share)))
            start += share
        yield _group(weights, states.get(index, {}), {weights.numel()}, fragments)


def share_of(numel: int, num_ranks: int) -> int:
    """Elements of a parameter on each rank of ZeRO 3, the last ranks' padded."""
    return -(-numel // num_ranks)


def _group(
    weights: torch.Tensor, state: Mapping[str, Any], lengths: set[int], fragments: dict[str, tuple[int, int]]
) -> Group:
    flat, whole = {WEIGHT: weights.detach()}, {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() in lengths:
            flat[key] = value.detach()
        else:
            whole[key] = value
    return Group(flat, whole, fragments)


def merged_shapes(param_shapes: Iterable[Mapping[str, Any]]) -> dict[str, torch.Size]:
    """Shape by name, of all groups."""
    return {name: torch.Size(shape) for group in param_shapes for name, shape in group.items()}
