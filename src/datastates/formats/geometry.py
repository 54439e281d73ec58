"""What describes many tensors at once, column by column: a column of 20,000 values takes about a millisecond."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from datastates.state import DEVICES_WITHOUT_STORAGE

_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})

#: So many tensors stay in the core's own cache, from one question about them to the next.
_BLOCK_TENSORS = 512

_attributes = attrgetter("__dict__")

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Geometry:
    """What tensors look like, one value per tensor and column; equal where all of them look alike."""

    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    devices: list[torch.device]
    requires_grad: list[bool]
    nbytes: list[int]


class Looks:
    """Recognises plain tensors of one geometry, all exactly of the type ``torch.Tensor``; keeps none of them.

    Where torch has the guards that its compiler compares inputs with, one call of theirs does it, ten times faster.

    Source: ``TensorGuards`` of ``torch/csrc/dynamo/guards.cpp``: type, dispatch keys (device type, layout, negation,
    conjugation), dtype, device index, ``requires_grad``, shape, strides, and that no tensor appears twice.
    """

    def __init__(self, tensors: Tensors, geometry: Geometry) -> None:
        self._num_tensors = len(tensors)
        self._geometry: Geometry | None = geometry
        self._guards: Any = None
        make = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
        if make is None or not tensors:
            return
        lists = {size: list(size) for size in {*geometry.shapes, *geometry.strides}}
        sizes, strides = [lists[shape] for shape in geometry.shapes], [lists[stride] for stride in geometry.strides]
        try:
            guards = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        except (TypeError, SystemError, RuntimeError):  # another torch, whose guards are made in another way
            return
        if guards.check(*tensors):
            self._geometry, self._guards = None, guards

    def fit(self, tensors: Tensors) -> bool:
        """Whether as many tensors are all plain, and of that geometry, in that order."""
        if len(tensors) != self._num_tensors or any(map(_attributes, tensors)):
            return False
        if self._guards is not None:
            return bool(self._guards.check(*tensors))
        geometry = geometry_of(tensors)
        return geometry == self._geometry and are_plain(geometry, tensors)


@dataclass(frozen=True)
class Memory:
    """Where the bytes of tensors are; equal where each lies at the same place of a storage of the same length."""

    addresses: list[int]
    offsets: list[int]
    storage_nbytes: list[int]


def geometry_of(tensors: Tensors) -> Geometry:
    """The columns of these tensors.

    Raises:
        RuntimeError: one of them has no shape or no strides.
    """
    geometry = Geometry([], [], [], [], [], [])
    for block in _blocks(tensors):
        geometry.shapes.extend([t.shape for t in block])
        geometry.strides.extend(map(torch.Tensor.stride, block))
        geometry.dtypes.extend([t.dtype for t in block])
        geometry.devices.extend([t.device for t in block])
        geometry.requires_grad.extend([t.requires_grad for t in block])
        geometry.nbytes.extend([t.nbytes for t in block])
    return geometry


def memory_of(tensors: Tensors) -> tuple[Memory, list[torch.UntypedStorage]]:
    """Where these tensors are, and the storages that keep them there.

    Raises:
        RuntimeError: one of them has no memory of its own.
    """
    memory, storages = Memory([], [], []), list[torch.UntypedStorage]()
    for block in _blocks(tensors):
        here = list(map(torch.Tensor.untyped_storage, block))
        memory.addresses.extend(map(torch.Tensor.data_ptr, block))
        memory.offsets.extend(map(torch.Tensor.storage_offset, block))  # type: ignore[arg-type]  # they are integers here
        memory.storage_nbytes.extend(map(torch.UntypedStorage.nbytes, here))
        storages += here
    return memory, storages


def _blocks(tensors: Tensors) -> Iterator[Tensors]:
    for first in range(0, len(tensors), _BLOCK_TENSORS):
        yield tensors[first : first + _BLOCK_TENSORS]


def are_ordinary(geometry: Geometry, tensors: Tensors) -> bool:
    """Whether the geometry says all about how the tensors lie in memory: row by row, their elements as they are."""
    dtypes, kinds = set(geometry.dtypes), {device.type for device in set(geometry.devices)}
    if dtypes & _QUANTIZED or kinds & DEVICES_WITHOUT_STORAGE or "meta" in kinds:
        return False
    return all(map(torch.Tensor.is_contiguous, tensors))


def are_plain(geometry: Geometry, tensors: Tensors) -> bool:
    """Whether each of them appears once, has no attributes, and is neither negated nor conjugated lazily."""
    if len(set(map(id, tensors))) != len(tensors) or any(map(torch.Tensor.is_neg, tensors)):
        return False
    if not _COMPLEX.isdisjoint(geometry.dtypes) and any(map(torch.Tensor.is_conj, tensors)):
        return False
    return not any(map(_attributes, tensors))


def have_their_bytes(geometry: Geometry, memory: Memory) -> bool:
    """`state.has_its_bytes` of contiguous tensors, faster. The reference planner says which has not."""
    columns = (memory.offsets, geometry.dtypes, geometry.nbytes, memory.storage_nbytes)
    places = zip(*columns, strict=True)
    return all(offset * dtype.itemsize + nbytes <= length or not nbytes for offset, dtype, nbytes, length in places)


def owners_of(geometry: Geometry, addresses: list[int]) -> list[int] | None:
    """Per tensor the position of the first one with the same bytes; None where tensors overlap otherwise."""
    owners, dtypes, lengths = list(range(len(addresses))), geometry.dtypes, geometry.nbytes
    by_device: dict[torch.device, list[tuple[int, int]]] = {device: [] for device in set(geometry.devices)}
    for position, (device, address, nbytes) in enumerate(zip(geometry.devices, addresses, lengths, strict=True)):
        if nbytes:
            by_device[device].append((address, position))
    for places in by_device.values():
        places.sort()
        begin, end, owner = 0, 0, -1
        for address, position in places:
            if address >= end:
                begin, end, owner = address, address + lengths[position], position
            elif address == begin and address + lengths[position] == end and dtypes[position] is dtypes[owner]:
                owners[position] = owner
            else:
                return None
    return owners
