"""Objects that are no plain data: each a pickle of its own, its tensors and storages outside of it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from datastates.formats.pickling import REBUILDS_FROM_STORAGE, STORAGES, bytes_of, reduce_tensor, untyped
from datastates.formats.tensor_table import TensorTable
from datastates.formats.torch_names import dtype_named, torch_name
from datastates.state import alias, has_own_storage, join

_PROTOCOL = 4


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself: the first step of ``torch._tensor._rebuild_from_type_v2`` in our pickles."""
    return tensor


class ForeignPickler(pickle.Pickler):
    """Pickles one object; its tensors and storages are references into the table."""

    def __init__(
        self,
        buffer: io.BytesIO,
        table: TensorTable,
        named: Mapping[int, tuple[str, torch.Tensor]],
        fqn: str,
        is_tensor: bool,
    ) -> None:
        """Args:
        buffer: where the pickle goes.
        table: where the tensors go.
        named: tensors that containers lead to, by id.
        fqn: name of the object.
        is_tensor: the object is a tensor, so its parts change when it does; parts of others may change at any time.
        """
        super().__init__(buffer, protocol=_PROTOCOL)
        self._table = table
        self._named = named
        self._parts: dict[int, tuple[str, torch.Tensor]] = {}
        self._fqn = fqn
        self._is_tensor = is_tensor
        self._kept: list[object] = []  # temporaries of torch, whose ids must stay their own

    def persistent_id(self, value: Any) -> tuple[str, Any] | tuple[str, Any, str] | None:
        if isinstance(value, torch.Tensor):
            if has_own_storage(value) and not value.__dict__:
                return "tensor", self._table.add(value, self._name(value), self._fqn)
            return None
        if isinstance(value, STORAGES):
            return self._storage(value)
        return None

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        reduced = reduce_tensor(value)
        self._kept.append(reduced)
        fqn = self._name(value)
        if fqn is not None:
            self._mark_parts(reduced[1], fqn)
        function, args = reduced[:2]
        if function is torch._tensor._rebuild_from_type_v2 and args[0] in REBUILDS_FROM_STORAGE[:2]:
            plain = alias(value).requires_grad_(value.requires_grad)
            self._kept.append(plain)
            if fqn is not None:
                self._parts[id(plain)] = (fqn, plain)
            return function, (keep, args[1], (plain,), *args[3:])
        return reduced

    def _name(self, tensor: torch.Tensor) -> str | None:
        entry = self._named.get(id(tensor)) or self._parts.get(id(tensor))
        if entry is None:
            return self._fqn if self._is_tensor else None
        return entry[0]

    def _mark_parts(self, value: object, fqn: str) -> None:
        if isinstance(value, torch.Tensor):
            self._parts.setdefault(id(value), (fqn, value))
        elif isinstance(value, (tuple, list)):
            for part in value:
                self._mark_parts(part, fqn)
        elif type(value) is dict:
            for key, part in value.items():
                self._mark_parts(part, join(fqn, key))

    def _storage(self, value: Any) -> tuple[str, int, str]:
        is_typed = isinstance(value, torch.storage.TypedStorage)
        tensor = bytes_of(untyped(value))
        self._kept.append(tensor)
        return (
            "storage",
            self._table.add(tensor, self._fqn if self._is_tensor else None, self._fqn),
            torch_name(value.dtype) if is_typed else "",
        )


class ForeignUnpickler(pickle.Unpickler):
    """Loads what `ForeignPickler` wrote. Runs whatever code the pickle names: for trusted files only."""

    def __init__(self, data: bytes, tensor: Callable[[int], torch.Tensor]) -> None:
        """Args:
        data: the pickle.
        tensor: gives the tensor of an index in the table.
        """
        super().__init__(io.BytesIO(data))
        self._tensor = tensor

    def persistent_load(self, identity: Any) -> Any:
        tensor = self._tensor(identity[1])
        if identity[0] == "tensor":
            return tensor
        storage = tensor.untyped_storage()
        if not identity[2]:
            return storage
        dtype = dtype_named(identity[2])
        typed = torch.storage.TypedStorage
        return typed(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
