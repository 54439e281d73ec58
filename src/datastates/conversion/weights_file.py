"""The weights of a checkpoint put together in one file."""

from __future__ import annotations

import os

import torch

from datastates.conversion.places import check_place, write_one
from datastates.conversion.sources import open_source
from datastates.conversion.weights import as_content, weights_of
from datastates.universal.building import Conversion, Progress
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.writing import OutFile


def convert_to_weights(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    key: str | None = None,
    trust: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write the weights of a model, of ZeRO 1, 2 or 3 or of any other checkpoint, as one flat file.

    With ZeRO they are what DeepSpeed's ``zero_to_fp32.py`` gives, except that all floating-point ones have ``dtype``,
    and those that are no floating-point numbers keep theirs. Tied weights are stored once; in a safetensors file the
    stock library shows the first of their names. The file appears whole or not at all, durable. Sources are compared
    with their checksums first. Takes some tens of MiB of memory whatever the size of the model, from a distributed
    checkpoint twice the largest tensor. Blocks.

    Args:
        source: a file or folder. Nothing in it is changed.
        out: the file: of safetensors where its name ends so, else of torch.
        dtype: of the floating-point weights; None: as they are stored.
        key: dotted name of the part of the state that holds the weights. None: one of the usual names, or all.
        trust: load what is more than plain data, by running code of the source; partitions of ZeRO always are.
        force: replace what is at ``out``.
        progress: called with the bytes written so far and those in all.

    Raises:
        CheckpointNotFoundError: there is no such source.
        CorruptCheckpointError: a file is missing or damaged.
        ForeignObjectError: a file holds more than plain data, and ``trust`` is not set.
        StateError: it cannot be told which tensors are the weights.
        StorageError: ``out`` is there already, there is no room, or storage refuses.
        TopologyError: the weights are spread over model-parallel ranks.
    """
    opened, target = open_source(source), os.path.abspath(os.fspath(out))
    check_place(opened.path, target, force)
    with MappedFiles(opened.path, weights_only=not trust, whole=True) as files:
        weights = weights_of(opened, files, key, dtype)
        content = as_content(weights)
        layout = "safetensors" if target.endswith(".safetensors") else "torch"
        nbytes = sum(one.nbytes for name, one in weights.items() if one.owner == name)
        file = OutFile("", content.state, content.joined, layout, nbytes=nbytes)
        return write_one(file, target, files, force=force, num_items=len(weights), progress=progress)
