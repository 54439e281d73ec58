"""The pickle of a torch file: a state without its bytes, and the compact storages it refers to.

The pickle is what ``torch.save`` would write, except that storages are the extents of `formats.extents`.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from datastates.errors import StateError
from datastates.formats.extents import Extent, Extents, View, view_of
from datastates.formats.pickling import (
    LEGACY_STORAGES,
    PICKLE_FAILURES,
    PROTOCOL,
    REBUILDS_FROM_STORAGE,
    STORAGES,
    Reduced,
    bytes_of,
    reduce_tensor,
    unpicklable,
    untyped,
)
from datastates.state import alias, has_own_storage, is_plain, named_tensors

_COMMON = frozenset({str, int, tuple, bool, type(None), float, dict, list, OrderedDict})
_PersistentId = tuple[str, type, str, str, int]


class _StorageRef:
    """Stands in the pickle where torch has a storage; `pid` is its persistent id."""

    __slots__ = ("pid",)

    def __init__(self, pid: _PersistentId) -> None:
        self.pid = pid


def pickle_state(state: object) -> tuple[bytes, list[Extent]]:
    """Pickle a state and collect the extents it refers to, each with its key, in order of first use.

    Raises:
        StateError: a leaf cannot be pickled, or is a tensor without data; names its fqn.
    """
    named = named_tensors(state)
    extents = Extents()
    views: dict[int, View] = {}
    for fqn, tensor in named.values():
        if tensor.device.type == "meta":
            raise StateError(f"{fqn}: a tensor on the meta device has no data to save", fqn)
        if has_own_storage(tensor):
            view = view_of(tensor, fqn)
            extents.add(view)
            if type(tensor) is torch.Tensor and not tensor.__dict__:
                views[id(tensor)] = view
    extents.merge()
    try:
        pickler = _StatePickler(extents, named, views)
        data = pickler.pickle(state)
        if pickler.has_surprises:  # tensors inside other objects: now all are known, so their sharing is, too
            extents.merge()
            pickler = _StatePickler(extents, named, views)
            data = pickler.pickle(state)
    except StateError as error:
        raise (error if error.fqn else unpicklable(state, error)) from error
    except PICKLE_FAILURES as error:
        raise unpicklable(state, error) from error
    finally:
        extents.forget()
    return data, pickler.used


class _StatePickler(pickle.Pickler):
    """Pickles once; every storage becomes a reference to an extent.

    Attributes:
        used: extents in order of first use.
        has_surprises: a view was met that no extent foresaw; it got an extent of its own.
    """

    def __init__(self, extents: Extents, named: dict[int, tuple[str, torch.Tensor]], views: dict[int, View]) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=PROTOCOL)
        self.used: list[Extent] = []
        self.has_surprises = False
        self._extents = extents
        self._named = named
        self._views = views
        self._inner: dict[int, tuple[str, object]] = {}  # parts of tensor subclasses: fqn by id, kept alive
        self._own: dict[tuple[int, int, int], Extent] = {}
        self._empty: dict[str, Extent] = {}
        self._locations: dict[torch.device, str] = {}
        self._refs: dict[tuple[str, object], _StorageRef] = {}

    def pickle(self, state: object) -> bytes:
        self.dump(state)
        return self._buffer.getvalue()

    def persistent_id(self, value: object) -> _PersistentId | None:
        kind = type(value)
        if kind in _COMMON:  # called for every object of the state: nearly all are one of these
            return None
        if kind is _StorageRef:
            return value.pid  # type: ignore[attr-defined,no-any-return]
        return self._raw_storage(value).pid if isinstance(value, STORAGES) else None

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            # of the backward hooks of every tensor: what the slow OrderedDict.__reduce__ would say
            return (OrderedDict, ()) if type(value) is OrderedDict and not value else NotImplemented
        view = self._views.get(id(value))
        if view is not None:
            return self._plain(value, view)
        if is_plain(value):
            return self._plain(value, view_of(value, self._fqn(value)))
        reduced = self._compact(value, reduce_tensor(value))
        fqn = self._fqn(value)
        if fqn is not None:
            for part in _parts(reduced):
                self._inner.setdefault(id(part), (fqn, part))
        return reduced

    def _fqn(self, tensor: torch.Tensor) -> str | None:
        entry = self._named.get(id(tensor)) or self._inner.get(id(tensor))
        return entry[0] if entry else None

    def _plain(self, tensor: torch.Tensor, view: View) -> Reduced:
        if tensor.device.type == "meta":
            raise StateError("a tensor on the meta device has no data to save", view.fqn or "")
        extent = self._extent(view)
        if extent.is_packed:
            offset, stride = 0, torch._prims_common.make_contiguous_strides_for(tensor.shape)
            metadata: dict[str, bool] = {}
        else:
            offset = (view.begin - extent.begin) // tensor.itemsize if view.end > view.begin else 0
            stride = tensor.stride()
            is_resolved = not tensor.is_conj() and not tensor.is_neg()
            metadata = {} if is_resolved else torch._utils.get_tensor_metadata(tensor)  # type: ignore[no-untyped-call]
        legacy = LEGACY_STORAGES.get(tensor.dtype)
        rest: tuple[Any, ...] = (offset, tuple(tensor.shape), tuple(stride), tensor.requires_grad, OrderedDict())
        if legacy is not None and (extent.dtype is tensor.dtype or extent.nbytes == 0):
            rebuild: Callable[..., Any] = torch._utils._rebuild_tensor_v2
            reference = self._reference(extent, legacy, tensor.itemsize, tensor.device)
        else:
            rebuild = torch._utils._rebuild_tensor_v3
            reference = self._reference(extent, torch.UntypedStorage, 1, tensor.device)
            rest += (tensor.dtype,)
        return rebuild, (reference, *rest, metadata) if metadata else (reference, *rest)

    def _compact(self, tensor: torch.Tensor, reduced: Reduced) -> Reduced:
        """Replace the whole storage in torch's answer by a reference to an extent."""
        function, args = reduced[0], reduced[1]
        if function is torch._tensor._rebuild_from_type_v2:
            inner = self._compact(tensor, (args[0], args[2]))
            return function, (inner[0], args[1], inner[1], *args[3:])
        if function is torch._utils._rebuild_tensor_v2 or function is torch._utils._rebuild_tensor_v3:
            plain = alias(tensor)
            function, args = self._plain(plain, view_of(plain, self._fqn(tensor)))
            return function, (*args[:4], tensor.requires_grad, *args[5:])
        if function in REBUILDS_FROM_STORAGE:
            return function, (self._raw_storage(args[0], self._fqn(tensor)), *args[1:])
        return reduced

    def _extent(self, view: View) -> Extent:
        if view.begin == view.end:
            tensor = view.tensor
            location = self._location(tensor.device, tensor.untyped_storage())
            return self._empty.setdefault(location, Extent(0, 0, [view], dtype=view.dtype))
        found = self._extents.find(view)
        if found is not None:
            return found
        identity = (view.storage, view.begin, view.end)
        own = self._own.get(identity)
        if own is None or own.dtype is not view.dtype or own.is_packed:
            self.has_surprises = True
            self._extents.add(view)
            own = self._own[identity] = Extent(view.begin, view.end, [view], not view.is_dense, view.dtype)
        return own

    def _raw_storage(self, value: Any, fqn: str | None = None) -> _StorageRef:
        """A reference to all bytes of a storage object, ``TypedStorage`` or ``UntypedStorage``."""
        typed = isinstance(value, torch.storage.TypedStorage)
        storage = untyped(value)
        if storage.device.type == "meta":
            raise StateError("a storage on the meta device has no data to save", fqn or "")
        dtype = value.dtype if typed else torch.uint8
        extent = self._extent(View(bytes_of(storage), fqn, storage._cdata, 0, storage.nbytes(), True, dtype))
        if not typed:
            return self._reference(extent, torch.UntypedStorage, 1, storage.device)
        if extent.dtype is not dtype and extent.nbytes:
            raise StateError(f"a storage of {dtype} is shared with tensors of another dtype", fqn or "")
        kind = getattr(torch, value._pickle_storage_type())
        return self._reference(extent, kind, value._element_size(), storage.device)

    def _reference(self, extent: Extent, kind: type, itemsize: int, device: torch.device) -> _StorageRef:
        if not extent.key:
            extent.key = str(len(self.used))
            self.used.append(extent)
        reference = self._refs.get((extent.key, kind))
        if reference is None:
            location = self._location(device, extent.views[0].tensor.untyped_storage())
            pid = ("storage", kind, extent.key, location, extent.nbytes // itemsize)
            reference = self._refs[extent.key, kind] = _StorageRef(pid)
        return reference

    def _location(self, device: torch.device, storage: torch.UntypedStorage) -> str:
        location = self._locations.get(device)
        if location is None:
            location = self._locations[device] = torch.serialization.location_tag(storage)
        return location


def _parts(value: object) -> Iterator[torch.Tensor]:
    """The tensors in the arguments that torch reduced a tensor to."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from itertools.chain.from_iterable(map(_parts, value))
    elif type(value) is dict:
        yield from itertools.chain.from_iterable(map(_parts, value.values()))
