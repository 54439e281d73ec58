"""The leaves of a structure by name, and the structure without some of them, for any kind of node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from datastates.fqns import join

MAX_DEPTH = 400
"""States are nested a few dozen deep at most; Python itself ends at about a thousand."""

_FEW_LEAVES = 1000
_LEAVES_PER_BYTE = 4  # one at most where nothing is shared

Node = Any
Path = tuple[int, ...]
"""Positions of children, from the root on."""


class Structure(Protocol):
    """How the nodes of one kind hang together."""

    def children(self, node: Node) -> Sequence[tuple[object, Node]] | None:
        """Keys and children of a container; None for a leaf."""

    def is_sequence(self, node: Node) -> bool:
        """Whether the children of a container have positions rather than keys."""

    def rebuilt(self, node: Node, kept: Mapping[int, Node]) -> Node:
        """The container with these children only, by their positions; in a sequence None stands for the others."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A node without children (an empty container is one, too)."""

    fqn: str
    path: Path
    node: Node


def leaves(structure: Structure, root: Node, nbytes: int | None = None) -> Iterator[Leaf]:
    """All leaves in order. What is referred to twice is met twice.

    Args:
        structure: how the nodes hang together.
        root: the whole.
        nbytes: length of the text that the structure was read from: one that refers to its own parts again and again
            has more leaves than that, and is refused. None: there is no limit.

    Raises:
        ValueError: the structure is nested too deeply, contains itself, or multiplies itself.
    """
    stack: list[tuple[str, Path, Node]] = [("", (), root)]
    num_leaves, limit = 0, None if nbytes is None else _FEW_LEAVES + _LEAVES_PER_BYTE * nbytes
    while stack:
        prefix, path, node = stack.pop()
        children = structure.children(node)
        if not children:
            num_leaves += 1
            if limit is not None and num_leaves > limit:
                raise ValueError(f"the state has more than {limit} leaves in {nbytes} bytes")
            yield Leaf(prefix, path, node)
            continue
        if len(path) == MAX_DEPTH:
            raise ValueError(f"{prefix[:80]}: the state is nested more than {MAX_DEPTH} deep")
        for position in range(len(children) - 1, -1, -1):
            key, child = children[position]
            stack.append((join(prefix, key), (*path, position), child))


def pruned(structure: Structure, root: Node, kept: set[Path], blank: set[Path]) -> tuple[Node, dict[Path, Path]]:
    """A structure with some of its leaves only.

    Args:
        structure: how the nodes hang together.
        root: the whole, as `leaves` has walked it.
        kept: paths of the leaves that stay.
        blank: paths of the leaves of which only the place stays: None stands there.

    Returns:
        The structure, None when nothing stays; and where each leaf is in it.
    """
    wanted = {path[:length] for path in kept | blank for length in range(len(path) + 1)}
    places: dict[Path, Path] = {}

    def visit(node: Node, path: Path, place: Path) -> Node:
        children = structure.children(node)
        if not children:
            places[path] = place
            return None if path in blank else node
        is_sequence = structure.is_sequence(node)
        stay: dict[int, Node] = {}
        for position, (_, child) in enumerate(children):
            below = (*path, position)
            if below in wanted:
                stay[position] = visit(child, below, (*place, position if is_sequence else len(stay)))
        return structure.rebuilt(node, stay)

    return (visit(root, (), ()) if wanted else None), places
