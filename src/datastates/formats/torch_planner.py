"""Plans torch files of ordinary states fast, and faster still when the structure is that of an earlier save.

Ordinary are states whose tensors are contiguous, each with bytes of its own or exactly those of another. The reference
is `formats.torch_zip.plan`, which plans every state; what this module plans loads as the same state.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from datastates.copying import copy_to_bytes
from datastates.formats.geometry import (
    Geometry,
    Looks,
    Memory,
    are_ordinary,
    are_plain,
    geometry_of,
    have_their_bytes,
    memory_of,
    owners_of,
)
from datastates.formats.torch_layout import Layout
from datastates.formats.torch_skeleton import Skeleton, TensorPickles, skeleton_of
from datastates.gathering import MIN_PIECES, gathered
from datastates.plan import FilePlan
from datastates.state import CONTAINERS, EagerRule, named_tensors

#: Structures are kept for this many tensors in all, and one however many it has; about a kilobyte each.
_MAX_TENSORS = 1_000_000

#: And so many in all: a run saves a few dozen files per rank, and names that change with each save must not pile up.
_MAX_STRUCTURES = 256

_LEAVES = frozenset({torch.Tensor, int, float, bool, str, bytes, type(None)})

#: About what a file says about each tensor, in its pickle, its entry, and the directory: that is in host memory anyway.
_RECORD_BYTES = 256

Take = Callable[[int], bool]
"""Reserves memory for so many bytes; False where there is not enough."""

Hold = Callable[[int], None]
"""Reserves memory for so many bytes; blocks until it may be had."""


@dataclass(frozen=True, eq=False)
class _Form:
    """What a state looks like apart from its values and its memory.

    Attributes:
        looks: recognises the tensors, in the order of the pickle.
        keys: what `_keys` says of all containers, from which the names follow.
        limit: tensors of at most so many bytes are small: eager.
        names: fqn of each tensor that is not small, by position.
    """

    looks: Looks
    keys: list[object]
    limit: int
    names: dict[int, str]


@dataclass(frozen=True, eq=False)
class _Structure:
    """What stays from save to save.

    Attributes:
        form: what it is found by.
        memory: where the tensors' bytes were.
        owners: per tensor the position of the first one with the same bytes.
        volatile: positions of the tensors that are eager though they are not small.
        pickles: what rebuilds each tensor.
        eager: positions of the eager tensors with bytes of their own, in file order.
        eager_sizes: bytes of each of them.
        lazy: positions of the lazy ones, in file order.
        layout: the file.
    """

    form: _Form
    memory: Memory
    owners: list[int]
    volatile: set[int]
    pickles: list[bytes]
    eager: list[int]
    eager_sizes: list[int]
    lazy: list[int]
    layout: Layout

    @property
    def num_tensors(self) -> int:
        return len(self.owners)


class TorchPlanner:
    """Remembers structures, never tensors. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects _structures
        self._structures: list[_Structure] = []  # the one used last is the last

    def plan(self, state: object, take: Take, rule: EagerRule, hold: Hold | None = None) -> FilePlan | None:
        """The plan of a torch file; None where the state is not ordinary, or the memory for copies is refused.

        Args:
            state: any nested state.
            take: asked once, for the bytes of all eager tensors, before they are copied.
            rule: which tensors are eager.
            hold: asked where ``take`` refuses, and the tensors are so small that the file takes as much memory to say
                where they are; None: those are refused, too.
        """
        skeleton = skeleton_of(state)
        if skeleton is None:
            return None
        try:
            structure = self._structure(state, skeleton, rule)
        except RuntimeError:  # no strides, no memory of its own: sparse, nested, batched
            return None
        if structure is None or not _has_room(structure, take, hold):
            return None
        plan = _fill(structure, skeleton)
        if plan is None:  # the pickle has outgrown its place
            parts = (structure.form, structure.memory, structure.owners, structure.volatile)
            structure = _build(skeleton, geometry_of(skeleton.tensors), *parts)
            plan = None if structure is None else _fill(structure, skeleton)
        if structure is not None:
            self._keep(structure)
        return plan

    def _structure(self, state: object, skeleton: Skeleton, rule: EagerRule) -> _Structure | None:
        """The known structure of a state where there is one, else a new one; None where the state is not ordinary.

        Raises:
            RuntimeError: a tensor has no strides, or no memory of its own.
        """
        tensors = skeleton.tensors
        keys = _keys(state, len(tensors))
        if keys is None:
            return None
        memory = memory_of(tensors)
        known = self._find(tensors, keys, memory, rule.threshold_bytes)
        if known is not None and known.memory == memory:
            volatile = _volatile(tensors, known.form.names, known.owners, rule)
            if known.volatile == volatile:
                return known
        geometry = geometry_of(tensors)
        form = _form_of(state, tensors, geometry, keys, rule.threshold_bytes) if known is None else known.form
        owners = owners_of(geometry, memory.addresses) if have_their_bytes(geometry, memory) else None
        if form is None or owners is None:
            return None
        volatile = _volatile(tensors, form.names, owners, rule)
        if known is not None and known.volatile == volatile and known.owners == owners:
            return dataclasses.replace(known, memory=memory)
        return _build(skeleton, geometry, form, memory, owners, volatile)

    def _find(self, tensors: list[torch.Tensor], keys: list[object], memory: Memory, limit: int) -> _Structure | None:
        """A structure with the same names and kinds; rather the one of the same memory."""
        with self._lock:
            structures = self._structures[::-1]
        alike = [known for known in structures if known.form.limit == limit and known.form.keys == keys]
        alike.sort(key=lambda known: known.memory != memory)
        return next((known for known in alike if known.form.looks.fit(tensors)), None)

    def _keep(self, structure: _Structure) -> None:
        with self._lock:
            self._structures = [kept for kept in self._structures if kept.layout is not structure.layout]
            self._structures.append(structure)
            count = sum(kept.num_tensors for kept in self._structures)
            while (count > _MAX_TENSORS or len(self._structures) > _MAX_STRUCTURES) and len(self._structures) > 1:
                count -= self._structures.pop(0).num_tensors


def _has_room(structure: _Structure, take: Take, hold: Hold | None) -> bool:
    nbytes = sum(structure.eager_sizes)
    if take(nbytes):
        return True
    if hold is None or nbytes > _RECORD_BYTES * len(structure.eager):
        return False
    hold(nbytes)
    return True


def _form_of(
    state: object, tensors: list[torch.Tensor], geometry: Geometry, keys: list[object], limit: int
) -> _Form | None:
    """What a new state looks like; None where one of its tensors is not ordinary, or no container leads to it."""
    if not are_plain(geometry, tensors) or not are_ordinary(geometry, tensors):
        return None
    names = _names(state, tensors, geometry.nbytes, limit)
    return None if names is None else _Form(Looks(tensors, geometry), keys, limit, names)


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


def _names(state: object, tensors: list[torch.Tensor], lengths: list[int], limit: int) -> dict[int, str] | None:
    """The names of the larger tensors by position; None where no container leads to one of them."""
    large = [position for position, nbytes in enumerate(lengths) if nbytes > limit]
    if not large:
        return {}
    named = named_tensors(state)
    found = {position: named[id(tensors[position])][0] for position in large if id(tensors[position]) in named}
    return found if len(found) == len(large) else None


def _volatile(tensors: list[torch.Tensor], names: dict[int, str], owners: list[int], rule: EagerRule) -> set[int]:
    """Positions of the larger tensors that are eager by their names, as far as they own their bytes."""
    if rule.is_volatile is None:
        return set()
    return {owners[position] for position, name in names.items() if rule.is_volatile(name, tensors[position])}


def _eager(geometry: Geometry, limit: int, owners: list[int], volatile: set[int]) -> list[int]:
    """Positions of the eager tensors that own bytes."""
    columns = enumerate(zip(geometry.nbytes, owners, geometry.shapes, strict=True))
    return [
        n
        for n, (nbytes, owner, shape) in columns
        if owner == n and nbytes and (nbytes <= limit or n in volatile or not shape)
    ]


def _build(
    skeleton: Skeleton, geometry: Geometry, form: _Form, memory: Memory, owners: list[int], volatile: set[int]
) -> _Structure | None:
    """Lay out a file; None where the tensors are of too many kinds, or eager ones lie on a device."""
    eager = _eager(geometry, form.limit, owners, volatile)
    if any(geometry.devices[position].type != "cpu" for position in eager):
        return None
    locations = _locations(skeleton.tensors, geometry.devices)
    entries: dict[bool, dict[str, int]] = {True: {}, False: {}}  # eager, lazy: lengths by key, in file order
    empty: dict[str, str] = {}
    lazy: list[int] = []
    is_eager = set(eager)
    keys: list[str] = []  # per tensor
    num_storages = 0
    for position, (owner, nbytes) in enumerate(zip(owners, geometry.nbytes, strict=True)):
        known = keys[owner] if owner != position else None if nbytes else empty.get(locations[position])
        key = str(num_storages) if known is None else known
        keys.append(key)
        if known is not None:
            continue
        num_storages += 1
        if nbytes:
            entries[position in is_eager][key] = nbytes
            if position not in is_eager:
                lazy.append(position)
        else:
            empty[locations[position]] = key
    try:
        pickles = TensorPickles().write(geometry, locations, skeleton.tensors, keys)
    except OverflowError:
        return None
    eager_sizes = list(entries[True].values())
    layout = Layout(skeleton.filled(pickles), entries[True], list(empty.values()), entries[False])
    return _Structure(form, memory, owners, volatile, pickles, eager, eager_sizes, lazy, layout)


def _locations(tensors: list[torch.Tensor], devices: list[torch.device]) -> list[str]:
    """What torch calls the device of each tensor in a file."""
    storages = {device: tensors[devices.index(device)].untyped_storage() for device in set(devices)}
    tags = {device: torch.serialization.location_tag(storage) for device, storage in storages.items()}
    return [tags[device] for device in devices]


def _fill(structure: _Structure, skeleton: Skeleton) -> FilePlan | None:
    tensors, pickled = skeleton.tensors, skeleton.filled(structure.pickles)
    names = [structure.form.names[position] for position in structure.lazy]
    lazy = [tensors[position] for position in structure.lazy]
    return structure.layout.fill(pickled, _captured(structure, tensors), names, lazy)


def _captured(structure: _Structure, tensors: list[torch.Tensor]) -> Sequence[bytes | bytearray]:
    """The bytes of the eager tensors that have some of their own."""
    if len(structure.eager) >= MIN_PIECES:
        copies = gathered(list(map(structure.memory.addresses.__getitem__, structure.eager)), structure.eager_sizes)
        if copies is not None:
            return copies
    return [copy_to_bytes(tensors[position]) for position in structure.eager]
