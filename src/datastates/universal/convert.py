"""DeepSpeed's universal layout, straight from the files of a checkpoint.

The result holds, tensor by tensor and key by key, what DeepSpeed's ``ds_to_universal.py`` writes: one folder per
parameter under ``zero``, the common state of the optimizer, and the model files. Beyond that it takes optimizers other
than Adam, and files of the safetensors format. No intermediate files are made.
Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from datastates import reader
from datastates.storage import write_atomically
from datastates.universal.building import Conversion, Item, Progress, build, copy_item
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.merging import Merged, Rules
from datastates.universal.names import checkpoint_folder
from datastates.universal.shards import WEIGHT, Shards
from datastates.universal.source import ZeroCheckpoint
from datastates.universal.writing import OutFile

LATEST_NAME = "latest_universal"
"""Beside the result: names it, for DeepSpeed's ``load_universal``. Source: ``DeepSpeedEngine.load_checkpoint``."""

_PARAM = "param"
_COMMON_NAME = "zero/optimizer_state.pt"
_SHARDED_KEYS = frozenset({"base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups"})


def convert_to_universal(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write a ZeRO 1, 2 or 3 checkpoint, also of a pipeline, in DeepSpeed's universal layout.

    ``out`` appears whole or not at all, durable, and ``latest_universal`` beside it names it then. A killed conversion
    is taken up by the next one of the same checkpoint to the same place: finished parameters are compared with
    their checksums and kept. Memory is a few MiB per worker whatever the size of the model, with tensor parallelism
    one parameter per worker; no space but that of the result is taken. Blocks; the pickles in the files are executed.

    Args:
        checkpoint: the folder of one checkpoint, or one that has ``latest`` in it. Nothing in it is changed.
        out: the folder to be made. Nothing may be there.
        num_workers: threads; None: as many as there are processors, at most 8.
        progress: called with the bytes written so far and those in all; from the workers, one call at a time.

    Raises:
        CheckpointNotFoundError: there is no checkpoint of ZeRO, or it was never completed.
        CorruptCheckpointError: a file is missing, damaged, or does not fit the others.
        TopologyError: it is of a kind that is not taken apart here; says what to do instead.
        StorageError: ``out`` is there already, there is no room, or storage refuses.
    """
    folder, target = checkpoint_folder(os.fspath(checkpoint)), os.path.abspath(os.fspath(out))
    with MappedFiles(folder) as files:
        items = list(_items(ZeroCheckpoint(folder, files), files))
        done = build(items, target, f"universal of {folder}", files, num_workers, progress)
    write_atomically(os.path.join(os.path.dirname(target), LATEST_NAME), os.fsencode(os.path.basename(target)))
    return done


def _items(checkpoint: ZeroCheckpoint, files: MappedFiles) -> Iterator[Item]:
    checkpoint.check_kind()
    rules = Rules(checkpoint.universal_info, checkpoint.directory)
    degree = checkpoint.num_tensor_parallel
    shards = [checkpoint.shards(mp) for mp in range(checkpoint.num_model_parallel)]
    done: set[str] = set()
    for stage in range(checkpoint.num_pipeline):
        slices = shards[stage * degree : (stage + 1) * degree]
        for name in slices[0].names:
            if name not in done and not (stage and rules.is_replicated_in_pipeline(name)):
                done.add(name)
                yield _parameter(name, slices, rules, is_bare=checkpoint.stage > 2 and degree == 1)
    if checkpoint.stage <= 2:
        yield from _untrained(checkpoint, done)
    yield _common_state(checkpoint)
    for rank in sorted(checkpoint.names.model):
        yield _model_file(checkpoint, checkpoint.names.model[rank], files)


def _parameter(name: str, slices: list[Shards], rules: Rules, *, is_bare: bool) -> Item:
    """The files of one parameter; ``is_bare``: as flat tensors, which is how ZeRO 3 wants them."""
    keys = slices[0].keys(name)
    for shards in slices:  # what does not fit is told before anything is written
        for key in keys:
            shards.views(name, key)
    step = slices[0].step(name)
    numel = sum(shards.shapes[name].numel() for shards in slices)

    def make() -> Iterator[OutFile]:
        for key in keys:
            merged = rules.merge(name, key, slices)
            yield _state_file(f"zero/{name}/{key}.pt", merged, is_bare=is_bare)
        if step is not None and not is_bare:
            yield OutFile(f"zero/{name}/step.pt", step)

    return Item(f"zero/{name}", numel * len(keys) * 4, make)


def _state_file(path: str, merged: Merged, *, is_bare: bool) -> OutFile:
    dtype = merged.views[0].dtype
    if is_bare:
        return OutFile(path, torch.empty(merged.shape.numel(), dtype=dtype), {"": merged.views})
    form = torch.empty(merged.shape, dtype=dtype)
    return OutFile(path, {**merged.notes, _PARAM: form}, {_PARAM: merged.views})


def _untrained(checkpoint: ZeroCheckpoint, done: set[str]) -> Iterator[Item]:
    """What the model has and the optimizer has not, buffers and frozen parameters, as fp32 weights."""
    for mp in range(checkpoint.num_model_parallel):
        module = checkpoint.model_state(0, mp).get("module")
        for name, tensor in (module or {}).items():
            if isinstance(tensor, torch.Tensor) and name not in done:
                done.add(name)
                yield _as_weight(name, tensor.detach())


def _as_weight(name: str, tensor: torch.Tensor) -> Item:
    def make() -> Iterator[OutFile]:
        form = torch.empty(tensor.shape, dtype=torch.float32)
        yield OutFile(f"zero/{name}/{WEIGHT}.pt", {_PARAM: form}, {_PARAM: [tensor.reshape(-1)]})

    return Item(f"zero/{name}", tensor.numel() * 4, make)


def _common_state(checkpoint: ZeroCheckpoint) -> Item:
    first = checkpoint.optimizer_state(0, 0)
    state = _common_of_zero3(first) if checkpoint.stage > 2 else _common_of_zero12(first, checkpoint.num_data_parallel)
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in _tensors(state))
    return Item(_COMMON_NAME, nbytes, lambda: iter([OutFile(_COMMON_NAME, state)]))


def _common_of_zero12(first: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """All that is not split; the counts say that nothing is padded."""
    state = {key: value for key, value in first.items() if key not in _SHARDED_KEYS}
    if first.get("group_paddings"):
        state["group_paddings"] = [0] * len(first["group_paddings"])
    if first.get("partition_count"):
        state["partition_count"] = [num_ranks] * len(first["partition_count"])
    base = first["base_optimizer_state"]
    if "param_groups" in base:
        state["param_groups"] = base["param_groups"]
    return state


def _common_of_zero3(first: dict[str, Any]) -> dict[str, Any]:
    """All of rank 0, its partition included, as DeepSpeed writes it: its loader takes the step from there."""
    return {**first, "param_groups": first["optimizer_state_dict"]["param_groups"]}


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _tensors(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _tensors(value)


def _model_file(checkpoint: ZeroCheckpoint, name: str, files: MappedFiles) -> Item:
    """A model file as it is; one of the safetensors format as a torch file."""
    path = checkpoint.names.path(name)
    if reader.format_of(path) == "safetensors":
        state = files.load(path)
        return Item(name, os.path.getsize(path), lambda: iter([OutFile(name, state)]))
    return copy_item(name, path)
