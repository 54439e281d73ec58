"""What both formats need of pickle: errors that name the leaf, and tensors taken apart."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from datastates.errors import StateError
from datastates.state import children, has_its_bytes, has_own_storage, join

#: Source: ``torch.serialization.DEFAULT_PROTOCOL``.
PROTOCOL = 2

#: What ``__reduce__`` and ``__getstate__`` of other people's objects raise when they cannot be pickled.
PICKLE_FAILURES = (
    pickle.PickleError,
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)

#: Rebuild functions of torch whose first two arguments are a storage and the offset into it.
REBUILDS_FROM_STORAGE = (
    torch._utils._rebuild_tensor_v2,
    torch._utils._rebuild_tensor_v3,
    torch._utils._rebuild_qtensor,
)

#: The class that stands in a pickle for a storage of a dtype; dtypes that came later have none.
LEGACY_STORAGES: dict[torch.dtype, type] = {
    dtype: getattr(torch, name) for dtype, name in torch.storage._dtype_to_storage_type_map().items()
}

STORAGES = (torch.storage.TypedStorage, torch.storage.UntypedStorage)

Reduced = tuple[Any, ...]


def class_name(value: object) -> str:
    """Module and qualified name of the class of an object."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def untyped(storage: torch.storage.TypedStorage | torch.UntypedStorage) -> torch.UntypedStorage:
    """What is below a storage object of torch, of either kind."""
    return storage._untyped_storage if isinstance(storage, torch.storage.TypedStorage) else storage


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as a tensor over the same memory."""
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return tensor.set_(storage, 0, (storage.nbytes(),), (1,))


def reduce_tensor(tensor: torch.Tensor) -> Reduced:
    """torch's own way to take a tensor apart.

    Raises:
        StateError: the tensor is on the ``meta`` device: it has no bytes to save.
    """
    if tensor.device.type == "meta":
        raise StateError(f"a tensor of shape {tuple(tensor.shape)} is on the meta device and has no data to save")
    reduced: Reduced = tensor.__reduce_ex__(PROTOCOL)  # type: ignore[no-untyped-call]
    return reduced


def check_has_bytes(tensor: torch.Tensor, fqn: str) -> None:
    """Raise StateError where a tensor's storage is shorter than the tensor: what lies there belongs to others."""
    if not has_its_bytes(tensor):
        found = tensor.untyped_storage().nbytes()
        raise StateError(
            f"{fqn or 'a tensor'} of shape {tuple(tensor.shape)} has a storage of {found} bytes, too short for it: it"
            " was freed or shrunk; save it before that, or take it out of the state",
            fqn,
        )


class _Sink(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


class _Probe(pickle.Pickler):
    """Pickles into nothing; tensors and storages weigh nothing."""

    def persistent_id(self, value: object) -> str | None:
        if isinstance(value, torch.Tensor):
            if value.device.type == "meta":
                raise StateError("meta tensor")
            if has_own_storage(value):
                check_has_bytes(value, "")
            return ""
        return "" if isinstance(value, STORAGES) else None


def _failure(value: object) -> Exception | None:
    try:
        _Probe(_Sink(), protocol=PROTOCOL).dump(value)
    except PICKLE_FAILURES as error:
        return error
    return None


def unpicklable(state: object, error: Exception) -> StateError:
    """The error for a state of which pickling raised ``error``: names the leaf that is to blame."""
    fqn, node, cause = "", state, error
    visited: set[int] = set()
    while id(node) not in visited:
        visited.add(id(node))
        for key, child in children(node):
            failure = _failure(key) or _failure(child)
            if failure is not None:
                fqn, node, cause = join(fqn, key), child, failure
                break
    message = f"{fqn or 'the state'} ({class_name(node)}) cannot be saved: {cause}; take it out of the state"
    return StateError(message, fqn)
