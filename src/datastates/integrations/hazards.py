"""What of a DeepSpeed state may change before the fence closes, and is therefore copied inside ``save()``.

The fence closes when DeepSpeed takes a model step. Until then weights, master weights and moments are at rest, but for
what is listed here. ``docs/deepspeed.md`` says for every configuration what changes when.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from datastates.state import IsEager

logger = logging.getLogger(__name__)

LAZY_KEYS = frozenset({"module", "optimizer", "optimizer_state_dict", "frozen_param_fragments"})
"""Top-level keys of DeepSpeed's files whose tensors change in the optimizer's step only. What stands under any other
key came from the user (client_state) or from parts that may change at any time."""

OPTIMIZER_KEYS = frozenset({"optimizer", "optimizer_state_dict"})

RESTLESS_OPTIMIZERS = ("ZenFlow", "SuperOffload")
"""Beginnings of the names of classes that change their states in backward, or in a process of their own. ZenFlow in
ZeRO 3 has no class of its own, but its engine says so.

Source: deepspeed 0.19.8, ``ZenFlowZeroOptimizer.backward_prologue`` (``sync_fp32_param_from_gpu``,
``clear_selected_mv``) and ``SuperOffloadOptimizer_Stage3`` (sub-groups are stepped by another process as soon as their
gradients are there)."""

MUON_STAGING = ("_commit_muon_momentum", "_apply_muon_to_accumulated_grads")
"""Methods of a ZeRO optimizer that leaves Muon's momentum alone until its step. Before DeepSpeed 0.19.8 there are none
and the momentum changes in backward."""


@dataclass(frozen=True)
class Hazards:
    """What may change in forward or backward.

    Attributes:
        storages: addresses of the storages of all module buffers (BatchNorm, moving averages, counters).
        is_optimizer_restless: every tensor of the optimizer.
        states: names of optimizer states.
    """

    storages: frozenset[int] = frozenset()
    is_optimizer_restless: bool = False
    states: frozenset[str] = frozenset()


def hazards_of(engine: Any) -> Hazards:
    """The hazards of a DeepSpeed engine as it is now."""
    optimizer = getattr(engine, "optimizer", None)
    names = {base.__name__ for base in type(optimizer).__mro__}
    is_restless = bool(getattr(engine, "zenflow", False)) or any(n.startswith(RESTLESS_OPTIMIZERS) for n in names)
    if is_restless and getattr(engine, "overlap_step", False):
        logger.warning(
            "ZenFlow's overlapped step changes the optimizer's states in a process of its own at any time, also while"
            " they are copied: no checkpoint of them is sure to be of one step. Set zenflow.overlap_step to false"
        )
    has_muon = getattr(optimizer, "use_muon", False) or any(
        group.get("use_muon") for group in getattr(optimizer, "param_groups", ())
    )
    is_staged = any(hasattr(optimizer, method) for method in MUON_STAGING)
    is_zero = hasattr(optimizer, "partition_count")
    states = frozenset({"momentum_buffer"} if has_muon and is_zero and not is_staged else ())
    return Hazards(_buffer_storages(engine.module), is_restless, states)


def eager_rule(state_dict: Any, hazards: Hazards) -> IsEager:
    """What to copy inside ``save()`` of the state of one of DeepSpeed's files."""
    is_mapping = isinstance(state_dict, Mapping)
    names = (state_dict.get("buffer_names") or ()) if is_mapping else ()
    buffers = frozenset(f"module.{name}" for name in names)
    has_user_keys = is_mapping and "ds_version" in state_dict

    def is_eager(fqn: str, tensor: torch.Tensor) -> bool:
        top = fqn.partition(".")[0]
        if fqn in buffers or (has_user_keys and top not in LAZY_KEYS):
            return True
        if top in OPTIMIZER_KEYS and (hazards.is_optimizer_restless or fqn.rpartition(".")[2] in hazards.states):
            return True
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in hazards.storages

    return is_eager


def _buffer_storages(module: torch.nn.Module) -> frozenset[int]:
    storages = {buffer.untyped_storage().data_ptr() for buffer in module.buffers() if buffer.layout is torch.strided}
    return frozenset(storages - {0})
