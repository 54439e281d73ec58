"""Which checkpoints are whole, as the nodes find out together when they start or load.

A crash may come after the parts of a checkpoint were committed and before all nodes knew so; a node may lose its disk.
Here each says which parts it holds. What is whole is put on record where that lacks, and taken back where a part is
gone, so that from then on each node can tell by itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from datastates import recovery
from datastates.attempt_folder import has_attempts
from datastates.catalog import list_checkpoints
from datastates.directories import make_directories
from datastates.errors import CorruptCheckpointError
from datastates.integrity import check
from datastates.manifest import LATEST_NAME, read_latest
from datastates.node_parts import NodePart
from datastates.nodes.grouping import Nodes
from datastates.storage import write_atomically
from datastates.system_calls import patiently, storage_errors
from datastates.whole_records import is_whole, mark_whole, unmark_whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a node holds of a checkpoint: its part, or why that is none."""

    tag: str
    attempt: str = ""
    part: NodePart | None = None
    committed_at: float = 0.0
    is_marked: bool = False
    problem: str = ""


_Holdings = Mapping[str, _Held]  # of a node, by the name of the checkpoint's folder


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the nodes have found out, the same on all ranks.

    Attributes:
        whole: names of the folders of the checkpoints of which every part is there.
        missing: of others, what is missing where.
    """

    whole: frozenset[str] = frozenset()
    missing: Mapping[str, str] = field(default_factory=dict)


def agree_on_whole(nodes: Nodes, directory: str) -> Agreement:
    """Find out which checkpoints below a folder are whole, and have that on record on each node; a collective.

    Commits that a crash has cut are finished first, which waits for a process that has outlived its trainer. Where the
    nodes' ``latest`` differ, or do not know yet of what turns out to be whole, all name the youngest of those.

    Args:
        nodes: all of the job.
        directory: of the checkpoints, the same path or another on each node.

    Raises:
        StorageError: a node cannot read or write its directory; on all ranks.
    """
    surveys = nodes.each(lambda: (_holdings(directory), read_latest(directory)))
    holdings = [held for held, _ in surveys]
    whole: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in sorted({name for held in holdings for name in held}):
        found = [held.get(name) for held in holdings]
        attempt = _whole_attempt(found)
        if attempt is None:
            missing[name] = _missing(nodes, found)
        else:
            whole[name] = attempt
    latest = _latest(holdings, whole, [named for _, named in surveys])
    nodes.each(lambda: _put_on_record(directory, holdings[nodes.part.index], whole, latest))
    return Agreement(frozenset(whole), missing)


def _holdings(directory: str) -> dict[str, _Held]:
    with storage_errors("list", directory):
        try:
            names = sorted(patiently(os.listdir, directory))
        except FileNotFoundError:
            return {}
    folders = [(name, os.path.join(directory, name)) for name in names]
    return {name: held for name, path in folders if has_attempts(path) and (held := _held(path)) is not None}


def _held(path: str) -> _Held | None:
    """What this node holds of a checkpoint; None where that is none of a node's."""
    name = os.path.basename(path)
    try:
        record = recovery.committed_record(path)
        if record is None:  # nothing is held where there were only leftovers, which are gone now
            return _Held(name, problem=list_checkpoints(path)[0].problem) if has_attempts(path) else None
        if record.node is None:
            return None
        problems = check(path)
        problem = f"{problems[0].message}: {problems[0].path}" if problems else ""
        return _Held(
            record.tag or name, record.attempt, record.node, record.committed_at, is_whole(path, record), problem
        )
    except CorruptCheckpointError as error:
        return _Held(name, problem=str(error))


def _sound(held: Sequence[_Held | None]) -> list[_Held]:
    return [one for one in held if one is not None and one.part is not None and not one.problem]


def _whole_attempt(held: Sequence[_Held | None]) -> str | None:
    """The attempt of which every part is there, the youngest of several; None where there is none.

    Other nodes may hold a part of another save under the same name, on a disk that was away: that stays no whole.
    """
    there: dict[str, set[int]] = {}
    for one in (sound := _sound(held)):
        if one.part is not None:
            there.setdefault(one.attempt, set()).add(one.part.index)
    whole = [one for one in sound if one.part is not None and len(there[one.attempt]) == one.part.num_nodes]
    return max(whole, key=lambda one: one.committed_at).attempt if whole else None


def _missing(nodes: Nodes, held: Sequence[_Held | None]) -> str:
    """What is missing where of a checkpoint that is not whole."""
    sound = _sound(held)
    youngest = max((one for one in sound), key=lambda one: one.committed_at, default=None)
    texts = []
    for index, found in enumerate(held):
        node = nodes.part.described(index)
        if found is None:
            texts.append(f"{node} has no part of it")
        elif found.problem:
            texts.append(f"{node}: {found.problem}")
        elif youngest is not None and found.attempt != youngest.attempt:
            texts.append(f"{node} has the part of another save")
    if not texts and youngest is not None and youngest.part is not None:
        there = {one.part.index for one in sound if one.part is not None}
        lost = [youngest.part.described(index) for index in range(youngest.part.num_nodes) if index not in there]
        texts.append(f"the part of {' and '.join(lost)} is on none of these nodes")
    return "; ".join(texts)


def _latest(holdings: Sequence[_Holdings], whole: Mapping[str, str], named: Sequence[str | None]) -> str | None:
    """The tag that ``latest`` shall name on all nodes, None where it stays as it is."""
    ages: dict[str, float] = {}
    wanted: set[str] = set()
    for held in holdings:
        for one in (one for name, one in held.items() if one.attempt == whole.get(name)):
            ages[one.tag] = max(one.committed_at, ages.get(one.tag, 0.0))
            if not one.is_marked or one.tag in named:
                wanted.add(one.tag)
    is_stale = any(tag is not None and tag not in ages for tag in named)
    return max(wanted or (ages.keys() if is_stale else ()), key=lambda tag: ages[tag], default=None)


def _put_on_record(directory: str, held: _Holdings, whole: Mapping[str, str], latest: str | None) -> None:
    for name, one in held.items():
        path = os.path.join(directory, name)
        is_whole_here = bool(one.attempt) and one.attempt == whole.get(name)
        if is_whole_here and not one.is_marked:
            mark_whole(path, one.attempt)
            logger.info("%s: all nodes have committed their parts; it was not known here", path)
        elif not is_whole_here and one.is_marked:
            unmark_whole(path)
            logger.warning("%s is not whole any more: another node has lost its part, or has another save's", path)
    if latest is not None and read_latest(directory) != latest:
        with storage_errors("make", directory):
            make_directories(directory)
        write_atomically(os.path.join(directory, LATEST_NAME), os.fsencode(latest))
