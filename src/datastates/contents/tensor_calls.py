"""The tensors in a pickle of torch, from the calls that would rebuild them.

Source: the functions of these names in ``torch/_utils.py`` and ``torch/_tensor.py``, and ``persistent_id`` in
``torch.serialization._save``, version 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from datastates.contents.dtypes import ITEMSIZES, STORAGE_TYPES
from datastates.contents.stub_pickle import Call, Global, StorageRef, objects_in

_V2, _V3 = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PLAIN = frozenset({"torch._utils._rebuild_tensor", _V2, _V3, "torch._utils._rebuild_qtensor"})
_WRAPPERS = frozenset({"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"})
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_MOST_WRAPPERS = 8  # a parameter of a subclass has three; a file may say 100,000
_ARGS_AFTER_WINDOW = {_V2: 2, _V3: 3}  # requires_grad, hooks, and the dtype


class ReachError(ValueError):
    """A tensor reaches beyond its storage."""


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """A storage as the pickle refers to it: its key, dtype, place when it was saved, and number of elements."""

    key: str
    dtype: str
    location: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES.get(self.dtype, 1)


@dataclass(frozen=True, slots=True)
class Window:
    """A strided tensor over a storage; offset and strides count elements.

    Attributes:
        is_raw: dtype and bytes say all of it: no quantizer, no conjugation, no negation.
    """

    storage: StorageInfo
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_raw: bool

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size == 0:
                return True
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def begin(self) -> int:
        """First byte within the storage."""
        return self.offset * self.itemsize

    @property
    def end(self) -> int:
        """End of the last element within the storage."""
        if 0 in self.shape:
            return self.begin
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self.begin + (reach + 1) * self.itemsize


def storage_of(reference: StorageRef) -> StorageInfo:
    """What a persistent id says.

    Raises:
        ValueError: it is none of a storage of torch.
    """
    pid = reference.pid
    if isinstance(pid, tuple) and len(pid) == 6 and pid[5] is None:
        pid = pid[:5]  # as files before torch 1.6 have it, for a storage that is no view of another
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], Global):
        raise ValueError(f"a {type(pid).__name__} is no reference to a storage")
    _, kind, key, location, numel = pid
    dtype = STORAGE_TYPES.get(kind.name)
    if dtype is None or type(numel) is not int or numel < 0 or type(key) is not str:
        raise ValueError(f"a {type(pid).__name__} is no reference to a storage")
    return StorageInfo(key, dtype, str(location), numel)


def window_of(node: Any) -> Window | None:
    """The tensor that a call would rebuild; None where it is something else, or a tensor of a foreign kind.

    Raises:
        ReachError: the tensor reaches beyond its storage.
        ValueError: the call is malformed.
    """
    for _ in range(_MOST_WRAPPERS):
        if not isinstance(node, Call) or not isinstance(node.args, tuple) or not isinstance(node.function, Global):
            return None
        name, args = str(node.function), node.args
        if name in _WRAPPERS:
            node = args[0] if args else None
        elif name == _FROM_TYPE and len(args) == 4 and isinstance(args[0], Global) and isinstance(args[2], tuple):
            node = Call(args[0], args[2])
        else:
            return _window(name, args) if name in _PLAIN else None
    raise ValueError(f"a tensor is wrapped more than {_MOST_WRAPPERS} times")


def check_reach(call: Call) -> None:
    """Look at a call that rebuilds a tensor by itself; one that is given a tensor is passed over.

    Raises:
        ReachError: the tensor reaches beyond its storage.
        ValueError: the call is malformed.
    """
    function, args = call.function, call.args
    if str(function) == _FROM_TYPE and isinstance(args, tuple) and len(args) == 4:
        function, args = args[0], args[2]
    if isinstance(function, Global) and str(function) in _PLAIN and isinstance(args, tuple):
        _window(str(function), args)


def is_parameter(node: Any) -> bool:
    """Whether a tensor comes back as a ``torch.nn.Parameter``."""
    return isinstance(node, Call) and str(node.function) in _WRAPPERS


def _window(name: str, args: tuple[Any, ...]) -> Window:
    if len(args) < 4 or not isinstance(args[0], StorageRef):
        raise ValueError(f"a call of {name} has {len(args)} arguments")
    storage, (offset, shape, stride) = storage_of(args[0]), args[1:4]
    rest = args[4:]
    dtype, is_raw = storage.dtype, name != "torch._utils._rebuild_qtensor"
    if name == _V3:
        dtype = rest[2].name if len(rest) > 2 and isinstance(rest[2], Global) else ""
    if name in _ARGS_AFTER_WINDOW and len(rest) > _ARGS_AFTER_WINDOW[name]:
        is_raw = not rest[_ARGS_AFTER_WINDOW[name]]
    sizes = _sizes(shape), _sizes(stride)
    if dtype not in ITEMSIZES or type(offset) is not int or offset < 0 or len(sizes[0]) != len(sizes[1]):
        raise ValueError(f"a call of {name} describes no tensor")
    window = Window(storage, dtype, offset, *sizes, is_raw)
    if window.end > storage.nbytes:
        raise ReachError(f"a tensor ends at byte {window.end} of a storage of {storage.nbytes}")
    return window


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, Call) and str(value.function) == "torch.Size" and isinstance(value.args, tuple):
        value = value.args[0]
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError(f"a {type(value).__name__} holds no sizes")
    return value


def storages_in(node: Any) -> Iterator[StorageInfo]:
    """All storages that a node refers to, however deep; each object is visited once.

    Raises:
        ValueError: a reference is malformed.
    """
    for found in objects_in(node):
        if isinstance(found, StorageRef):
            yield storage_of(found)
