"""Optimizer states that DeepSpeed has swapped out to local storage, as files of the checkpoint.

With ``offload_optimizer.device = "nvme"`` master weights and moments of large sub-groups lie in files that the next
optimizer step overwrites. DeepSpeed copies the whole folder into the checkpoint while training waits, under names that
count all parameters of the process, and takes moments and step counts back in a process that has them already only.
Here each file is saved lazily, durably and as part of the commit, and a new process gets all of it back.

Source: deepspeed 0.19.8, runtime/engine.py (``save_checkpoint``, ``load_checkpoint``), runtime/zero/stage3.py and
runtime/swap_tensor/optimizer_utils.py.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed

from datastates import manifest
from datastates.checkpoint_engine import CheckpointEngine, check_committed
from datastates.errors import CheckpointNotFoundError, TopologyError

FOLDER = "offloaded_tensors"
_SWAP_NAME = re.compile(r"((?:.+-)?)(\d+)_(\d+)(\.tensor\.swp)")
"""``[<state>-]<first id>_<last id>.tensor.swp``, with the ids of the sub-group's first and last parameter."""


def is_swapping(engine: Any) -> bool:
    """Whether a DeepSpeed engine keeps optimizer states in files."""
    return bool(engine.zero_nvme_offload_optimizer())


@contextlib.contextmanager
def without_copy(engine: Any) -> Iterator[None]:
    """Inside, DeepSpeed's ``save_checkpoint`` copies no swap files, and has no tensors in place of what is swapped out.

    With ``pipeline_write`` it leaves tensors over buffers that backward uses for other things, with whatever they hold;
    without, empty ones. Here they are empty always.
    """
    _release(engine.optimizer)
    save_zero_checkpoint = engine._save_zero_checkpoint

    def save_zero_checkpoint_and_hide(*args: Any, **kwargs: Any) -> Any:
        result = save_zero_checkpoint(*args, **kwargs)
        engine.zero_nvme_offload_optimizer = lambda: False  # whoever asks next would copy
        return result

    engine._save_zero_checkpoint = save_zero_checkpoint_and_hide
    try:
        yield
    finally:
        del engine._save_zero_checkpoint
        vars(engine).pop("zero_nvme_offload_optimizer", None)


def save_swapped(engine: Any, inner: CheckpointEngine, directory: str) -> None:
    """Save this rank's swap files into an open checkpoint; returns before they are read."""
    for source, path in swap_files(engine, directory):
        inner.save_file(source, path)


def check_offload(engine: Any, load_dir: str, tag: Any) -> None:
    """Refuse a checkpoint whose swapped states the engine has no place for, or that lacks what it swaps.

    Every rank comes to the same decision, or those that go on would wait for the others.

    Raises:
        TopologyError: it was saved with another offload or by other ranks; says what to do. Nothing has been changed.
        CheckpointNotFoundError: a swap file of any rank is missing.
        CorruptCheckpointError: one has another size than was committed.
    """
    tag = manifest.read_latest(load_dir) if tag is None else str(tag)
    if tag is None or not engine.zero_optimization():
        return
    directory = os.path.join(load_dir, tag)
    if not glob.glob(os.path.join(glob.escape(directory), "*_optim_states.pt")):
        return  # no such checkpoint, or not of ZeRO: DeepSpeed says so
    record = manifest.read_commit(directory)
    for name in sorted(() if record is None else record.file_nbytes):
        if name.startswith(f"{FOLDER}/"):
            _check_there(os.path.join(directory, name))
    folder = os.path.join(directory, FOLDER)
    is_swapped = os.path.isdir(folder)
    if is_swapped != is_swapping(engine):
        raise TopologyError(
            f'{directory} was saved {"with" if is_swapped else "without"} offload_optimizer.device "nvme": '
            "load it with the offload that it was saved with"
        )
    num_ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    if is_swapped and not engine.use_node_local_storage() and len(os.listdir(folder)) != num_ranks:
        raise TopologyError(
            f"{directory} was saved by {len(os.listdir(folder))} ranks, here are {num_ranks}: with NVMe offload load it"
            " on as many"
        )


def load_checkpoint(
    engine: Any, original: Callable[..., Any], load_dir: str, tag: Any, *args: Any, **kwargs: Any
) -> Any:
    """DeepSpeed's ``load_checkpoint`` with optimizer states, then the swap files and what belongs to them.

    Raises:
        CheckpointNotFoundError: a swap file of this rank is not part of the checkpoint.
    """
    optimizer = engine.optimizer
    tag = manifest.read_latest(load_dir) if tag is None else str(tag)
    post_step = optimizer._post_step

    def post_step_and_release(*arguments: Any) -> None:
        post_step(*arguments)
        _release(optimizer)  # what is loaded next is empty, and must not be copied over what a buffer happens to hold

    engine.zero_nvme_offload_optimizer = lambda: False  # so that step counts and resident sub-groups are loaded
    optimizer._post_step = post_step_and_release
    try:
        result = original(engine, load_dir, tag, *args, **kwargs)
    finally:
        del engine.zero_nvme_offload_optimizer, optimizer._post_step
    if tag is None or result[0] is None:
        return result
    optimizer.checkpoint_event_prologue()
    _expect_moments(optimizer)
    for target, path in swap_files(engine, os.path.join(load_dir, tag)):
        _check_there(path)
        shutil.copyfile(path, target)
    optimizer.reset_swap_buffers()
    optimizer.checkpoint_event_epilogue()
    return result


def swap_files(engine: Any, directory: str) -> list[tuple[str, str]]:
    """Each file into which this rank has swapped a part of the state, and its path in a checkpoint.

    Names in a checkpoint count from the model's first parameter: other models in the process do not matter.
    """
    if not is_swapping(engine):
        return []
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    first = min(parameter.ds_id for parameter in engine.module.parameters())
    folder = os.path.join(directory, FOLDER, f"rank{rank:02d}")
    swapped = engine.optimizer.optimizer_swapper.swap_params_info.values()
    paths = [path for info in swapped for path in info.get_swap_paths()]
    return [(path, os.path.join(folder, _stable_name(os.path.basename(path), first))) for path in paths]


def _check_there(path: str) -> None:
    check_committed(path)
    if not os.path.isfile(path):
        raise CheckpointNotFoundError(f"{path} is missing from the checkpoint: restore it, or load another one")


def _release(optimizer: Any) -> None:
    """Empty the tensors that stand for swapped states; the next swap-in gives them memory again."""
    for info in optimizer.optimizer_swapper.swap_params_info.values():
        info.release_memory()


def _stable_name(name: str, first: int) -> str:
    found = _SWAP_NAME.fullmatch(name)
    if found is None:
        return name
    state, begin, end, suffix = found.groups()
    return f"{state}{int(begin) - first}_{int(end) - first}{suffix}"


def _expect_moments(optimizer: Any) -> None:
    """Let the swapper know the moments that the optimizer's loaded state names: their bytes are in swap files.

    A placeholder of full size makes it take note of a tensor, and is freed at once.
    """
    swapper = optimizer.optimizer_swapper
    for parameter in optimizer.fp32_partitioned_groups_flat:
        info = swapper.swap_params_info.get(parameter.ds_id)
        if info is None:
            continue
        for value in optimizer.optimizer.state.get(parameter, {}).values():
            if torch.is_tensor(value) and value.dim() and not value.numel():
                value.data = torch.empty(info.numel(), dtype=info.dtype())
        swapper._get_param_swap_info(parameter)
        info.release_memory()
