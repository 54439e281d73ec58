"""The checkpoints that all ranks may load, where each node has a folder of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from datastates.checkpoints.states import RANDOM_STATES
from datastates.checkpoints.steps import Incomplete, StepFolder, StepRecord, in_order
from datastates.errors import TopologyError
from datastates.fqns import listed
from datastates.node_parts import ranges_of
from datastates.nodes.agreement import agree_on_whole
from datastates.nodes.grouping import Nodes

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint that all ranks may load together.

    Attributes:
        record: what is of it in this rank's folder, None where there is nothing.
        elsewhere: another node's, where there is nothing here.
        misplaced: why its files are on other nodes than the ranks that need them, the same on all ranks.
    """

    record: StepRecord | None
    elsewhere: StepRecord | None = None
    misplaced: str = ""

    @property
    def any(self) -> StepRecord:
        """Says what is the same on all nodes."""
        found = self.record or self.elsewhere
        if found is None:
            raise ValueError("a choice without a record")
        return found

    def here(self) -> StepRecord:
        """What this rank loads from. Raises TopologyError, on all ranks."""
        if self.misplaced or self.record is None:
            raise TopologyError(self.misplaced)
        return self.record


def survey_nodes(nodes: Nodes, steps: StepFolder) -> tuple[list[Choice], list[Incomplete]]:
    """The checkpoints that are whole, and what is missing where of the others; a collective.

    Raises:
        StorageError: a node's folder cannot be read.
    """
    agreement = agree_on_whole(nodes, steps.directory)
    surveys = nodes.each(steps.survey)
    by_tag: dict[str, list[StepRecord | None]] = {}
    for index, (records, _) in enumerate(surveys):
        for record in records:
            by_tag.setdefault(record.tag, [None] * len(surveys))[index] = record
    choices = {tag: _choice(nodes, held) for tag, held in by_tag.items()}
    problems = dict(agreement.missing)
    for index, (_, incomplete) in enumerate(surveys):
        for one in incomplete:
            problems.setdefault(one.tag, f"{nodes.part.described(index)}: {one.problem}")
    ordered = in_order(choice.any for choice in choices.values())
    whole = [choices[record.tag] for record in ordered]
    return whole, [Incomplete(tag, problem) for tag, problem in sorted(problems.items()) if tag not in choices]


def _choice(nodes: Nodes, held: list[StepRecord | None]) -> Choice:
    first = next(record for record in held if record is not None)
    # what the nodes know of themselves differs, the order must not
    first = replace(first, created_at=max(record.created_at for record in held if record is not None))
    return Choice(held[nodes.part.index], first, _misplaced(nodes, held, first))


def _misplaced(nodes: Nodes, held: list[StepRecord | None], first: StepRecord) -> str:
    """Why ranks cannot load, since what they need is on other nodes."""
    name = os.path.basename(first.path)
    for index, record in enumerate(held):
        if record is None:
            return f"{name}: {nodes.part.described(index)} has no part of it, it was saved on {_nodes_of(first)}"
        own = set(record.summary.entries) - set(record.summary.replicated) - {RANDOM_STATES}
        if record.part is None or not own or record.summary.world_size != nodes.ranks.size:
            continue
        lost = [rank for rank in nodes.part.nodes[index].ranks if rank not in record.part.ranks]
        if lost:
            return (
                f"{name}: ranks {ranges_of(lost)} run on {nodes.part.described(index)}, which has the files of ranks"
                f" {ranges_of(record.part.ranks)}; those of rank {lost[0]} are in the part of"
                f" {record.part.holder(lost[0])}: start each rank where its files are"
            )
    return ""


def _nodes_of(record: StepRecord) -> str:
    part = record.part
    return "" if part is None else listed([part.described(index) for index in range(part.num_nodes)], _NAMES_SHOWN)
