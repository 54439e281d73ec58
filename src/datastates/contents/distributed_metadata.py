"""The metadata of a checkpoint of ``torch.distributed.checkpoint``: nothing of it is run or imported.

Source: the classes in torch/distributed/checkpoint/metadata.py and ``_StorageInfo`` in filesystem.py, torch 2.13.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from datastates.contents.dtypes import ITEMSIZES
from datastates.contents.stub_pickle import Call, Global, read_pickle
from datastates.errors import CorruptCheckpointError
from datastates.reading import FileReader

METADATA_NAME = ".metadata"
SUFFIX = ".distcp"
"""Of the files that the metadata describe."""

_MODULE = "torch.distributed.checkpoint.metadata"
_TENSOR, _BYTES = f"{_MODULE}.TensorStorageMetadata", f"{_MODULE}.BytesStorageMetadata"
_FAILURES = (AttributeError, IndexError, KeyError, TypeError, ValueError, pickle.UnpicklingError)


@dataclass(frozen=True, slots=True)
class Kind:
    """A name of the state: dtype and whole shape of a tensor; no dtype for an object."""

    dtype: str | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk of a tensor, or an object, lies: the name of the file, and the bytes of it."""

    fqn: str
    file: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class DistributedMetadata:
    """What the metadata say.

    Attributes:
        kinds: by name, in the order of the state.
        places: of all chunks and objects.
    """

    kinds: dict[str, Kind]
    places: tuple[Place, ...]


def read_distributed(file: FileReader) -> DistributedMetadata:
    """Read a file of metadata.

    Raises:
        CorruptCheckpointError: it is malformed.
        StorageError: it cannot be read.
    """
    try:
        fields = read_pickle(file.read(0, file.nbytes)).state
        kinds = {str(fqn): _kind(str(fqn), entry) for fqn, entry in fields["state_dict_metadata"].items()}
        places = tuple(_place(index.state, info.state) for index, info in fields["storage_data"].items())
        return DistributedMetadata(kinds, places)
    except _FAILURES as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(f"{file.path} cannot be read: {error!s:.200}", file.path) from error


def _kind(fqn: str, entry: Any) -> Kind:
    name = str(entry.function) if isinstance(entry, Call) else ""
    if name == _BYTES:
        return Kind(None, ())
    if name != _TENSOR:
        raise ValueError(f"{fqn} is a {name or type(entry).__name__}")
    return Kind(_dtype(entry.state["properties"]), _size(entry.state["size"]))


def _place(index: dict[str, Any], info: dict[str, Any]) -> Place:
    begin, length = info["offset"], info["length"]
    if type(begin) is not int or type(length) is not int or min(begin, length) < 0:
        raise ValueError(f"{index['fqn']} lies at {begin!r} and is {length!r} long")
    return Place(str(index["fqn"]), str(info["relative_path"]), begin, begin + length)


def _dtype(properties: Any) -> str:
    found = properties.state[0]
    if not isinstance(found, Global) or found.name not in ITEMSIZES:
        raise ValueError(f"{found} is no dtype")
    return found.name


def _size(found: Any) -> tuple[int, ...]:
    sizes = found.args[0]
    if not isinstance(sizes, tuple) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes!r} are no sizes")
    return sizes
