"""Plans torch files of ordinary states fast, and faster still when the structure is that of an earlier save.

Ordinary are states whose tensors are contiguous, each with bytes of its own or exactly those of another. The reference
is `formats.torch_zip.plan`, which plans every state; what this module plans loads as the same state.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from datastates.copying import STRING_BYTES, copy_to_bytes
from datastates.formats.torch_layout import Layout, Storage
from datastates.formats.torch_skeleton import Skeleton, TensorPickles, skeleton_of
from datastates.plan import FilePlan
from datastates.state import CONTAINERS, DEVICES_WITHOUT_STORAGE, EagerRule, named_tensors

#: Structures are kept for this many tensors in all; a few hundred bytes each.
_MAX_TENSORS = 500_000

#: And so many in all: a run saves a few dozen files per rank, and names that change with each save must not pile up.
_MAX_STRUCTURES = 256

_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})

_LEAVES = frozenset({torch.Tensor, int, float, bool, str, bytes, type(None)})

_Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool, bool]
Take = Callable[[int], bool]
"""Reserves memory for so many bytes; False where there is not enough."""


@dataclass(frozen=True, eq=False)
class _Structure:
    """What stays from save to save.

    Attributes:
        kinds: what describes each tensor, in the order of the pickle.
        addresses: where each tensor's bytes were.
        owners: per tensor the position of the first one with the same bytes.
        keys: what `_keys` says of all containers, from which the names follow.
        names: fqn of each tensor.
        pickles: what rebuilds each tensor.
        eager: positions of the eager tensors with bytes of their own, in file order.
        lazy: positions of the lazy ones, in file order.
        eager_nbytes: bytes of all eager tensors.
        layout: the file.
    """

    kinds: list[_Kind]
    addresses: list[int]
    owners: list[int]
    keys: list[object]
    names: list[str]
    pickles: list[bytes]
    eager: list[int]
    lazy: list[int]
    eager_nbytes: int
    layout: Layout


class TorchPlanner:
    """Remembers structures, never tensors. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects _structures
        self._structures: list[_Structure] = []  # the one used last is the last

    def plan(self, state: object, take: Take, rule: EagerRule) -> FilePlan | None:
        """The plan of a torch file; None where the state is not ordinary, or ``take`` refuses the memory.

        Args:
            state: any nested state.
            take: asked once, for the bytes of all eager tensors, before they are copied.
            rule: which tensors are eager.
        """
        skeleton = skeleton_of(state)
        if skeleton is None:
            return None
        tensors = skeleton.tensors
        try:
            kinds = _kinds(tensors)
            addresses = [tensor.data_ptr() for tensor in tensors]
        except RuntimeError:  # no strides, no memory of its own: sparse, nested, batched
            return None
        keys = _keys(state, len(tensors))
        if kinds is None or keys is None or not _have_their_bytes(tensors):
            return None
        known = self._find(kinds, keys, addresses)
        owners = known.owners if known and known.addresses == addresses else _owners(tensors, addresses)
        if owners is None:
            return None
        names = _names(state, tensors) if known is None else known.names
        if names is None:
            return None
        eager = _eager(tensors, names, owners, rule)
        if any(tensors[position].device.type != "cpu" for position in eager):
            return None
        if known is None or known.eager != eager or known.owners != owners:
            known = _build(skeleton, kinds, addresses, owners, keys, names, eager)
        if known is None or not take(known.eager_nbytes):
            return None
        plan = _fill(known, skeleton)
        if plan is None:  # the pickle has outgrown its place
            known = _build(skeleton, kinds, addresses, owners, keys, names, eager)
            plan = None if known is None else _fill(known, skeleton)
        if known is not None:
            self._keep(known)
        return plan

    def _find(self, kinds: list[_Kind], keys: list[object], addresses: list[int]) -> _Structure | None:
        """A structure with the same names and kinds; rather the one of the same memory."""
        with self._lock:
            structures = self._structures[::-1]
        alike = [known for known in structures if known.kinds == kinds and known.keys == keys]
        return next((known for known in alike if known.addresses == addresses), alike[0] if alike else None)

    def _keep(self, structure: _Structure) -> None:
        with self._lock:
            if structure in self._structures:
                self._structures.remove(structure)
            self._structures.append(structure)
            count = sum(len(known.kinds) for known in self._structures)
            while (count > _MAX_TENSORS or len(self._structures) > _MAX_STRUCTURES) and len(self._structures) > 1:
                count -= len(self._structures.pop(0).kinds)


def _kinds(tensors: list[torch.Tensor]) -> list[_Kind] | None:
    """What describes each tensor; None where one of them is no ordinary contiguous tensor, or appears twice.

    Raises:
        RuntimeError: one of them has no shape or no strides.
    """
    kinds = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_neg()) for t in tensors]
    dtypes, devices = {kind[2] for kind in kinds}, {kind[3].type for kind in kinds}
    is_odd = (
        dtypes & _QUANTIZED
        or devices & DEVICES_WITHOUT_STORAGE
        or "meta" in devices
        or len(set(map(id, tensors))) != len(tensors)
        or any(t.__dict__ for t in tensors)
        or (dtypes & _COMPLEX and any(t.is_conj() for t in tensors))
    )
    if is_odd or not all(t.is_contiguous() for t in tensors) or any(kind[5] for kind in kinds):
        return None
    return kinds


def _have_their_bytes(tensors: list[torch.Tensor]) -> bool:
    """`state.has_its_bytes` of contiguous tensors, faster. The reference planner says which has not."""
    return all(
        tensor.storage_offset() * tensor.itemsize + tensor.nbytes <= tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.nbytes
    )


def _owners(tensors: list[torch.Tensor], addresses: list[int]) -> list[int] | None:
    """Per tensor the position of the first one with the same bytes; None where tensors overlap otherwise."""
    owners = list(range(len(tensors)))
    by_device: dict[torch.device, list[tuple[int, int]]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.nbytes:
            by_device.setdefault(tensor.device, []).append((addresses[position], position))
    for places in by_device.values():
        places.sort()
        begin, end, owner = 0, 0, -1
        for address, position in places:
            tensor = tensors[position]
            if address >= end:
                begin, end, owner = address, address + tensor.nbytes, position
            elif address == begin and address + tensor.nbytes == end and tensor.dtype is tensors[owner].dtype:
                owners[position] = owner
            else:
                return None
    return owners


def _keys(state: object, num_tensors: int) -> list[object] | None:
    """Which keys and positions of all containers have tensors and containers: the names of tensors follow from that.

    None where the containers hold another number of tensors than the pickle: some are hidden in other objects.
    """
    found: list[object] = []
    stack: list[object] = [(state,)]
    visited: set[int] = set()
    count = 0
    while stack:
        node = stack.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        keys = list(node) if isinstance(node, dict) else None
        values: Iterable[object] = node.values() if isinstance(node, dict) else node  # type: ignore[assignment]
        kinds = list(map(type, values))
        num_here = kinds.count(torch.Tensor)
        count += num_here
        where = num_here if num_here in (0, len(kinds)) else [kind is torch.Tensor for kind in kinds]
        inner: list[int] = []
        if not _LEAVES.issuperset(kinds):
            for position, value in enumerate(values):
                if isinstance(value, CONTAINERS):
                    inner.append(position)
                    stack.append(value)
        found.append((keys, where, inner))
    return found if count == num_tensors else None


def _names(state: object, tensors: list[torch.Tensor]) -> list[str] | None:
    """The names of the tensors; None where no container leads to one of them."""
    named = named_tensors(state)
    found = [named.get(id(tensor)) for tensor in tensors]
    return None if None in found else [entry[0] for entry in found if entry is not None]


def _eager(tensors: list[torch.Tensor], names: list[str], owners: list[int], rule: EagerRule) -> list[int]:
    """Positions of the eager tensors that own bytes."""
    limit, is_volatile = rule.threshold_bytes, rule.is_volatile
    volatile = set()
    if is_volatile is not None:
        large = (n for n, t in enumerate(tensors) if t.nbytes > limit)
        volatile = {owners[n] for n in large if is_volatile(names[n], tensors[n])}
    return [
        n
        for n, t in enumerate(tensors)
        if owners[n] == n and t.nbytes and (t.nbytes <= limit or n in volatile or t.dim() == 0)
    ]


def _build(
    skeleton: Skeleton,
    kinds: list[_Kind],
    addresses: list[int],
    owners: list[int],
    keys: list[object],
    names: list[str],
    eager: list[int],
) -> _Structure | None:
    """Lay out a file; None where the tensors are of too many kinds."""
    writer = TensorPickles()
    locations: dict[torch.device, str] = {}
    storages: list[Storage] = []
    storage_keys: list[str] = []  # per tensor
    empty: dict[str, str] = {}
    pickles: list[bytes] = []
    is_eager = set(eager)
    lazy: list[int] = []
    for position, tensor in enumerate(skeleton.tensors):
        location = locations.get(tensor.device)
        if location is None:
            location = locations[tensor.device] = torch.serialization.location_tag(tensor.untyped_storage())
        nbytes, owner = tensor.nbytes, owners[position]
        known = empty.get(location) if not nbytes else storage_keys[owner] if owner != position else None
        key = str(len(storages)) if known is None else known
        storage_keys.append(key)
        if known is None:
            storages.append(Storage(key, nbytes, not nbytes or position in is_eager))
            if not nbytes:
                empty[location] = key
            elif position not in is_eager:
                lazy.append(position)
        try:
            pickles.append(writer.write(tensor, key.encode(), location))
        except OverflowError:
            return None
    layout = Layout(skeleton.filled(pickles), storages)
    eager_nbytes = sum(skeleton.tensors[position].nbytes for position in eager)
    return _Structure(kinds, addresses, owners, keys, names, pickles, eager, lazy, eager_nbytes, layout)


def _fill(structure: _Structure, skeleton: Skeleton) -> FilePlan | None:
    tensors, names = skeleton.tensors, structure.names
    captured = [_bytes_of(tensors[position]) for position in structure.eager]
    lazy = [(names[position], tensors[position]) for position in structure.lazy]
    return structure.layout.fill(skeleton.filled(structure.pickles), captured, lazy)


def _bytes_of(tensor: torch.Tensor) -> bytes | bytearray:
    nbytes = tensor.nbytes
    return ctypes.string_at(tensor.data_ptr(), nbytes) if nbytes <= STRING_BYTES else copy_to_bytes(tensor)
