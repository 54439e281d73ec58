"""The part of a checkpoint that this rank would have saved, had it been saved by the present number of ranks.

What is split is found by the names of the parameters in the mapped files of all ranks that saved it; only the elements
that this rank needs are read. Padding is zero. All that is returned lies in memory of its own.

Source: deepspeed 0.19.8, ``state_dict`` and ``load_state_dict`` in runtime/zero/stage_1_and_2.py, in
runtime/zero/stage3.py and in runtime/bf16_optimizer.py.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import distributed

from datastates.errors import TopologyError
from datastates.universal.names import is_model_file, is_optimizer_file
from datastates.universal.shards import WEIGHT
from datastates.universal.source import ZeroCheckpoint
from datastates.universal.weights import frozen_shards

_Place = tuple[str, int, int, int]  # parameter, first element in it, first element in the flat tensor, elements


class Partition:
    """The checkpoint as it would be had it been saved by the present number of ranks: this rank's files."""

    def __init__(self, engine: DeepSpeedEngine, checkpoint: ZeroCheckpoint, with_states: bool) -> None:
        """Read the structure of the old partitions, no element of them.

        Args:
            engine: about to load; its optimizer has the present partitions.
            checkpoint: what is loaded; its files stay open until the loading is done.
            with_states: the optimizer's states are wanted, not only the weights.

        Raises:
            TopologyError: the checkpoint is of another model.
            CorruptCheckpointError: the pieces of a parameter are not the whole of it.
        """
        self._engine = engine
        self._checkpoint = checkpoint
        self._optimizer = engine.optimizer
        self._mp = int(engine.checkpoint_mp_rank)
        if with_states:
            self._shards = checkpoint.shards(self._mp)
            self._old = checkpoint.optimizer_state(0, self._mp)
            self._old_groups = checkpoint.groups(0, self._mp)
            self._check_model()

    def load_instead_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function to take the place of the checkpoint engine's ``load`` of a path and a ``map_location``."""

        def load(path: str, map_location: Any = None) -> Any:
            if os.path.dirname(os.path.abspath(path)) != self._checkpoint.directory:
                return original(path, map_location)
            if is_optimizer_file(os.path.basename(path)):
                return {"optimizer_state_dict": self._zero3() if self._is_zero3 else self._zero12()}
            state = original(path, map_location)
            if is_model_file(os.path.basename(path)):
                state["dp_world_size"] = int(self._engine.seq_dp_world_size)
                if self._is_zero3 and state.get("frozen_param_fragments") is not None:
                    state["frozen_param_fragments"] = self._frozen()
            return state

        return load

    @property
    def _is_zero3(self) -> bool:
        return bool(self._engine.zero_optimization_partition_weights())

    def _zero12(self) -> dict[str, Any]:
        optimizer = self._optimizer
        is_bf16 = hasattr(optimizer, "bf16_groups")
        groups = optimizer.bf16_groups if is_bf16 else optimizer.bit16_groups
        flats = optimizer.fp32_groups_flat_partition if is_bf16 else optimizer.single_partition_of_fp32_groups
        weights, states = [], {}
        for index, (parameters, flat) in enumerate(zip(groups, flats, strict=True)):
            places = [self._place(parameter) for parameter in parameters if parameter._hp_mapping is not None]
            made = self._flats(self._old_groups[index].flat, flat.numel(), places)
            weights.append(made.pop(WEIGHT))
            if index in self._old_states:
                states[index] = {**copy.deepcopy(self._old_groups[index].whole), **made}
        base = self._old["base_optimizer_state"]
        old_groups = copy.deepcopy(base["param_groups"]) if isinstance(base, Mapping) else self._present_groups()
        changed: dict[str, Any] = {
            "base_optimizer_state": {"state": states, "param_groups": old_groups},
            "single_partition_of_fp32_groups": weights,
            "group_paddings": optimizer.group_paddings if is_bf16 else optimizer.groups_padding,
            "partition_count": optimizer.partition_count,
            "param_slice_mappings": optimizer._param_slice_mappings,
        }
        if not is_bf16:
            changed["param_alignment_paddings"] = optimizer.round_robin_bit16_padding
        return {**self._unsplit(changed), **changed}

    def _place(self, parameter: Any) -> _Place:
        """Where the part of a parameter is that this rank of ZeRO 1 or 2 owns."""
        owned, address = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.get_hp_fragment_address()
        return self._name(parameter), owned.start, address.start, address.numel

    def _zero3(self) -> dict[str, Any]:
        optimizer = self._optimizer
        old = self._old["optimizer_state_dict"]
        weights, states = [], {}
        members: list[list[int]] = [[] for _ in old["param_groups"]]  # sub-groups, by group of the optimizer
        for index, parameters in enumerate(optimizer.fp16_groups):
            members[optimizer.sub_group_to_group_id[index]].append(index)
            places, position = [], 0
            for parameter in parameters:
                share = int(parameter.partition_numel())
                begin = distributed.get_rank(parameter.ds_process_group) * share
                numel = max(0, min(share, int(parameter.ds_numel) - begin))
                places.append((self._name(parameter), begin, position, numel))
                position += share
            first = old["param_groups"][optimizer.sub_group_to_group_id[index]]["params"][0]
            length = optimizer.fp32_partitioned_groups_flat[index].numel()
            made = self._flats(self._old_groups[first].flat, length, places)
            weights.append(made.pop(WEIGHT))
            if first in old["state"]:
                states[index] = {**copy.deepcopy(self._old_groups[first].whole), **made}
        order = [index for group in members for index in group]  # torch counts parameters group by group
        groups, count = [], 0
        for group, indices in zip(old["param_groups"], members, strict=True):
            groups.append({**copy.deepcopy(group), "params": list(range(count, count + len(indices)))})
            count += len(indices)
        base = {"state": {new: states[index] for new, index in enumerate(order) if index in states}}
        changed = {
            "optimizer_state_dict": {**base, "param_groups": groups},
            "fp32_flat_groups": weights,
            "partition_count": optimizer.partition_count,
        }
        return {**self._unsplit(changed), **changed}

    def _unsplit(self, changed: Mapping[str, Any]) -> dict[str, Any]:
        """All that stays as it was, in memory of its own: the mapped files are let go of."""
        return {key: copy.deepcopy(value) for key, value in self._old.items() if key not in changed}

    def _flats(self, old: Mapping[str, torch.Tensor], length: int, places: Sequence[_Place]) -> dict[str, torch.Tensor]:
        """The flat tensors of one group, zero where there is padding.

        Args:
            old: the flat tensors of the same group that were saved, for their names and dtypes.
            length: elements with padding.
            places: what comes from where.
        """
        made = {key: torch.zeros(length, dtype=tensor.dtype) for key, tensor in old.items()}
        for key, target in made.items():
            for name, begin, position, numel in places:
                self._shards.copy(name, key, begin, target[position : position + numel])
        return made

    def _frozen(self) -> dict[str, torch.Tensor]:
        """This rank's share of each frozen parameter, with the padding that the live one has."""
        shards = frozen_shards(self._checkpoint, self._mp)
        found = {}
        for parameter, name in self._engine.param_names.items():
            if shards is None or name not in shards.shapes or not hasattr(parameter, "ds_id"):
                continue
            share = int(parameter.ds_tensor.numel())
            begin = distributed.get_rank(parameter.ds_process_group) * share
            target = torch.zeros(share, dtype=shards.views(name, WEIGHT)[0].dtype)
            numel = max(0, min(share, int(parameter.ds_numel) - begin))
            shards.copy(name, WEIGHT, begin, target[:numel])
            found[name] = target.view(parameter.ds_tensor.shape)
        return found

    def _check_model(self) -> None:
        """Every trained parameter, and no other, is in the checkpoint with the same shape.

        Checked for all of them on every rank, so that no rank goes on alone.
        """
        here = {self._name(parameter): parameter for group in self._groups for parameter in group}
        found = set(self._shards.names)
        there = {name: shape for name, shape in self._shards.shapes.items() if name in found}
        problems = [f"{name} is not in it" for name in here if name not in there]
        problems += [f"{name} is not in the model" for name in there if name not in here]
        for name, parameter in here.items():
            shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
            if name in there and there[name] != shape:
                problems.append(f"{name} has shape {tuple(there[name])} in it, {tuple(shape)} in the model")
        num_groups = len(self._optimizer.optimizer.param_groups)
        if len(self._old_param_groups) != num_groups:
            problems.append(
                f"it has {len(self._old_param_groups)} groups of parameters, the optimizer has {num_groups}"
            )
        if problems:
            matched = len(here.keys() & there.keys())
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise TopologyError(
                f"{self._checkpoint.directory} is of another model: {matched} of {len(here)} trained parameters match"
                f" by name. {shown}"
            )
        for name in here:
            self._shards.views(name, WEIGHT)  # raises where the pieces are not the whole parameter

    @property
    def _groups(self) -> Any:
        for name in ("bf16_groups", "bit16_groups", "fp16_groups"):
            if hasattr(self._optimizer, name):
                return getattr(self._optimizer, name)
        raise TopologyError(f"the partitions of {type(self._optimizer).__name__} are not cut anew")

    @property
    def _old_states(self) -> Any:
        base = self._old["base_optimizer_state"]
        return base["state"] if isinstance(base, Mapping) else range(len(base))

    @property
    def _old_param_groups(self) -> Sequence[Any]:
        if self._is_zero3:
            return self._old["optimizer_state_dict"]["param_groups"]  # type: ignore[no-any-return]
        return self._old["single_partition_of_fp32_groups"]  # type: ignore[no-any-return]

    def _present_groups(self) -> Any:
        """The optimizer's own groups: files of ``elastic_checkpoint`` hold none, only the step."""
        groups = self._optimizer.optimizer.state_dict()["param_groups"]
        step = self._old.get("base_optimizer_state_step")
        return groups if step is None else [{**group, "step": step} for group in groups]

    def _name(self, parameter: torch.nn.Parameter) -> str:
        return str(self._optimizer.param_names[parameter])
