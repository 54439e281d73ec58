"""Resume on another number of data-parallel ranks: ZeRO's partitions cut anew while DeepSpeed loads them.

DeepSpeed refuses optimizer files of another number of ranks. Here each rank is given, in place of the file that it asks
for, the partition that it would have saved had the job had its present size: found by the names of the parameters in
the mapped files of all old ranks, of which only the elements that this rank needs are read. DeepSpeed then loads it as
one of its own, with all of its options. Nothing is written anywhere, and no more memory is taken than by any load.

What belongs to a rank and not to the model, with ZeRO 3 buffers and the caller's ``client_state``, is rank 0's on every
rank, as it always is up to ZeRO 2.

Source: deepspeed 0.19.8, runtime/engine.py, ``load_checkpoint`` and below; ``load_state_dict`` of the optimizers of
ZeRO 1 and 2, ZeRO 3 and bf16.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import distributed

from datastates import manifest
from datastates.errors import TopologyError
from datastates.integrations.partition import Partition
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.names import read_names
from datastates.universal.source import ZeroCheckpoint
from datastates.universal.weights import in_memory, zero_weights

logger = logging.getLogger(__name__)

_CONVERT = (
    'convert it with "datastates convert --to universal CHECKPOINT OUT" and load OUT with'
    ' "checkpoint": {"load_universal": true} in the config'
)

_DEEPSPEED_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
    }
)
"""Keys of a model file that are not the caller's. Source: ``DeepSpeedEngine._common_checkpoint_state``."""


@contextlib.contextmanager
def resharded(engine: DeepSpeedEngine, load_dir: str, tag: Any, *, with_states: bool) -> Iterator[None]:
    """Inside, ``load_checkpoint`` of the engine reads a checkpoint of any number of data-parallel ranks.

    Does nothing where the number is the same, where the checkpoint is none of ZeRO, or is loaded as a universal one;
    only with ZeRO 3 and weights alone it sees to it that they are those of the tag. All ranks come to the same
    decision, from the names and the first files in the folder.

    Args:
        engine: about to load.
        load_dir: where from.
        tag: which checkpoint, None: the one that ``latest`` names.
        with_states: the optimizer's states are wanted, not only the weights.

    Raises:
        TopologyError: this checkpoint cannot be brought to these ranks, or is of another model; says what to do.
        CorruptCheckpointError: a file of a rank is missing or does not fit the others.
    """
    directory = _directory(engine, load_dir, tag, with_states)
    if directory is None:
        yield
        return
    with MappedFiles() as files, contextlib.ExitStack() as stack:
        for owner, name, value in _replacements(engine, ZeroCheckpoint(directory, files), with_states):
            stack.enter_context(_replaced(owner, name, value))
        yield


def _directory(engine: DeepSpeedEngine, load_dir: str, tag: Any, with_states: bool) -> str | None:
    """The checkpoint's folder, None where DeepSpeed loads it as it is. Opens no file of it."""
    is_zero3 = engine.zero_optimization_partition_weights()
    if not engine.zero_optimization() or engine.load_universal_checkpoint() or not (with_states or is_zero3):
        return None
    tag = manifest.read_latest(load_dir) if tag is None else tag
    directory = None if tag is None else os.path.join(load_dir, str(tag))
    if directory is None or not os.path.isdir(directory):
        return None
    record = manifest.read_commit(directory)
    if record is not None and record.node is not None:
        _check_part(directory, record, with_states)
        return None
    names = read_names(directory)
    is_same = {mp: len(names.data_parallel_ranks(mp)) == engine.seq_dp_world_size for mp in names.model_parallel_ranks}
    return None if not is_same or (all(is_same.values()) and with_states) else directory


def _check_part(directory: str, record: manifest.CommitRecord, with_states: bool) -> None:
    """Raise TopologyError where a load needs files of ranks on other nodes, which share no directory with this one."""
    num_ranks = distributed.get_world_size()
    if record.world_size == num_ranks and with_states:
        return
    what = f"was saved by {record.world_size} ranks, this job has {num_ranks}" if with_states else "is loaded in part"
    raise TopologyError(
        f"{directory} is the {record.node}, and {what}: for that the files of all nodes are needed. Copy them, without"
        f" {manifest.METADATA_NAME}, into one folder that all ranks see, and load that with shared_directory true"
    )


_Replacement = tuple[Any, str, Any]  # an object, the name of an attribute, its value while the checkpoint is loaded


def _replacements(engine: DeepSpeedEngine, checkpoint: ZeroCheckpoint, with_states: bool) -> Iterator[_Replacement]:
    is_zero3 = engine.zero_optimization_partition_weights()
    if is_zero3 and not with_states and not engine.has_moe_layers:
        yield from _weights_only(engine, checkpoint)
    if checkpoint.num_data_parallel == engine.seq_dp_world_size:
        return
    checkpoint.check_kind()
    _check_possible(engine, checkpoint, with_states)
    partition = Partition(engine, checkpoint, with_states)
    yield engine.checkpoint_engine, "load", partition.load_instead_of(engine.checkpoint_engine.load)
    if is_zero3:  # the file of a rank that was not there when it was saved
        names = sorted(checkpoint.names.model.items())
        paths = [checkpoint.names.path(name) for (dp, _), name in names if dp == 0]
        yield engine, "_get_all_ckpt_names", lambda *_: paths
    elif engine.zero_elastic_checkpoint():  # would want the partitions of all ranks
        yield engine, "zero_elastic_checkpoint", lambda: False
        yield engine.optimizer, "elastic_checkpoint", False
    _announce(checkpoint, engine.seq_dp_world_size, with_states)


def _weights_only(engine: DeepSpeedEngine, checkpoint: ZeroCheckpoint) -> Iterator[_Replacement]:
    """What to replace so that ZeRO 3 loads the weights alone: of the tag asked for, in either format, with either flag.

    DeepSpeed puts the weights together with a function that reads what ``latest`` names, whatever the tag; and with
    ``load_module_only`` but not ``load_optimizer_states=False`` it loads no trained weight and says nothing.
    """
    original, source = engine.load_module_state_dict, checkpoint

    def load_module_state_dict(checkpoint: dict[str, Any], **options: Any) -> None:
        checkpoint["module"] = in_memory(zero_weights(source))
        original(checkpoint=checkpoint, **{**options, "fetch_z3_params": True})

    yield deepspeed_engine, "get_fp32_state_dict_from_zero_checkpoint", lambda _: {}
    yield engine, "load_module_state_dict", load_module_state_dict


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """The attribute of one object is another one inside."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _check_possible(engine: DeepSpeedEngine, checkpoint: ZeroCheckpoint, with_states: bool) -> None:
    where = (
        f"{checkpoint.directory} was saved by {checkpoint.num_data_parallel} data-parallel ranks, to be loaded by"
        f" {engine.seq_dp_world_size}"
    )
    back = f"resume it on {checkpoint.num_data_parallel} data-parallel ranks"
    if engine.has_moe_layers:
        raise TopologyError(f"{where}: the experts of a mixture of experts are not brought to other ranks; {back}")
    if checkpoint.num_model_parallel != engine.mp_world_size and with_states:
        raise TopologyError(
            f"{where}, and by {checkpoint.num_model_parallel} model-parallel ranks (tensor and pipeline), to be loaded"
            f" by {engine.mp_world_size}: {_CONVERT}"
        )
    if engine.zero_nvme_offload_optimizer():
        raise TopologyError(
            f"{where}: with the optimizer offloaded to NVMe its states lie in files of each rank; {back}, or offload to"
            ' the CPU ("offload_optimizer": {"device": "cpu"}) when it is saved and loaded'
        )
    if type(engine.optimizer).__name__ == "MiCS_Optimizer":
        raise TopologyError(f"{where}: partitions of MiCS are not cut anew; {back}")
    is_zero3 = engine.zero_optimization_partition_weights()
    if is_zero3 != (checkpoint.stage > 2):
        raise TopologyError(
            f"{where}, with ZeRO {checkpoint.stage}, not {engine.zero_optimization_stage()}: {_CONVERT}"
        )


def _announce(checkpoint: ZeroCheckpoint, num_ranks: int, with_states: bool) -> None:
    """Say on rank 0 what is done, and what cannot be."""
    if distributed.is_initialized() and distributed.get_rank() != 0:
        return
    what = "weights and optimizer states" if with_states else "weights"
    logger.info(
        "%s was saved by %d data-parallel ranks: its %s are cut anew for %d",
        checkpoint.directory,
        checkpoint.num_data_parallel,
        what,
        num_ranks,
    )
    differing = _differing_keys(checkpoint)
    if differing:
        logger.warning(
            "%s: each rank had saved a client_state of its own, and on another number of ranks all get that of rank 0."
            " It differed in %s: set those anew for each rank where they must differ (seeds, positions in the data)",
            checkpoint.directory,
            ", ".join(differing),
        )


def _differing_keys(checkpoint: ZeroCheckpoint) -> list[str]:
    """The keys of ``client_state`` that are not the same on all ranks that saved one (with ZeRO 3 each does)."""
    states = [checkpoint.model_state(dp, 0) for dp, mp in sorted(checkpoint.names.model) if mp == 0]
    keys = {key: None for state in states for key in state if key not in _DEEPSPEED_KEYS}
    first = states[0]
    return [
        str(key)
        for key in keys
        if any(key not in state or key not in first or not _same(state[key], first[key]) for state in states[1:])
    ]


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    try:
        return bool(found == expected)
    except (RuntimeError, TypeError, ValueError):  # arrays, and containers of them
        return pickle.dumps(found) == pickle.dumps(expected)
