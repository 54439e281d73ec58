"""Plans torch files of ordinary states fast, and faster still when the structure is that of an earlier save.

Ordinary are states whose tensors are contiguous, each with bytes of its own or exactly those of another. The reference
is `formats.torch_zip.plan`, which plans every state; what this module plans loads as the same state.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

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
from datastates.formats.torch_skeleton import Skeleton, skeleton_of
from datastates.formats.torch_structure import Choice, Form, Structure, build
from datastates.plan import FilePlan
from datastates.state import CONTAINERS, Capture, EagerRule, named_tensors

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
class _Found:
    """A state as it is found in one save.

    Attributes:
        memory: where its tensors are.
        storages: theirs.
        rule: which of them are eager.
    """

    state: object
    skeleton: Skeleton
    memory: Memory
    storages: list[torch.UntypedStorage]
    rule: EagerRule

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.skeleton.tensors

    @functools.cached_property
    def keys(self) -> list[object] | None:
        """See `_keys`; looked for only where a tensor is asked about by its name."""
        return _keys(self.state, len(self.tensors))


class TorchPlanner:
    """Remembers structures, never tensors. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # protects _structures; a signal handler may save, too
        self._structures: list[Structure] = []  # the one used last is the last

    def plan(
        self, state: object, take: Take, rule: EagerRule, hold: Hold | None = None, capture: Capture | None = None
    ) -> FilePlan | None:
        """The plan of a torch file; None where the state is not ordinary, or eager tensors of a device get no memory.

        Args:
            state: any nested state.
            take: asked once, for the bytes of all eager tensors of the host, before they are copied. Where it refuses,
                these tensors are left to be copied later, before `FilePlan.eager_end`.
            rule: which tensors are eager.
            hold: asked where ``take`` refuses, and the tensors are so small that the file takes as much memory to say
                where they are; None: those are refused, too.
            capture: takes the bytes of eager tensors of a device.
        """
        try:
            found = _found(state, rule)
            structure = None if found is None else self._structure(found, is_postponed=False)
            if found is None or structure is None:
                return None
            if not _has_room(structure, take, hold):
                self._keep(structure)
                structure = self._structure(found, is_postponed=True)
        except RuntimeError:  # no strides, no memory of its own: sparse, nested, batched
            return None
        return None if structure is None else self._fill(structure, found, capture)

    def _fill(self, structure: Structure, found: _Found, capture: Capture | None) -> FilePlan | None:
        sources = structure.sources(found.tensors, found.storages, capture)
        if sources is None:
            return None
        copies = structure.copies(found.tensors)
        plan = structure.fill(found.skeleton, copies, sources)
        if plan is None:  # the pickle has outgrown its place
            geometry = geometry_of(found.tensors)
            renewed = build(found.skeleton, geometry, structure.form, structure.memory, structure.choice)
            if renewed is None:
                return None
            structure, plan = renewed, renewed.fill(found.skeleton, copies, sources)
        self._keep(structure)
        return plan

    def _structure(self, found: _Found, is_postponed: bool) -> Structure | None:
        """The known structure of a state where there is one, else a new one; None where the state is not ordinary."""
        tensors, memory, rule = found.tensors, found.memory, found.rule
        known, is_in_place = self._find(found, is_postponed)
        if (
            known is not None
            and is_in_place
            and known.choice.is_postponed is is_postponed
            and known.choice.volatile == _volatile(tensors, known.form.names, known.choice.owners, rule)
        ):
            return known
        geometry = geometry_of(tensors)
        form = _form_of(found, geometry) if known is None else known.form
        owners = owners_of(geometry, memory.addresses) if have_their_bytes(geometry, memory) else None
        if form is None or owners is None:
            return None
        choice = Choice(owners, _volatile(tensors, form.names, owners, rule), is_postponed)
        if known is not None and known.choice == choice:
            return dataclasses.replace(known, memory=memory)
        return build(found.skeleton, geometry, form, memory, choice)

    def _find(self, found: _Found, is_postponed: bool) -> tuple[Structure | None, bool]:
        """A structure with the same names and kinds, and whether its memory is the same, too: rather one of that."""
        with self._lock:
            structures = self._structures[::-1]
        about = found.rule.threshold_bytes, len(found.tensors)
        alike = [known for known in structures if (known.form.limit, known.num_tensors) == about]
        alike = [known for known in alike if known.form.keys is None or known.form.keys == found.keys]
        ranked = [
            (known.choice.is_postponed is not is_postponed, known.memory != found.memory, number)
            for number, known in enumerate(alike)
        ]
        for _, has_moved, number in sorted(ranked):
            if alike[number].form.looks.fit(found.tensors):
                return alike[number], not has_moved
        return None, False

    def _keep(self, structure: Structure) -> None:
        with self._lock:
            self._structures = [kept for kept in self._structures if kept.layout is not structure.layout]
            self._structures.append(structure)
            count = sum(kept.num_tensors for kept in self._structures)
            while (count > _MAX_TENSORS or len(self._structures) > _MAX_STRUCTURES) and len(self._structures) > 1:
                count -= self._structures.pop(0).num_tensors


def _has_room(structure: Structure, take: Take, hold: Hold | None) -> bool:
    nbytes = sum(structure.eager_sizes)
    if take(nbytes):
        return True
    if hold is None or nbytes > _RECORD_BYTES * len(structure.eager):
        return False
    hold(nbytes)
    return True


def _found(state: object, rule: EagerRule) -> _Found | None:
    """None where a part of the state has to be looked at one by one.

    Raises:
        RuntimeError: a tensor has no memory of its own.
    """
    skeleton = skeleton_of(state)
    return None if skeleton is None else _Found(state, skeleton, *memory_of(skeleton.tensors), rule)


def _form_of(found: _Found, geometry: Geometry) -> Form | None:
    """What a new state looks like; None where a tensor is not ordinary, or no container leads to a large one."""
    if not are_plain(geometry, found.tensors) or not are_ordinary(geometry, found.tensors):
        return None
    limit = found.rule.threshold_bytes
    if max(geometry.nbytes, default=0) <= limit:  # all are eager, also those that are hidden in other objects
        return Form(Looks(found.tensors, geometry), None, limit, {})
    names = None if found.keys is None else _names(found.state, found.tensors, geometry.nbytes, limit)
    return None if names is None else Form(Looks(found.tensors, geometry), found.keys, limit, names)


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
