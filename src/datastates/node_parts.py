"""Which ranks of a job are on which node, and which part of a checkpoint is one node's.

Nodes are counted from 0, in the order of their lowest ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a job.

    Attributes:
        name: what people call it: its host's name, or the name that it was given.
        ranks: the ranks on it, ascending.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodePart:
    """One node's part of a checkpoint: what the ranks on it have saved, in a directory that no other node sees.

    Attributes:
        index: of the node whose part it is.
        nodes: all of them, by index. Each rank of the job is on exactly one.
    """

    index: int
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node.ranks)
        if not 0 <= self.index < len(self.nodes) or ranks != list(range(len(ranks))) or not self.ranks:
            raise ValueError(f"node {self.index} of {len(self.nodes)} with the ranks {ranks} is no part of a job")

    @property
    def name(self) -> str:
        return self.nodes[self.index].name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose files are in this part."""
        return self.nodes[self.index].ranks

    @property
    def first_rank(self) -> int:
        """The rank that does for its node what rank 0 does where all share a directory."""
        return self.ranks[0]

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return sum(len(node.ranks) for node in self.nodes)

    def __str__(self) -> str:
        return f"part of node {self.index} of {self.num_nodes}"

    def described(self, index: int) -> str:
        """What messages call a node."""
        return f"node {index} ({self.nodes[index].name})"

    def holder(self, rank: int) -> str:
        """The node whose part has the files of a rank, as messages call it; empty where there was no such rank."""
        found = [index for index, node in enumerate(self.nodes) if rank in node.ranks]
        return self.described(found[0]) if found else ""

    def to_fields(self) -> dict[str, Any]:
        """As it stands in a record, with ranges of ranks: ``"0-7"``, ``"0,2"``."""
        nodes = [{"name": node.name, "ranks": ranges_of(node.ranks)} for node in self.nodes]
        return {"index": self.index, "nodes": nodes}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> NodePart:
        """Read what `to_fields` has given. Raises KeyError, TypeError, ValueError."""
        nodes = tuple(Node(str(node["name"]), _ranks_in(str(node["ranks"]))) for node in fields["nodes"])
        return cls(int(fields["index"]), nodes)


def ranges_of(ranks: Iterable[int]) -> str:
    """Ascending numbers as ranges: ``"0-3,6"``."""
    runs = itertools.groupby(enumerate(ranks), key=lambda entry: entry[1] - entry[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(entries) for _, entries in runs)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def _ranks_in(text: str) -> tuple[int, ...]:
    ends = [(int(first), int(last or first)) for first, _, last in (run.partition("-") for run in text.split(","))]
    return tuple(rank for first, last in ends for rank in range(first, last + 1))
