"""To a directory of ``torch.distributed.checkpoint``, written by torch's own writer in this process alone.

The format itself has dictionaries by strings, lists and values: other keys become strings, and empty dictionaries are
not in it. Source: torch/distributed/checkpoint/_traverse.py.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from datastates.conversion.places import check_place
from datastates.conversion.sources import Content, open_source
from datastates.errors import DataStatesError, StateError, StorageError
from datastates.universal.building import Conversion, Progress
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.result_folder import ResultFolder

_TORCH_WRITER = "inline_container.cc"
"""Where torch raises a RuntimeError if a file took less than was written, and forgets the OSError behind it."""


def convert_to_distributed(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    trust: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write one state as a directory that ``torch.distributed.checkpoint.load`` reads, on any number of ranks.

    ``out`` appears whole or not at all, durable. Takes twice the memory of the largest tensor. Blocks.

    Args:
        source: a file, a folder of Hugging Face, or one with a single state in it. Nothing in it is changed.
        out: the directory to be made.
        trust: load what is more than plain data, by running code of the source.
        force: replace what is at ``out``.
        progress: called with the bytes written so far and those in all.

    Raises:
        CheckpointNotFoundError: there is no such source.
        CorruptCheckpointError: a file is damaged.
        ForeignObjectError: the source holds more than plain data, and ``trust`` is not set.
        StateError: the state is no dictionary, or two of its names are the same when their parts are joined by dots.
        StorageError: ``out`` is there already, or storage refuses.
    """
    begin = time.monotonic()
    opened, target = open_source(source), os.path.abspath(os.fspath(out))
    check_place(opened.path, target, force)
    with MappedFiles(opened.path, weights_only=not trust, whole=True) as files:
        content = opened.content(files)
        files.locate()
        planner = _Planner(content, files, progress)
        with ResultFolder(target, f"distributed checkpoint of {opened.path}", replace=force) as result:
            _save(content.state, planner, result.directory, opened.path)
            files.check_unchanged()
            result.publish()
    seconds = time.monotonic() - begin
    return Conversion(target, planner.num_tensors, 0, planner.done, seconds)


def _save(state: Any, planner: _Planner, directory: str, origin: str) -> None:
    if not isinstance(state, dict):
        raise StateError(f"{origin} holds a {type(state).__name__}: a distributed checkpoint needs a dictionary")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as it is meant to be
        try:
            save(state, storage_writer=FileSystemWriter(directory), planner=planner, no_dist=True)
        except CheckpointException as error:
            raise _cause(error, directory, origin) from error


def _cause(error: CheckpointException, directory: str, origin: str) -> BaseException:
    """What torch has wrapped for all ranks, of which there is one."""
    cause = next(iter(error.failures.values()))[0]
    if "duplicated flatten key" in str(cause):
        return StateError(f"{origin}: two leaves have one name in a distributed checkpoint: {cause}")
    if isinstance(cause, OSError) and not isinstance(cause, DataStatesError):
        return StorageError(f"{directory} cannot be written: {cause.strerror}", cause.errno, directory)
    if isinstance(cause, RuntimeError) and _TORCH_WRITER in str(cause):
        message = f"{directory} cannot be written: torch met a short write, as on a full disk"
        return StorageError(message, path=directory)
    return cause


class _Planner(DefaultSavePlanner):
    """Reads each tensor when it is written."""

    def __init__(self, content: Content, files: MappedFiles, progress: Progress | None) -> None:
        super().__init__()
        self.done = 0
        self.num_tensors = 0
        self._content = content
        self._files = files
        self._progress = progress
        self._total = 0

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        tensors = [value for value in self.state_dict.values() if isinstance(value, torch.Tensor)]
        self.num_tensors, self._total = len(tensors), sum(tensor.nbytes for tensor in tensors if _is_strided(tensor))
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if not isinstance(found, torch.Tensor) or not _is_strided(found):
            return found
        made = _read(index.fqn, found, self._content.joined, self._files)
        self.done += made.nbytes
        if self._progress is not None:
            self._progress(self.done, self._total)
        return made


def _read(name: str, form: torch.Tensor, joined: Mapping[str, Any], files: MappedFiles) -> torch.Tensor:
    if name in joined:
        return torch.cat([view.reshape(-1).to(form.dtype) for view in joined[name]]).view(form.shape)
    if not form.numel():
        return torch.empty(form.shape, dtype=form.dtype, device="cpu")
    memory, position = bytearray(form.numel() * form.itemsize), 0
    for block in files.blocks(form):
        memory[position : position + len(block)] = block
        position += len(block)
    return torch.frombuffer(memory, dtype=torch.uint8).view(form.dtype).view(form.shape)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized
