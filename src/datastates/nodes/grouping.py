"""Which ranks are on one node, as they find out together."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import TypeVar

from torch import distributed

from datastates.config import CheckpointConfig
from datastates.directories import make_directories
from datastates.errors import ConfigError, DataStatesError, StorageError
from datastates.node_parts import Node, NodePart, ranges_of
from datastates.nodes.following import Store
from datastates.ranks import Ranks
from datastates.system_calls import storage_errors

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

NAME_VARIABLE = "DATASTATES_NODE_NAME"
"""Environment variable that names the node a rank is on. For launchers that give each rank a container of its own, and
for several nodes that are one machine."""

_PROBE = ".datastates-node-"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MOUNTS = "/proc/self/ns/mnt"


class Nodes:
    """The nodes of a job whose ranks save together. Its methods are collectives of all ranks."""

    def __init__(self, ranks: Ranks, part: NodePart, run_id: str) -> None:
        """Args:
        ranks: all of them.
        part: what this rank's node saves of each checkpoint.
        run_id: equal on all ranks, unlike in any other run.
        """
        self.ranks = ranks
        self.part = part
        self.run_id = run_id

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first one on its node."""
        return self.ranks.rank == self.part.first_rank

    @property
    def own(self) -> str:
        """What messages call this node."""
        return self.part.described(self.part.index)

    def each(self, compute: Callable[[], Value]) -> list[Value]:
        """What the first rank of each node finds, by node, on all ranks.

        Raises:
            DataStatesError, OSError: what was raised on the first node where something was, on all ranks.
        """
        found: tuple[Value | None, Exception | None] = (None, None)
        if self.is_first:
            try:
                found = (compute(), None)
            except (DataStatesError, OSError) as error:
                found = (None, error)
        known = self.ranks.gather(found)
        chosen = [known[node.ranks[0]] for node in self.part.nodes]
        for index, (_, failure) in enumerate(chosen):
            if failure is not None:
                logger.error("%s: %s", self.part.described(index), failure)
                raise failure
        return [value for value, _ in chosen]

    def store(self) -> Store:
        """A connection of its own to the job's store: who waits there holds up nobody else.

        Source: torch 2.13, ``torch.distributed.Store.clone``; the store that the default group was made with has a
        private name only, ``distributed_c10d._get_default_store``.
        """
        store = distributed.distributed_c10d._get_default_store()
        connection: Store = distributed.PrefixStore(  # type: ignore[attr-defined]
            f"datastates/{self.run_id}/nodes",
            store.clone(),  # type: ignore[attr-defined]
        )
        return connection


def agree_on_nodes(ranks: Ranks, config: CheckpointConfig, run_id: str) -> Nodes | None:
    """The nodes of a job, None where all its ranks share the directory; a collective where ``shared_directory`` is off.

    Ranks are on one node if they run under the same kernel and see the same mounts, or are given the same
    ``DATASTATES_NODE_NAME``.

    Raises:
        ConfigError: some ranks are given a node's name, and others are not.
    """
    if config.shared_directory or ranks.size == 1:
        return None
    given = os.environ.get(NAME_VARIABLE, "")
    known = ranks.gather((given, given or socket.gethostname(), given or _machine()))
    unnamed = [rank for rank, (name, _, _) in enumerate(known) if not name]
    if 0 < len(unnamed) < ranks.size:
        message = f"{NAME_VARIABLE} is set, but not on ranks {ranges_of(unnamed)}: set it on all ranks or on none"
        raise ConfigError(message)
    keys = list(dict.fromkeys(key for _, _, key in known))
    members = [tuple(rank for rank, entry in enumerate(known) if entry[2] == key) for key in keys]
    nodes = tuple(Node(known[there[0]][1], there) for there in members)
    if len(nodes) == 1:
        logger.info("all %d ranks are on one node, %s: it has the whole of each checkpoint", ranks.size, nodes[0].name)
        return None
    return Nodes(ranks, NodePart(keys.index(known[ranks.rank][2]), nodes), run_id)


def check_directories(nodes: Nodes, directory: str) -> None:
    """Make the directory on each node, and see that the ranks of a node share it, and no others; a collective.

    Raises:
        ConfigError: they do not, on all ranks.
        StorageError: a node cannot make it, on all ranks.
    """
    prefix = os.path.join(directory, f"{_PROBE}{nodes.run_id}-")
    own = f"{prefix}{nodes.part.index}"
    nodes.each(lambda: _leave_probe(directory, own))
    try:
        problem = _probes_problem(nodes, prefix)
        problem = next((found for found in nodes.ranks.gather(problem) if found), "")
    finally:
        if nodes.is_first:
            with storage_errors("remove", own):
                os.unlink(own)
    if problem:
        raise ConfigError(problem)


def _leave_probe(directory: str, path: str) -> None:
    with storage_errors("make", directory):
        make_directories(directory)
        prefix = path.rpartition("-")[0]
        for name in os.listdir(directory):  # of an earlier run that was killed just then
            if name.startswith(_PROBE) and not os.path.join(directory, name).startswith(prefix):
                os.unlink(os.path.join(directory, name))
        with open(path, "xb"):
            pass


def _probes_problem(nodes: Nodes, prefix: str) -> str:
    part, directory, rank = nodes.part, os.path.dirname(prefix), nodes.ranks.rank
    seen = [index for index in range(part.num_nodes) if os.path.exists(f"{prefix}{index}")]
    others = [index for index in seen if index != part.index]
    if others:
        return (
            f"shared_directory is false, but {nodes.own} and {part.described(others[0])} see the same {directory}: set"
            f" shared_directory to true, or {NAME_VARIABLE} to the same name on the ranks that share it"
        )
    if not seen:
        return (
            f"rank {rank} does not see the {directory} of rank {part.first_rank}, which is on {nodes.own} as well: give"
            f" all ranks of a node one directory, or set {NAME_VARIABLE} to one name per directory"
        )
    return ""


def _machine() -> str:
    """What is the same for processes that see the same files, and for no others as a rule.

    Source: proc(5), for the id of the boot; namespaces(7): processes in the same mount namespace have links that say
    the same.
    """
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink(_MOUNTS)}"
    except OSError as error:
        message = f"this node cannot be told from others: {error}; set {NAME_VARIABLE}"
        raise StorageError(message, error.errno) from error
