"""The tensors of a safetensors file: their names, and which of them are the same bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from datastates.contents.safetensors_header import METADATA_NAME
from datastates.contents.state_tree import PAD_NAME, TREE_NAME
from datastates.errors import StateError
from datastates.formats.dtypes import SAFETENSORS_NAMES
from datastates.formats.image import Block, capture_block, lazy_block
from datastates.formats.pickling import check_has_bytes
from datastates.formats.torch_names import torch_name
from datastates.state import Capture, IsEager, join

_UNNAMED = "tensor"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the file: its name, safetensors dtype and shape, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    block: Block


class TensorTable:
    """Gives every tensor an index (records, for the tree) and every distinct one a place in the file.

    Attributes:
        records: per index what is needed to make the tensor again from the stored bytes.
        stored: what the file holds.
    """

    def __init__(self, capture: Capture, is_eager: IsEager) -> None:
        self.records: list[dict[str, Any]] = []
        self.stored: list[Stored] = []
        self._capture = capture
        self._is_eager = is_eager
        self._indices: dict[int, tuple[int, torch.Tensor]] = {}  # by id; holds the tensor, so that ids stay unique
        self._places: dict[tuple[Any, ...], int] = {}  # position in `stored`, by window and storage
        self._locations: dict[torch.device, str] = {}
        self._names = {METADATA_NAME, TREE_NAME, PAD_NAME}

    def add(self, tensor: torch.Tensor, fqn: str | None, owner: str = "") -> int:
        """Index of a tensor that has its own storage.

        ``fqn`` is None where no container leads to it; then it is named after its ``owner``. The same object
        gets the same index, an equal window on the same storage the same bytes.
        """
        known = self._indices.get(id(tensor))
        if known is not None:
            return known[0]
        if tensor.device.type == "meta":
            raise StateError(f"{fqn}: a tensor on the meta device has no data to save", fqn or "")
        check_has_bytes(tensor, fqn or owner)
        stored = self._store(tensor, fqn, owner)
        record: dict[str, Any] = {
            "name": stored.name,
            "dtype": torch_name(tensor.dtype),
            "shape": list(tensor.shape),
            "device": self._location(tensor),
        }
        if tensor.requires_grad:
            record["requires_grad"] = True
        if isinstance(tensor, torch.nn.Parameter):
            record["parameter"] = True
        index = len(self.records)
        self.records.append(record)
        self._indices[id(tensor)] = (index, tensor)
        return index

    def add_bytes(self, data: bytes, fqn: str) -> str:
        """Store bytes as a one-dimensional U8 tensor; returns its name."""
        stored = Stored(self._unique(fqn), "U8", (len(data),), 1, Block(len(data), data, fqn))
        self.stored.append(stored)
        return stored.name

    def _store(self, tensor: torch.Tensor, fqn: str | None, owner: str) -> Stored:
        key = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        place = self._places.get(key)
        if place is not None:
            return self.stored[place]
        shape, name = tuple(tensor.shape), SAFETENSORS_NAMES.get(tensor.dtype)
        if name is None:
            shape += (tensor.itemsize,)
        source = tensor.detach() if tensor.requires_grad else tensor
        if fqn is None or self._is_eager(fqn, tensor):
            block = capture_block(source, fqn or "", self._capture)
        else:
            block = lazy_block(source, fqn)
        stored = Stored(
            self._unique(join(owner, _UNNAMED) if fqn is None else fqn), name or "U8", shape, tensor.itemsize, block
        )
        self._places[key] = len(self.stored)
        self.stored.append(stored)
        return stored

    def _location(self, tensor: torch.Tensor) -> str:
        location = self._locations.get(tensor.device)
        if location is None:
            location = self._locations[tensor.device] = torch.serialization.location_tag(tensor.untyped_storage())
        return location

    def _unique(self, fqn: str) -> str:
        """A readable name that no other tensor has: a JSON string must not hold lone surrogates."""
        base = (fqn or _UNNAMED).encode("utf-8", "backslashreplace").decode()
        name, count = base, 0
        while name in self._names:
            count += 1
            name = f"{base}~{count}"
        self._names.add(name)
        return name


def in_file_order(stored: Iterable[Stored]) -> list[Stored]:
    """Pending ones first, so that ``eager_end`` is small; each group by falling item size, so that all align.

    Captured bytes of one item size stand together.
    """
    return sorted(stored, key=lambda one: (not one.block.is_pending, -one.itemsize, not one.block.is_literal))
