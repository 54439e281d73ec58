"""The checkpoints of a folder that are not needed any more: which they are, and their removal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from datastates.checkpoints.steps import StepFolder, StepRecord
from datastates.deletions import is_inside
from datastates.errors import StorageError
from datastates.manifest import read_commit, read_latest
from datastates.pins import is_pinned
from datastates.removal import finish_removals, remove_checkpoint
from datastates.retention import RetentionPolicy
from datastates.tier_settings import TierSettings
from datastates.tiers.marks import is_awaited

logger = logging.getLogger(__name__)


class Claims:
    """Keeps saves and removals off each other's folders. Thread safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()  # protects the fields below
        self._saving: list[str] = []
        self._removing = ""

    @contextmanager
    def saving(self, path: str) -> Iterator[None]:
        """Blocks while this very folder is being removed."""
        with self._condition:
            self._condition.wait_for(lambda: self._removing != path)
            self._saving.append(path)
        try:
            yield
        finally:
            with self._condition:
                self._saving.remove(path)

    @contextmanager
    def removing(self, path: str) -> Iterator[bool]:
        """Whether the folder may be removed: nobody begins to save to it. One at a time."""
        with self._condition:
            is_free = path not in self._saving
            self._removing = path if is_free else ""
        try:
            yield is_free
        finally:
            with self._condition:
                self._removing = ""
                self._condition.notify_all()


@dataclass(frozen=True)
class Excess:
    """What a policy does not keep of the checkpoints of a folder; see `deletions.Deletion`.

    Attributes:
        steps: the folder.
        policy: what stays, beside the newest, what ``latest`` names, and what is pinned or linked to.
        metric: the name of the metric that ``keep_best`` is about.
        claims: which folders are being saved to.
        tiers: where checkpoints are carried to: nothing is removed from the first one before the others have it.
        keeps_spare: the space of what is removed is kept for the next saves, see `spares`.
        removes_parts: where nodes share no folder: parts of what is not whole go once a younger checkpoint is.
    """

    steps: StepFolder
    policy: RetentionPolicy
    metric: str | None
    claims: Claims
    tiers: tuple[TierSettings, ...] = ()
    keeps_spare: bool = False
    removes_parts: bool = False

    @property
    def folder(self) -> str:
        return self.steps.directory

    def delete(self, busy: Collection[str]) -> None:
        """Remove what is too many. What cannot be removed is logged, and in nobody's way."""
        finish_removals(self.folder)
        for record in self.doomed(busy):
            try:
                self._remove(record.path)
            except (StorageError, OSError) as error:
                logger.warning("%s: an old checkpoint stays, it cannot be deleted: %s", record.path, error)
        for path in self.steps.forsaken() if self.removes_parts else ():
            try:
                if not any(is_inside(other, path) for other in busy):
                    self._remove(path)
            except (StorageError, OSError) as error:
                logger.warning("%s: what is not whole stays, it cannot be deleted: %s", path, error)

    def doomed(self, busy: Collection[str]) -> list[StepRecord]:
        """The checkpoints that are too many, the oldest first."""
        records = [one for one in self.steps.records(anew=False) if not any(is_inside(path, one.path) for path in busy)]
        linked = self.steps.linked()
        pinned = frozenset(one.tag for one in records if one.is_pinned or one.path in linked)
        metric = self.metric or ""
        metrics = {one.tag: one.metrics[metric] for one in records if metric in one.metrics}
        policy = replace(self.policy, pinned=pinned)
        kept = policy.survivors(records, latest=read_latest(self.folder), metrics=metrics, is_ordered=True)
        return [one for one in records if one.tag not in kept and not self._is_awaited(one.path)]

    def _is_awaited(self, path: str) -> bool:
        record = read_commit(path) if self.tiers else None
        return record is not None and is_awaited(path, record.attempt, self.tiers)

    def _remove(self, path: str) -> None:
        with self.claims.removing(path) as is_free:
            if is_free and not is_pinned(path):
                remove_checkpoint(path, spare=self.keeps_spare)
                logger.info("%s: deleted, younger checkpoints are complete", path)
