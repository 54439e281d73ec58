"""Compact storages: which bytes of a state's storages its tensors need.

A slice of a flat buffer must not drag the buffer into the file, and tied weights must stay tied. So the dense
views of one storage are merged where they overlap; each merged byte range, an *extent*, becomes a storage of
its own in the file. A view with holes (``x[::1000]``) that lies in no extent is *packed*: its elements are stored
row-major, shared with equal views only.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import torch

from datastates.formats.pickling import check_has_bytes
from datastates.state import alias

_Key = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]


@dataclass(slots=True)
class View:
    """A strided window over a storage.

    Attributes:
        tensor: the tensor; held, so that its storage's address stays its own.
        fqn: dotted name; None when the tensor was not reached through containers.
        storage: address of the storage object, which identifies it.
        begin: first byte within the storage.
        end: end of the last element within the storage; ``begin`` where there is no element.
        is_dense: no byte of ``[begin, end)`` lies between elements.
        dtype: what the bytes are read as; differs from the tensor's for quantized storages only.
        extent: where it lies, set by `Extents.merge`.
    """

    tensor: torch.Tensor
    fqn: str | None
    storage: int
    begin: int
    end: int
    is_dense: bool
    dtype: torch.dtype
    extent: Extent | None = None


@dataclass(slots=True, eq=False)
class Extent:
    """A byte range of one storage that becomes a storage in the file.

    Attributes:
        begin: first byte within the original storage.
        end: end within the original storage.
        views: the views that need it, at least one.
        is_packed: the bytes are the row-major elements of ``views[0]`` instead, ``end - begin`` of no meaning.
        dtype: dtype of all its views, None where they differ.
        key: name of the storage in the file, empty as long as nothing refers to it.
    """

    begin: int
    end: int
    views: list[View]
    is_packed: bool = False
    dtype: torch.dtype | None = None
    key: str = ""

    @property
    def nbytes(self) -> int:
        if self.is_packed:
            tensor = self.views[0].tensor
            return tensor.numel() * tensor.itemsize
        return self.end - self.begin

    def source(self) -> torch.Tensor:
        """A detached tensor whose row-major elements are the bytes; shares the version of a view."""
        widest = self.views[0]
        if len(self.views) > 1:
            widest = max(self.views, key=lambda view: view.end - view.begin)
        tensor = widest.tensor
        if tensor.requires_grad or type(tensor) is not torch.Tensor:
            tensor = alias(tensor)
        if self.is_packed:
            return tensor
        is_whole = widest.begin == self.begin and widest.end == self.end
        if is_whole and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        return _flat(alias(tensor), widest, self.begin, self.end)


@dataclass(slots=True)
class _Storage:
    extents: list[Extent] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    packed: dict[_Key, Extent] = field(default_factory=dict)


class Extents:
    """Collects views, merges them on `merge`, and then says where a view lies.

    `find` is exact for views that were added before the last `merge`.
    """

    def __init__(self) -> None:
        self._views: dict[int, list[View]] = {}
        self._storages: dict[int, _Storage] = {}

    def add(self, view: View) -> None:
        self._views.setdefault(view.storage, []).append(view)

    def merge(self) -> None:
        """Form the extents of all views added so far."""
        self._storages = {address: _merge(views) for address, views in self._views.items()}
        for storage in self._storages.values():
            for extent in (*storage.extents, *storage.packed.values()):
                for view in extent.views:
                    view.extent = extent

    def forget(self) -> None:
        """Undo the circle between views and extents, which would keep the tensors until a garbage collection."""
        for views in self._views.values():
            for view in views:
                view.extent = None

    def find(self, view: View) -> Extent | None:
        """The extent that holds the view, None when it was not foreseen."""
        if view.extent is not None:
            return view.extent
        storage = self._storages.get(view.storage)
        if storage is None:
            return None
        position = bisect.bisect_right(storage.begins, view.begin) - 1
        if position >= 0:
            extent = storage.extents[position]
            if view.end <= extent.end and (view.begin - extent.begin) % view.tensor.itemsize == 0:
                return extent
        return storage.packed.get(_key(view))


def view_of(tensor: torch.Tensor, fqn: str | None) -> View:
    """The window of a tensor that has its own storage (see `state.has_own_storage`).

    Raises:
        StateError: the storage is shorter than the window.
    """
    check_has_bytes(tensor, fqn or "")
    itemsize, address = tensor.itemsize, tensor.untyped_storage()._cdata
    begin, count = int(tensor.storage_offset()) * itemsize, tensor.numel()
    if tensor.is_contiguous():
        return View(tensor, fqn, address, begin, begin + count * itemsize, True, tensor.dtype)
    if count == 0:
        return View(tensor, fqn, address, begin, begin, True, tensor.dtype)
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride and size > 1]
    span, distinct = 1, 1
    for size, stride in dims:
        span += (size - 1) * stride
        distinct *= size
    is_dense = _is_dense(dims, span, distinct)
    return View(tensor, fqn, address, begin, begin + span * itemsize, is_dense, tensor.dtype)


def _is_dense(dims: list[tuple[int, int]], span: int, distinct: int) -> bool:
    """Whether every element of the span is addressed; overlapping windows that might leave a hole are not."""
    reach = 1
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride > reach:
            return False
        reach += (size - 1) * stride
    return reach == span and distinct >= span


def _key(view: View) -> _Key:
    tensor = view.tensor
    return (
        view.begin,
        view.end,
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _merge(views: list[View]) -> _Storage:
    storage = _Storage()
    if len(views) == 1 and views[0].is_dense and views[0].end > views[0].begin:  # nearly all of a usual state
        only = views[0]
        return _Storage([Extent(only.begin, only.end, [only], dtype=only.dtype)], [only.begin])
    dense = [view for view in views if view.is_dense and view.end > view.begin]
    if len(dense) > 1:
        dense.sort(key=lambda view: (view.begin, -view.end))
    for view in dense:
        last = storage.extents[-1] if storage.extents else None
        if last is not None and view.begin < last.end:
            last.end = max(last.end, view.end)
            last.views.append(view)
            if view.dtype is not last.dtype:
                last.dtype = None
        else:
            storage.extents.append(Extent(view.begin, view.end, [view], dtype=view.dtype))
    for extent in storage.extents:
        if extent.dtype is None:  # views of several dtypes: every offset must count in each item size
            extent.begin -= extent.begin % max(view.tensor.itemsize for view in extent.views)
    storage.begins = [extent.begin for extent in storage.extents]
    for view in views:
        if not view.is_dense:
            _place_sparse(storage, view)
    return storage


def _place_sparse(storage: _Storage, view: View) -> None:
    """Put a view with holes into the extent around it, or pack it."""
    position = bisect.bisect_right(storage.begins, view.begin) - 1
    if position >= 0:
        extent = storage.extents[position]
        if view.end <= extent.end and (view.begin - extent.begin) % view.tensor.itemsize == 0:
            extent.views.append(view)
            extent.dtype = extent.dtype if extent.dtype is view.dtype else None
            return
    packed = storage.packed.get(_key(view))
    if packed is None:
        storage.packed[_key(view)] = Extent(view.begin, view.end, [view], is_packed=True, dtype=view.dtype)
    else:
        packed.views.append(view)


def _flat(tensor: torch.Tensor, view: View, begin: int, end: int) -> torch.Tensor:
    """One-dimensional raw alias over ``[begin, end)`` of the storage, a view of ``tensor``."""
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    itemsize = tensor.itemsize
    if begin % itemsize == 0 and end % itemsize == 0:
        return tensor.as_strided(((end - begin) // itemsize,), (1,), begin // itemsize)
    # the range starts or ends within an element of this view (views of several dtypes): count in bytes
    count = (view.end - view.begin) // itemsize
    raw = tensor.as_strided((count,), (1,), view.begin // itemsize).view(torch.uint8)
    return raw.as_strided((end - begin,), (1,), begin)
