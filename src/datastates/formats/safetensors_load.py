"""From a safetensors file back to the state: ours with its tree, anybody's as a flat dictionary."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from datastates.errors import CorruptCheckpointError, ForeignObjectError
from datastates.formats.dtypes import SAFETENSORS_DTYPES
from datastates.formats.safetensors import METADATA_KEY, TREE_VERSION
from datastates.formats.safetensors_header import LENGTH_BYTES, Entry, Header, header_length, parse_header
from datastates.formats.torch_names import dtype_named
from datastates.formats.tree_load import TreeDecoder

RestoreLocation = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]

#: What a tree raises while it is decoded, if it is not one of ours or was changed.
_TREE_FAILURES = (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)


def load_safetensors(descriptor: int, path: str, restore: RestoreLocation, weights_only: bool) -> Any:
    """Read the whole file into new memory.

    Args:
        descriptor: open for reading; stays the caller's.
        path: for messages.
        restore: moves a storage to its device, as ``torch.load`` does for a ``map_location``.
        weights_only: refuse objects that are no plain data.

    Raises:
        CorruptCheckpointError: the file's structure is wrong or bytes are missing.
        ForeignObjectError: an object that is no plain data fails to load, or ``weights_only`` is set.
    """
    file_nbytes = os.fstat(descriptor).st_size
    length = header_length(os.pread(descriptor, LENGTH_BYTES, 0), file_nbytes, path)
    text = bytearray(length)
    read_into(descriptor, memoryview(text), LENGTH_BYTES, path)
    header = parse_header(bytes(text), file_nbytes, path)
    tensors = _Tensors(descriptor, path, header, restore)
    ours = header.metadata.get(METADATA_KEY)
    if ours is None:
        return {name: tensors.foreign(entry) for name, entry in header.entries.items()}
    tree = _tree(ours, tensors, path)
    tensors.describe(tree["tensors"])
    try:
        return TreeDecoder(tensors.ours, tensors.raw, weights_only).decode(tree["root"])
    except (CorruptCheckpointError, ForeignObjectError):
        raise
    except _TREE_FAILURES as error:
        raise _bad_tree(path, error) from error


def read_into(descriptor: int, view: memoryview, offset: int, path: str) -> None:
    """Fill ``view`` from the file; large positional reads, repeated while they come back short.

    Raises:
        CorruptCheckpointError: the file ends before.
    """
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise CorruptCheckpointError(
                f"{path}: the file ends at {offset + done}, expected {len(view) - done} more bytes; it is incomplete",
                path,
                offset=offset + done,
            )
        done += count


@dataclass(frozen=True, slots=True)
class _Record:
    """A tensor as the tree describes it."""

    entry: Entry
    dtype: torch.dtype
    shape: list[int]
    device: str
    requires_grad: bool
    is_parameter: bool


class _Tensors:
    """The tensors of one file; equal names share their memory."""

    def __init__(self, descriptor: int, path: str, header: Header, restore: RestoreLocation) -> None:
        self._descriptor = descriptor
        self._path = path
        self._header = header
        self._restore = restore
        self._records: list[_Record] = []
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._made: dict[int, torch.Tensor] = {}

    def describe(self, records: list[dict[str, Any]]) -> None:
        """Take over the tree's table of tensors, and read their bytes in the order of the file."""
        try:
            self._records = [self._record(record) for record in records]
        except _TREE_FAILURES as error:
            raise _bad_tree(self._path, error) from error
        for record in sorted(self._records, key=lambda record: record.entry.begin):
            self._storage(record.entry, record.device)

    def ours(self, index: int) -> torch.Tensor:
        """The tensor of a record of the tree."""
        made = self._made.get(index)
        if made is None:
            record = self._records[index]
            made = _window(self._storage(record.entry, record.device), record.dtype, record.shape)
            if record.is_parameter:
                made = torch.nn.Parameter(made, requires_grad=record.requires_grad)
            elif record.requires_grad:
                made.requires_grad_(True)
            self._made[index] = made
        return made

    def foreign(self, entry: Entry) -> torch.Tensor:
        """The tensor of an entry that no tree describes."""
        dtype = SAFETENSORS_DTYPES[entry.dtype][1]
        if dtype is None:
            raise CorruptCheckpointError(
                f"{self._path}: tensor {entry.name!r} is {entry.dtype}, which torch {torch.__version__} cannot hold",
                self._path,
                entry.name,
                entry.begin,
            )
        shape = list(entry.shape)
        if entry.dtype == "F4":
            if not shape or shape[-1] % 2:
                raise CorruptCheckpointError(
                    f"{self._path}: tensor {entry.name!r} of F4 has shape {shape}, expected an even last dimension",
                    self._path,
                    entry.name,
                    entry.begin,
                )
            shape[-1] //= 2
        return _window(self._storage(entry, "cpu"), dtype, shape)

    def raw(self, name: str) -> bytearray:
        """The bytes of an entry."""
        entry = self._header.entries[name]
        data = bytearray(entry.end - entry.begin)
        read_into(self._descriptor, memoryview(data), entry.begin, self._path)
        return data

    def _record(self, record: dict[str, Any]) -> _Record:
        entry, dtype = self._header.entries[record["name"]], dtype_named(record["dtype"])
        found, expected = entry.end - entry.begin, torch.Size(record["shape"]).numel() * dtype.itemsize
        if found != expected:
            raise ValueError(f"{entry.name!r} has {found} bytes, the tree expects {expected}")
        flags = bool(record.get("requires_grad")), bool(record.get("parameter"))
        return _Record(entry, dtype, record["shape"], str(record["device"]), *flags)

    def _storage(self, entry: Entry, location: str) -> torch.UntypedStorage:
        storage = self._storages.get(entry.name)
        if storage is None:
            nbytes = entry.end - entry.begin
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            if nbytes:
                raw = (ctypes.c_uint8 * nbytes).from_address(buffer.data_ptr())
                read_into(self._descriptor, memoryview(raw).cast("B"), entry.begin, self._path)
            storage = self._storages[entry.name] = self._restore(buffer.untyped_storage(), location)
        return storage


def _window(storage: torch.UntypedStorage, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, 0, shape, torch.empty(shape, device="meta").stride())


def _tree(text: str, tensors: _Tensors, path: str) -> dict[str, Any]:
    """The tree, from the metadata or from the tensor that the metadata names."""
    try:
        tree = json.loads(text)
        _check_version(tree, path)
        if "tensor" in tree:
            tree = json.loads(tensors.raw(tree["tensor"]))
            _check_version(tree, path)
        if not isinstance(tree["tensors"], list):
            raise TypeError("the table of tensors is no list")
        tree["root"]
    except CorruptCheckpointError:
        raise
    except _TREE_FAILURES as error:
        raise _bad_tree(path, error) from error
    return tree  # type: ignore[no-any-return]


def _check_version(tree: Any, path: str) -> None:
    if tree["version"] != TREE_VERSION:
        raise CorruptCheckpointError(
            f"{path}: the tree has version {tree['version']!r}, this datastates reads {TREE_VERSION}; "
            "load it with the version that wrote it",
            path,
        )


def _bad_tree(path: str, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: the tree of the state is malformed ({error}); the file is damaged", path)
