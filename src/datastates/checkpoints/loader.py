"""Checkpoints brought back, on all ranks together: one of a step, the newest, or all of a training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from datastates.checkpoints import random_states
from datastates.checkpoints.loads import StepLoad
from datastates.checkpoints.search import Search, nothing_found
from datastates.checkpoints.states import RANDOM_STATES, check_entries
from datastates.checkpoints.steps import StepFolder, StepRecord
from datastates.errors import StateError
from datastates.formats.request import MapLocation
from datastates.fqns import near
from datastates.nodes.grouping import Nodes
from datastates.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """A checkpoint that was loaded.

    Attributes:
        step: its step.
        path: its folder.
        state: by entry; where targets were given, these, with what was loaded in them.
        metrics: the values that it was saved with.
        skipped: other checkpoints, by tag, and why each was not taken: they are damaged or were never completed.
    """

    step: int
    path: str
    state: Mapping[str, Any]
    metrics: Mapping[str, float]
    skipped: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load; see `Checkpointer.load_latest`."""

    strict: bool = True
    check: bool = True
    map_location: MapLocation = "cpu"
    weights_only: bool = True


class Loader:
    """Loads from one folder. Every method is a collective."""

    def __init__(self, steps: StepFolder, ranks: Ranks, options: LoadOptions, nodes: Nodes | None = None) -> None:
        self._steps = steps
        self._ranks = ranks
        self._options = options
        self._search = Search(steps, ranks, check=options.check, nodes=nodes)

    def load(self, step: int, into: MutableMapping[str, Any] | None, names: Iterable[str] | None) -> LoadedStep:
        """See `Checkpointer.load`."""
        record = self._search.of_step(step)
        with self._ranks.together(f"loading {record.path}"):
            return self._loaded(record, {}, into, names)

    def load_latest(
        self, into: MutableMapping[str, Any] | None, names: Iterable[str] | None, *, missing_ok: bool
    ) -> LoadedStep | None:
        """See `Checkpointer.load_latest`."""
        found = self._search.newest()
        if found.record is not None:
            with self._ranks.together(f"loading {found.record.path}"):
                return self._loaded(found.record, found.skipped, into, names)
        if missing_ok and not found.skipped:
            return None
        raise nothing_found(self._steps.directory, found.skipped)

    def resume(self, state: MutableMapping[str, Any], *, allow_fresh_start: bool) -> int | None:
        """See `Checkpointer.resume`."""
        found = self._search.newest()
        record = found.record
        if record is None:
            if found.skipped and not allow_fresh_start:
                raise nothing_found(self._steps.directory, found.skipped)
            logger.info("%s has no complete checkpoint: a fresh start", self._steps.directory)
            return None
        with self._ranks.together(f"resuming from {record.path}"):
            self._loaded(record, found.skipped, state, None)
            generators = self._of(record).random_states()
            if generators is not None:
                random_states.restore(generators)
        if generators is None and RANDOM_STATES in record.summary.entries:
            logger.warning(
                "%s was saved by %d ranks, this job has %d: the random states are not restored",
                record.path,
                record.summary.world_size,
                self._ranks.size,
            )
        logger.info("resumed from %s", record.path)
        return record.step

    def _of(self, record: StepRecord) -> StepLoad:
        options = self._options
        return StepLoad(record, self._ranks.rank, self._ranks.size, options.map_location, options.weights_only)

    def _loaded(
        self,
        record: StepRecord,
        skipped: Mapping[str, str],
        into: MutableMapping[str, Any] | None,
        names: Iterable[str] | None,
    ) -> LoadedStep:
        load = self._of(record)
        if into is None:
            wanted = load.entries() if names is None else _checked_names(names)
            state: Mapping[str, Any] = {name: load.load(name) for name in wanted}
        else:
            state = check_entries(into)
            for name in list(into) if names is None else _checked_names(names, into):
                load.restore(into, name, strict=self._options.strict)
        return LoadedStep(record.step, record.path, state, dict(record.metrics), dict(skipped))


def _checked_names(names: Iterable[str], into: Mapping[str, Any] | None = None) -> list[str]:
    """Names of entries, all of them texts and among ``into``. Raises StateError."""
    wanted = names if isinstance(names, str) else list(names)
    if isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted):
        raise StateError(f"names is {wanted!r}, expected names of entries, such as ['model']")
    for name in wanted:
        if into is not None and name not in into:
            raise StateError(
                f"names has {name!r}, and there is no such entry to load into{near(name, list(into))}", name
            )
    return wanted
