"""What lies at a path: a file, a folder of files, shards of Hugging Face, or a distributed checkpoint of torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from datastates import reader
from datastates.contents.distributed_metadata import METADATA_NAME
from datastates.conversion.distributed_reading import DistributedCheckpoint
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, ForeignObjectError, StateError
from datastates.system_calls import storage_errors
from datastates.universal.mapped_files import MappedFiles
from datastates.universal.names import Names, checkpoint_folder, is_model_file, read_names

INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Which weight lies in which file. Source: ``SAFE_WEIGHTS_INDEX_NAME`` and ``WEIGHTS_INDEX_NAME`` of transformers."""

WHOLE_NAMES = ("model.safetensors", "pytorch_model.bin")
CONFIG_NAME = "config.json"

_NAMES_SHOWN = 8


class Kind(Enum):
    """What lies at a path."""

    FILE = "a file"
    FOLDER = "a folder of files"
    HUGGINGFACE = "a folder of Hugging Face"
    DISTRIBUTED = "a checkpoint of torch.distributed.checkpoint"


@dataclass(frozen=True)
class Content:
    """A state of which the tensors' bytes are read when they are written.

    Attributes:
        state: nested; its tensors are mapped or mere forms.
        joined: by fqn of a form, the one-dimensional tensors that give its elements, made when they are asked for.
    """

    state: Any
    joined: Mapping[str, Iterable[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Something to be converted.

    Attributes:
        path: absolute; the checkpoint's folder where ``latest`` has led to it.
        kind: what it is.
    """

    path: str
    kind: Kind

    @property
    def directory(self) -> str:
        """The folder that it is, or lies in."""
        return os.path.dirname(self.path) if self.kind is Kind.FILE else self.path

    def names(self) -> Names:
        """The files of a folder."""
        return read_names(self.path)

    def content(self, files: MappedFiles) -> Content:
        """The one state that it holds. Compares the files with their checksums first.

        Args:
            files: loads them, and owns what is mapped.

        Raises:
            CheckpointNotFoundError: there is nothing in it.
            CorruptCheckpointError: a file is missing or damaged.
            ForeignObjectError: a file holds more than plain data, and ``files`` may load only that.
            StateError: it holds several states.
        """
        if self.kind is Kind.DISTRIBUTED:
            checkpoint = DistributedCheckpoint(self.path, weights_only=files.weights_only)
            return Content(checkpoint.state, checkpoint.joined)
        if self.kind is Kind.HUGGINGFACE:
            return Content(self._shards(files))
        return Content(load_checked(self.path if self.kind is Kind.FILE else self._only_file(), files))

    def _shards(self, files: MappedFiles) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name in shard_names(self.path):
            state = load_checked(os.path.join(self.path, name), files)
            if not isinstance(state, dict):
                raise StateError(f"{os.path.join(self.path, name)} holds a {type(state).__name__}, expected weights")
            found.update(state)
        return found

    def _only_file(self) -> str:
        """The file that is meant when a folder is to be one state: the one of the model, or the only one."""
        names = self.names()
        readable = [name for name in names.all if format_of(names.path(name)) is not None]
        models = [name for name in readable if is_model_file(name)]
        chosen = readable if len(readable) == 1 else models
        if len(chosen) == 1:
            return names.path(chosen[0])
        if not readable:
            raise CheckpointNotFoundError(f"{self.path} holds no file of torch or safetensors")
        shown = ", ".join(readable[:_NAMES_SHOWN]) + (", ..." if len(readable) > _NAMES_SHOWN else "")
        raise StateError(f"{self.path} holds {len(readable)} states, name the file that is meant: {shown}")


def open_source(path: str | os.PathLike[str]) -> Source:
    """Look what lies at a path; a folder with ``latest`` in it means the checkpoint that it names.

    Raises:
        CheckpointNotFoundError: there is nothing.
    """
    path = os.path.abspath(os.fspath(path))
    if os.path.isfile(path):
        return Source(path, Kind.FILE)
    if not os.path.isdir(path):
        raise CheckpointNotFoundError(f"there is no file and no folder {path}")
    path = checkpoint_folder(path)
    if os.path.isfile(os.path.join(path, METADATA_NAME)):
        return Source(path, Kind.DISTRIBUTED)
    has_index = any(os.path.isfile(os.path.join(path, name)) for name in INDEX_NAMES)
    has_whole = any(os.path.isfile(os.path.join(path, name)) for name in WHOLE_NAMES)
    has_config = os.path.isfile(os.path.join(path, CONFIG_NAME))
    return Source(path, Kind.HUGGINGFACE if has_index or (has_whole and has_config) else Kind.FOLDER)


def format_of(path: str) -> str | None:
    """As `reader.format_of`; None for something else that belongs to a checkpoint."""
    try:
        return reader.format_of(path)
    except CorruptCheckpointError:
        return None


def load_checked(path: str, files: MappedFiles) -> Any:
    """The state of a file, its tensors mapped where they can be, after all of it was compared with its checksums.

    Raises:
        CorruptCheckpointError: it is damaged.
        ForeignObjectError: it holds more than plain data, and ``files`` may load only that.
    """
    reader.verify(path)
    try:
        return files.load(path)
    except ForeignObjectError as error:
        raise untrusted(path, error) from error


def untrusted(path: str, error: ForeignObjectError) -> ForeignObjectError:
    """The error for a file with objects, as it concerns a conversion."""
    return ForeignObjectError(
        f"{path}: {error.fqn or 'the state'} holds {error.class_name or 'an object'}, which loads only by running code:"
        " pass trust=True (--trust) if you trust whoever made it",
        error.fqn,
        error.class_name,
    )


def shard_names(directory: str) -> list[str]:
    """The names of the weight files in a folder of Hugging Face, in order.

    Raises:
        CorruptCheckpointError: the index is malformed, or names a file outside of the folder, or one that is missing.
    """
    for index_name in INDEX_NAMES:
        path = os.path.join(directory, index_name)
        if os.path.isfile(path):
            names = _indexed(path)
            break
    else:
        names = [next(name for name in WHOLE_NAMES if os.path.isfile(os.path.join(directory, name)))]
    missing = [name for name in names if not os.path.isfile(os.path.join(directory, name))]
    if missing:
        raise CorruptCheckpointError(f"{directory}: the index names {missing[0]}, which is missing", directory)
    return names


def _indexed(path: str) -> list[str]:
    try:
        with storage_errors("read", path), open(path, encoding="utf-8") as file:
            weight_map = json.load(file)["weight_map"]
        names = sorted(set(weight_map.values()))
        strange = [name for name in names if os.path.basename(name) != name or name.startswith(".")]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} is no index of weights: {error!s:.200}", path) from error
    if strange or not names:
        raise CorruptCheckpointError(
            f"{path} names {strange[0]!r}, no file beside it" if strange else f"{path} is empty"
        )
    return names
