"""Unpickles what consists of tensors and containers alone by the unpickler of the standard library, which is in C.

Torch's restricted unpickler is written in Python, and asks for each storage what does not change within a file: for
300,000 tensors that takes most of the time. What is let through here is less than what that one runs: two functions and
a class, by name, after all that the pickle does was read without running it.
Source: ``torch.serialization._load`` and ``torch._utils._rebuild_tensor_v2`` of torch 2.13.
"""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from datastates.contents.dtypes import STORAGE_TYPES
from datastates.contents.stub_pickle import Call, Global, StubPickle

_lock = threading.Lock()
_num_pauses = 0  # guarded by _lock
_was_enabled = False  # guarded by _lock


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Do not look for garbage during the body, in no thread; several threads may be in it at once.

    What is being loaded is all in use, and looking through it again and again takes as long as unpickling it.
    """
    global _num_pauses, _was_enabled
    with _lock:
        _num_pauses += 1
        if _num_pauses == 1:
            _was_enabled = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            _num_pauses -= 1
            if _num_pauses == 0 and _was_enabled:
                gc.enable()


class _Function:
    """Calls a function; nothing can be set on it, whatever a pickle says."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Any) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setattr__(self, name: str, _value: object) -> NoReturn:
        raise pickle.UnpicklingError(f"{name} cannot be set on a function")


def _tensor(
    storage: Any,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    metadata: Any = None,
) -> torch.Tensor:
    data = storage._untyped_storage
    nbytes = data.nbytes()
    tensor = torch.empty((0,), dtype=storage.dtype, device=data.device).set_(data, offset, shape, stride)
    if data.nbytes() != nbytes:  # torch has made it longer, by memory of any content
        raise ValueError(f"a tensor reaches beyond its storage of {nbytes} bytes")
    tensor.requires_grad = requires_grad
    if metadata:
        torch._utils.set_tensor_metadata(tensor, metadata)  # type: ignore[no-untyped-call]
    tensor._backward_hooks = hooks
    return tensor


_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_STORAGE_NAMES = STORAGE_TYPES.keys() - {"UntypedStorage"}
_ORDERED = Global("collections", "OrderedDict")
_ALLOWED: dict[Global, Any] = {
    _TENSOR: _Function(_tensor),
    _PARAMETER: _Function(torch._utils._rebuild_parameter),
    _ORDERED: OrderedDict,
}


def is_plain(pickled: StubPickle) -> bool:
    """Whether `load` may run a pickle: all that it imports and calls is harmless, and nothing asks for torch's way."""
    if torch._guards.detect_fake_mode(None) is not None or torch.serialization._serialization_tls.skip_data:
        return False
    return all(found in _ALLOWED or _is_storage(found) for found in pickled.imports) and all(
        map(_is_plain_call, pickled.calls)
    )


def _is_storage(found: Global) -> bool:
    """Whether it is but the name of a dtype. Source: ``torch.serialization._load``, ``find_class``."""
    return found.module in ("torch", "torch.storage") and found.name in _STORAGE_NAMES


def _is_plain_call(call: Call) -> bool:
    if call.is_new or call.elements:
        return False
    if call.function == _ORDERED:  # no members but those that were set one by one, whose keys are known to be small
        return call.args == () and (not call.has_state or type(call.state) is dict)
    return call.function in (_TENSOR, _PARAMETER) and not call.items and not call.has_state


def load(
    pickled: bytes,
    take: Callable[[str, int], torch.UntypedStorage],
    restore: Callable[[torch.UntypedStorage, str], torch.UntypedStorage],
) -> Any:
    """The state of a pickle that `is_plain`.

    Args:
        pickled: the pickle.
        take: gives the storage of a key and a number of bytes; is asked once for each.
        restore: brings a storage to where one that was saved at a location belongs.

    Raises:
        Exception: whatever a malformed pickle leads to.
    """
    return _Unpickler(pickled, take, restore).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, take: Callable[..., Any], restore: Callable[..., Any]) -> None:
        super().__init__(io.BytesIO(pickled), encoding="utf-8")
        self._take = take
        self._restore = restore
        self._storages: dict[str, torch.TypedStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = Global(module, name)
        if _is_storage(found):
            return torch.serialization.StorageType(name)  # type: ignore[no-untyped-call]
        if found not in _ALLOWED:
            raise pickle.UnpicklingError(f"{found} is not imported here")
        return _ALLOWED[found]

    def persistent_load(self, pid: Any) -> torch.TypedStorage:
        name, kind, key, location, numel = pid
        if name != "storage" or type(key) is not str or type(numel) is not int or numel < 0:
            raise ValueError(f"{pid!r:.80} is no reference to a storage")
        made = self._storages.get(key)
        if made is None:
            data = self._restore(self._take(key, numel * kind.dtype.itemsize), location)
            made = torch.TypedStorage(wrap_storage=data, dtype=kind.dtype, _internal=True)  # type: ignore[no-untyped-call]
            if data.data_ptr():  # those without bytes may be of several dtypes under one key
                self._storages[key] = made
        return made
