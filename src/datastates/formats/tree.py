"""A state as a JSON tree, without pickle for plain data.

A node is a JSON null, boolean, number, string, an array (a list), or an object of one member whose name says
what it is, for example ``{"tuple": [1, 2]}`` or ``{"tensor": 7}``; `formats.tree_load` reads all of them. What
is no plain data becomes a pickle of its own, ``{"pickle": {...}}``, of which the class is on record.

Not kept: the identity of containers that occur twice, strides, and that partial views share memory.
"""

from __future__ import annotations

import collections
import datetime
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch

from datastates.errors import StateError
from datastates.formats.foreign import ForeignPickler
from datastates.formats.leaves import FACTORIES, LEAF_ENCODERS, encode_instant, has_plain_zone, string_node, to_base64
from datastates.formats.pickling import PICKLE_FAILURES, class_name, reduce_tensor, unpicklable
from datastates.formats.tensor_table import TensorTable
from datastates.formats.torch_names import torch_name
from datastates.state import has_own_storage, join

try:
    import numpy
except ImportError:  # numpy is no dependency of torch
    numpy = None  # type: ignore[assignment]

Node = Any

_EXACT = (bool, type(None))
_INLINE_ARRAY_BYTES = 64 * 1024
_ARRAY_KINDS = "biufcSUmMV?"


class TreeEncoder:
    """Turns a state into nodes; its tensors go to a `TensorTable`."""

    def __init__(self, table: TensorTable, named: Mapping[int, tuple[str, torch.Tensor]]) -> None:
        self._table = table
        self._named = named
        self._active: set[int] = set()

    def encode(self, value: Any, fqn: str = "") -> Node:
        """The node of a value.

        Raises:
            StateError: a container contains itself, or a leaf cannot be pickled; names its fqn.
        """
        kind = type(value)
        if kind in _EXACT:
            return value
        leaf = LEAF_ENCODERS.get(kind)
        if leaf is not None:
            return leaf(value)
        encoder = _ENCODERS.get(kind)
        if encoder is not None:
            return encoder(self, value, fqn)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, fqn)
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            return self._numpy(value, fqn)
        return self._foreign(value, fqn)

    def _items(self, values: Any, fqn: str, owner: object) -> list[Node]:
        self._enter(owner, fqn)
        nodes = [
            child if type(child) in _EXACT else self.encode(child, join(fqn, index))
            for index, child in enumerate(values)
        ]
        self._active.discard(id(owner))
        return nodes

    def _pairs(self, value: Any, fqn: str) -> list[list[Node]]:
        self._enter(value, fqn)
        nodes = []
        for key, child in value.items():
            child_fqn = join(fqn, key)
            nodes.append([self.encode(key, child_fqn), self.encode(child, child_fqn)])
        self._active.discard(id(value))
        return nodes

    def _enter(self, owner: object, fqn: str) -> None:
        if id(owner) in self._active:
            raise StateError(f"{fqn}: the container contains itself, which safetensors cannot hold", fqn)
        self._active.add(id(owner))

    def _list(self, value: list[Any], fqn: str) -> Node:
        return self._items(value, fqn, value)

    def _tagged_items(self, value: Any, fqn: str) -> Node:
        return {type(value).__name__: self._items(value, fqn, value)}

    def _deque(self, value: collections.deque[Any], fqn: str) -> Node:
        return {"deque": [value.maxlen, self._items(value, fqn, value)]}

    def _slice(self, value: slice, fqn: str) -> Node:
        return {"slice": self._items((value.start, value.stop, value.step), fqn, value)}

    def _instant(self, value: datetime.time | datetime.datetime, fqn: str) -> Node:
        return encode_instant(value) if has_plain_zone(value) else self._foreign(value, fqn)

    def _dict(self, value: Any, fqn: str) -> Node:
        return {type(value).__name__: self._pairs(value, fqn)}

    def _defaultdict(self, value: Any, fqn: str) -> Node:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if factory is not None and FACTORIES.get(str(name)) is not factory:
            return self._foreign(value, fqn)
        return {"defaultdict": [name, self._pairs(value, fqn)]}

    def _tensor(self, value: torch.Tensor, fqn: str) -> Node:
        if type(value) is torch.Tensor and value.__dict__.keys() == {"persistent", "_is_buffer"}:
            if has_own_storage(value):
                return {"buffer": [self._table.add(value, fqn), bool(value.persistent)]}  # type: ignore[attr-defined]
        elif has_own_storage(value) and not value.__dict__:
            return {"tensor": self._table.add(value, fqn)}
        elif type(value) is torch.Tensor and value.layout is not torch.strided and not value.requires_grad:
            return self._sparse(value, fqn)
        return self._foreign(value, fqn)

    def _sparse(self, value: torch.Tensor, fqn: str) -> Node:
        """The parts that torch takes a sparse tensor apart into."""
        function, args = reduce_tensor(value)[:2]
        if function is not torch._utils._rebuild_sparse_tensor:
            return self._foreign(value, fqn)
        layout, parts = args
        names = _SPARSE_PARTS[layout]
        nodes = [
            self.encode(part, join(fqn, name) if isinstance(part, torch.Tensor) else fqn)
            for name, part in zip(names, parts, strict=True)
        ]
        return {"sparse": [torch_name(layout), *nodes]}

    def _numpy(self, value: Any, fqn: str) -> Node:
        is_array = type(value) is numpy.ndarray
        if not is_array and not isinstance(value, numpy.generic):
            return self._foreign(value, fqn)
        dtype = value.dtype
        if dtype.kind not in _ARRAY_KINDS or dtype.fields is not None or dtype.hasobject or dtype.metadata:
            return self._foreign(value, fqn)
        data = value.tobytes()
        if not is_array:
            return {"scalar": [dtype.str, to_base64(data)]}
        if len(data) <= _INLINE_ARRAY_BYTES:
            return {"array": [dtype.str, list(value.shape), to_base64(data)]}
        return {"array": [dtype.str, list(value.shape), {"name": self._table.add_bytes(data, fqn)}]}

    def _foreign(self, value: object, fqn: str) -> Node:
        buffer = io.BytesIO()
        pickler = ForeignPickler(buffer, self._table, self._named, fqn, isinstance(value, torch.Tensor))
        try:
            pickler.dump(value)
        except PICKLE_FAILURES as error:
            if isinstance(error, StateError) and error.fqn:
                raise
            found = unpicklable(value, error)
            name = join(fqn, found.fqn) if found.fqn else fqn
            raise StateError(f"{name}: {found}", name) from error
        return {"pickle": {"class": class_name(value), "fqn": string_node(fqn), "data": to_base64(buffer.getvalue())}}


_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("indices", "values", "size", "is_coalesced"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values", "size"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values", "size"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values", "size"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values", "size"),
}

_Encoder = Callable[[TreeEncoder, Any, str], Node]
_ENCODERS: dict[type, _Encoder] = {
    list: TreeEncoder._list,
    tuple: TreeEncoder._tagged_items,
    set: TreeEncoder._tagged_items,
    frozenset: TreeEncoder._tagged_items,
    collections.deque: TreeEncoder._deque,
    slice: TreeEncoder._slice,
    datetime.datetime: TreeEncoder._instant,
    datetime.time: TreeEncoder._instant,
    dict: TreeEncoder._dict,
    collections.OrderedDict: TreeEncoder._dict,
    collections.Counter: TreeEncoder._dict,
    collections.defaultdict: TreeEncoder._defaultdict,
}
