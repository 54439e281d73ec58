"""A state that all ranks have in common, shared out over them by bytes, and put together again.

Each rank writes some of its tensors, whole, and tensors that share memory together. The part of rank 0 is the whole
structure, with all that is no tensor, and None in the places of other ranks' tensors. The other parts have nothing but
their tensors: keys of dictionaries are left out, in lists None stands in the place of what comes before. So for a
module's state dict, ``{**part_1, **part_2}`` over the parts' tensors is the whole, without this package.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from datastates.checkpoints.summary import Shared
from datastates.checksum import crc32
from datastates.errors import MismatchError, StateError
from datastates.fqns import join
from datastates.state import has_own_storage

_DIVISIBLE = (dict, OrderedDict, list, tuple)  # their subclasses stay whole: nobody knows what makes one
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes of a state.

    Attributes:
        tree: its part, `is_empty` where it has none.
        shared: where all the parts are; the same on all ranks.
    """

    tree: Any
    shared: Shared

    @property
    def is_empty(self) -> bool:
        return self.tree is _ABSENT


def split(state: Any, rank: int, world_size: int, name: str = "") -> Part:
    """The part of one rank. Equal states give parts that fit together; nothing is copied.

    Args:
        state: the same on all ranks, as far as its structure and the sizes of its tensors go.
        rank: whose part.
        world_size: how many ranks share it.
        name: of the state, for messages.

    Raises:
        StateError: it contains itself.
    """
    if world_size == 1:
        return Part(state, Shared((0,), 0))
    named = list(_tensors(state, name, ()))
    owners = _owners([tensor for _, tensor in named], world_size)
    ranks = tuple(sorted({0, *owners.values()}))
    return Part(_part(state, owners, rank), Shared(ranks, _fingerprint(named)))


def fingerprint_of(state: Any, name: str = "") -> int:
    """That of the parts of a state, see `Shared`. Raises StateError as `split`."""
    return _fingerprint(_tensors(state, name, ()))


def _fingerprint(named: Iterable[tuple[str, torch.Tensor]]) -> int:
    described = "\n".join(f"{fqn} {tensor.dtype} {tuple(tensor.shape)}" for fqn, tensor in named)
    return crc32(described.encode("utf-8", "surrogatepass"))


def join_parts(parts: Sequence[Any], ranks: Sequence[int], name: str) -> Any:
    """The whole state from its parts. They may be changed by it. None stands for tensors that were not loaded.

    Args:
        parts: as they were loaded; all of the same fingerprint.
        ranks: who saved them, rank 0 first.
        name: of the state, for messages.

    Raises:
        MismatchError: they do not fit together: what was saved as replicated was not the same on all ranks.
    """
    whole = parts[0]
    for rank, part in zip(ranks[1:], parts[1:], strict=True):
        whole = _joined(whole, part, name, rank)
    return whole


def _tensors(node: Any, fqn: str, above: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield fqn, node
    elif type(node) in _DIVISIBLE:
        if id(node) in above:
            raise StateError(f"{fqn} contains itself, and cannot be shared out over the ranks", fqn)
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(child, torch.Tensor):
                yield join(fqn, key), child
            elif type(child) in _DIVISIBLE:
                yield from _tensors(child, join(fqn, key), (*above, id(node)))


def _owners(tensors: Sequence[torch.Tensor], world_size: int) -> dict[int, int]:
    """The rank that writes each tensor, by ``id``: the largest first, each to whom has the least so far."""
    groups: dict[object, dict[object, int]] = {}
    members: dict[int, object] = {}
    for tensor in tensors:
        group: object = id(tensor)
        place: object = id(tensor)
        if has_own_storage(tensor) and tensor.numel():
            group = tensor.device, tensor.untyped_storage().data_ptr()
            place = tensor.data_ptr(), tensor.shape
        members[id(tensor)] = group
        groups.setdefault(group, {})[place] = tensor.numel() * tensor.element_size()
    sizes = {group: sum(places.values()) for group, places in groups.items()}
    loads = [(0, rank) for rank in range(world_size)]
    chosen = {}
    for group in sorted(sizes, key=lambda group: -sizes[group]):  # stable: equal ones stay in the order of the state
        nbytes, rank = heapq.heappop(loads)
        chosen[group] = rank
        heapq.heappush(loads, (nbytes + sizes[group], rank))
    return {key: chosen[group] for key, group in members.items()}


def _part(node: Any, owners: dict[int, int], rank: int) -> Any:
    """What a rank writes of a node, `_ABSENT` where that is nothing."""
    if isinstance(node, torch.Tensor):
        return node if owners[id(node)] == rank else _ABSENT
    if type(node) not in _DIVISIBLE:
        return node if rank == 0 else _ABSENT
    if isinstance(node, dict):
        kept = {key: _part(child, owners, rank) for key, child in node.items()}
        if rank == 0:
            return _like(node, {key: None if child is _ABSENT else child for key, child in kept.items()})
        kept = {key: child for key, child in kept.items() if child is not _ABSENT}
        return _like(node, kept) if kept else _ABSENT
    children = [_part(child, owners, rank) for child in node]
    while rank != 0 and children and children[-1] is _ABSENT:
        children.pop()
    if rank != 0 and not children:
        return _ABSENT
    return type(node)(None if child is _ABSENT else child for child in children)


def _like(node: dict[Any, Any], content: dict[Any, Any]) -> dict[Any, Any]:
    """A dictionary of the same kind, with its attributes: a module's state dict has its versions there."""
    if type(node) is dict:
        return content
    made = OrderedDict(content)
    made.__dict__.update(node.__dict__)
    return made


def _joined(whole: Any, part: Any, fqn: str, rank: int) -> Any:
    """The node of rank 0 with what another rank has of it."""
    if part is None:
        return whole
    if whole is None and isinstance(part, torch.Tensor):
        return part
    if isinstance(whole, dict) and isinstance(part, dict) and part.keys() <= whole.keys():
        for key, child in part.items():
            whole[key] = _joined(whole[key], child, join(fqn, key), rank)
        return whole
    if isinstance(whole, (list, tuple)) and isinstance(part, (list, tuple)) and len(part) <= len(whole):
        pairs = enumerate(zip(whole, part, strict=False))
        children = [_joined(child, other, join(fqn, index), rank) for index, (child, other) in pairs]
        return type(whole)([*children, *whole[len(part) :]])
    raise MismatchError(
        f"{fqn} was saved as replicated, and was not the same on all ranks: rank {rank} has a {type(part).__name__}"
        f" where rank 0 has a {type(whole).__name__}"
    )
