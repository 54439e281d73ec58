"""A state's pickle with holes where its tensors are, and what fills the holes.

The pickler of the standard library, with nothing overridden but the tensors, writes the *skeleton*: fast, and right
for every object. `TensorPickles` then writes what torch would have written for each tensor; both use one memo, in
which the first `_RESERVED` places are kept free for what all tensors refer to.

Source: ``torch._utils._rebuild_tensor_v2`` and ``_rebuild_tensor_v3``; pickle protocol 2 (PEP 307).
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from datastates.formats.geometry import Geometry
from datastates.formats.pickling import LEGACY_STORAGES, PICKLE_FAILURES, PROTOCOL, STORAGES

#: Places of the memo for functions, classes and texts that the pickles of tensors share.
_RESERVED = 96


def _mark() -> None:
    """Stands in the skeleton where a tensor is; never called."""


_ARGUMENTS = (0,)
_IS_A_TENSOR = (_mark, _ARGUMENTS)

#: How the pickler writes a call of `_mark` once it has met both parts in `_reserve`. Where a state should hold these
#: bytes, there is one mark too many, which is noticed.
_MARK = b"h" + bytes([_RESERVED - 3]) + b"h" + bytes([_RESERVED - 2]) + b"R"


class Skeleton:
    """What is between the tensors of a pickled state.

    Attributes:
        tensors: in the order in which the pickle has them.
        chunks: the bytes before the first tensor, between each two, and after the last: one more than tensors.
    """

    def __init__(self, tensors: list[torch.Tensor], chunks: list[bytes]) -> None:
        self.tensors = tensors
        self.chunks = chunks

    def filled(self, pickles: list[bytes]) -> bytes:
        """The whole pickle, given that of each tensor."""
        parts: list[bytes] = [b""] * (2 * len(pickles) + 1)
        parts[0::2] = self.chunks
        parts[1::2] = pickles
        return b"".join(parts)


class _Pickler(pickle.Pickler):
    """Calls back for what is no plain value or container only, which is most of what it costs."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.is_ordinary = True

    def reducer_override(self, value: object) -> Any:
        if type(value) is torch.Tensor:
            self.tensors.append(value)
            return _IS_A_TENSOR
        if isinstance(value, (torch.Tensor, *STORAGES)):
            self.is_ordinary = False
        return NotImplemented

    def reserve(self) -> None:
        """Fill the first places of the memo; the last of them are for what a mark consists of, and for the whole."""
        self.dump((*(f"reserved {place}" for place in range(_RESERVED - 3)), _mark, _ARGUMENTS))


def skeleton_of(state: object) -> Skeleton | None:
    """Take a state apart; None where it holds subclasses of tensors, bare storages, or what cannot be pickled.

    A tensor that the state has twice is in the skeleton once.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.reserve()
    buffer.seek(0)
    buffer.truncate()
    try:
        pickler.dump(state)
    except PICKLE_FAILURES:
        return None  # the reference planner raises it again, and finds out which leaf it was
    chunks = buffer.getvalue().split(_MARK)
    if not pickler.is_ordinary or len(chunks) != len(pickler.tensors) + 1:
        return None
    return Skeleton(pickler.tensors, chunks)


class TensorPickles:
    """Writes the pickles of tensors that each are one contiguous storage, or share one with equal tensors."""

    def __init__(self) -> None:
        self._places: dict[object, int] = {}
        self._templates: dict[tuple[Any, ...], tuple[bytes, bytes]] = {}

    def write(
        self, geometry: Geometry, locations: list[str], tensors: list[torch.Tensor], keys: list[str]
    ) -> list[bytes]:
        """The opcodes that rebuild each tensor from the storage that is named by its key.

        All tensors of the skeleton, in its order: the first use of a function or class defines it for those after it.

        Raises:
            OverflowError: there are more dtypes and devices than places in the memo.
        """
        columns = (geometry.shapes, geometry.strides, geometry.dtypes, locations, geometry.requires_grad)
        pickles = []
        for kind, tensor, key in zip(zip(*columns, strict=True), tensors, keys, strict=True):
            template = self._templates.get(kind)
            if template is None:
                template = self._build(tensor, kind[3])  # with the definitions of what it is the first to use
                self._templates[kind] = self._build(tensor, kind[3])
            before, after = template
            pickles.append(before + _text(key) + after)
        return pickles

    def _build(self, tensor: torch.Tensor, location: str) -> tuple[bytes, bytes]:
        """What is before the key of a tensor's storage, and what is after it."""
        legacy = LEGACY_STORAGES.get(tensor.dtype)
        has_elements = tensor.numel() > 0
        if legacy is not None:
            rebuild: Callable[..., Any] = torch._utils._rebuild_tensor_v2
            kind, length = legacy, tensor.numel()
        else:
            rebuild, kind, length = torch._utils._rebuild_tensor_v3, torch.UntypedStorage, tensor.nbytes
        before = self._refer(rebuild) + b"((" + self._refer("storage") + self._refer(kind)
        after = self._refer(location) + _opcodes(length if has_elements else 0) + b"tQ" + _opcodes(0)
        after += _opcodes(tuple(tensor.shape)) + _opcodes(tuple(tensor.stride())) + _opcodes(tensor.requires_grad)
        after += self._refer(OrderedDict) + b")R"
        return before, after + (self._refer(tensor.dtype) if legacy is None else b"") + b"tR"

    def _refer(self, shared: object) -> bytes:
        place = self._places.get(shared)
        if place is not None:
            return b"h" + bytes([place])
        place = self._places[shared] = len(self._places)
        if place >= _RESERVED:
            raise OverflowError(f"{shared!r} is one too many for the memo")
        return _opcodes(shared) + b"q" + bytes([place])


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def _opcodes(value: object) -> bytes:
    """The pickle of a plain value or a global, without its frame and its places in a memo."""
    return pickletools.optimize(pickle.dumps(value, PROTOCOL))[2:-1]
