"""Which checkpoint all ranks load: the newest that is whole, as far as they have looked together."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field

from datastates import reader
from datastates.checkpoints.choices import Choice, survey_nodes
from datastates.checkpoints.steps import Incomplete, StepFolder, StepRecord, tag_of
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, DataStatesError
from datastates.nodes.grouping import Nodes
from datastates.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to.

    Attributes:
        record: the checkpoint, None where there is none that is whole.
        skipped: why others were not taken, by tag: those that are younger, or of which nobody knows.
    """

    record: StepRecord | None
    skipped: dict[str, str] = field(default_factory=dict)


class Search:
    """Looks for a checkpoint on all ranks at once: rank 0 reads the folder, and all verify the files between them.

    Every method is a collective.
    """

    def __init__(self, steps: StepFolder, ranks: Ranks, *, check: bool, nodes: Nodes | None = None) -> None:
        """Args:
        steps: the folder; of this node where nodes share none.
        ranks: all that load.
        check: compare all bytes with their checksums before a checkpoint is taken.
        nodes: where they share no directory.
        """
        self._steps = steps
        self._ranks = ranks
        self._check = check
        self._nodes = nodes

    def newest(self) -> Found:
        """The checkpoint that was saved last of those that are whole. Logs a warning for each that was passed over.

        Raises:
            StorageError: the folder cannot be read.
        """
        choices, incomplete = self._survey()
        skipped: dict[str, str] = {}
        for one in incomplete:
            self._skip(skipped, one.tag, one.problem)
        for choice in reversed(choices):
            problem = self._problem(choice)
            if not problem:
                record = choice.here()
                if skipped:
                    logger.warning("%s is taken", record.path)
                return Found(record, skipped)
            self._skip(skipped, choice.any.tag, problem)
        return Found(None, skipped)

    def of_step(self, step: int) -> StepRecord:
        """The checkpoint of a step.

        Raises:
            CheckpointNotFoundError: there is no complete one.
            CorruptCheckpointError: it is damaged.
            StorageError: it cannot be read.
        """
        choice = self._find(step)
        problem = self._problem(choice)
        record = choice.here()
        if problem:
            raise CorruptCheckpointError(problem, record.path)
        return record

    def _find(self, step: int) -> Choice:
        if self._nodes is None:
            return Choice(self._ranks.agree(lambda: self._steps.find(step)))
        choices, incomplete = self._survey()
        for choice in choices:
            if choice.any.step == step:
                return choice
        problem = "".join(f": {one.problem}" for one in incomplete if one.tag == tag_of(step))
        there = ", ".join(str(choice.any.step) for choice in choices) or "none"
        message = f"{self._steps.directory} has no complete checkpoint of step {step}{problem}; complete steps: {there}"
        raise CheckpointNotFoundError(message)

    def _survey(self) -> tuple[list[Choice], list[Incomplete]]:
        """The complete checkpoints, the one saved first before the others, and what is wrong with the rest."""
        if self._nodes is None:
            records, incomplete = self._ranks.agree(self._steps.survey)
            return [Choice(record) for record in records], incomplete
        return survey_nodes(self._nodes, self._steps)

    def _problem(self, choice: Choice) -> str:
        """What is wrong with the bytes of a checkpoint, the same on all ranks; empty where nothing is."""
        if not self._check:
            return ""
        problem = ""
        record = choice.record
        sharers = list(range(self._ranks.size)) if self._nodes is None else list(self._nodes.part.ranks)
        for rank in () if record is None else record.ranks[sharers.index(self._ranks.rank) :: len(sharers)]:
            path = os.path.join(choice.any.path, choice.any.summary.file_name(rank))
            try:
                reader.verify(path)
            except CheckpointNotFoundError:
                continue  # this rank has saved nothing: the sizes of what is on record were looked at
            except (DataStatesError, OSError) as error:
                problem = problem or str(error)
        return next((found for found in self._ranks.gather(problem) if found), "")

    def _skip(self, skipped: dict[str, str], tag: str, problem: str) -> None:
        skipped[tag] = problem
        logger.warning("checkpoint %s is not loaded: %s", os.path.join(self._steps.directory, tag), problem)


def nothing_found(directory: str, skipped: dict[str, str]) -> DataStatesError:
    """Why nothing was loaded."""
    what = "; ".join(f"{tag}: {problem}" for tag, problem in skipped.items()) or "there are no checkpoints at all"
    return CheckpointNotFoundError(f"{directory} holds no complete checkpoint: {what}")
