"""Rank 0's thread that removes from the first tier what its rules do not keep."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from datastates.errors import StorageError
from datastates.removal import remove_checkpoint
from datastates.tier_settings import TierSettings
from datastates.tiers.carrier import Note, Step
from datastates.tiers.first_tier import Placed, committed_below, latest_tags, pinned_names
from datastates.tiers.marks import Marks
from datastates.tiers.selection import folder_of, to_remove
from datastates.tiers.worker import Worker


@dataclass(frozen=True, slots=True)
class Loss:
    """A checkpoint that was removed from the first tier before all others had it.

    Attributes:
        checkpoint: which.
        tiers: those that never get it.
    """

    checkpoint: Placed
    tiers: tuple[str, ...]


def keep_house(first: TierSettings, further: Sequence[TierSettings]) -> tuple[list[str], list[Loss]]:
    """Apply the first tier's rules to what is committed there. Returns the names of what was removed, and the losses.

    What a living job is just saving to, or what the file system refuses to remove, stays.

    Raises:
        StorageError: the tier cannot be read.
    """
    found = committed_below(first.path)
    directories = {one.name: os.path.join(first.path, one.name) for one in found}
    lacking: dict[str, tuple[str, ...]] = {}
    in_progress = set()
    for one in found:
        for tier in further:
            marks = Marks(directories[one.name], one.attempt, tier)
            if marks.outcome is None:
                lacking[one.name] = (*lacking.get(one.name, ()), tier.path)
                in_progress |= {one.name} if marks.chosen_at is not None else set()
    removals = to_remove(
        found,
        first,
        latest=latest_tags(first.path, {folder_of(one.name) for one in found}),
        uncarried=lacking,
        in_progress=in_progress,
        pinned=pinned_names(first.path, found),
    )
    removed = [name for name in (*removals.names, *removals.dropped) if _remove(directories[name])]
    lost = [one for one in found if one.name in removals.dropped and one.name in removed]
    return removed, [Loss(one, lacking[one.name]) for one in lost]


def _remove(directory: str) -> bool:
    try:
        remove_checkpoint(directory)
    except StorageError:
        return False  # it is tried again after the next commit
    return True


class Housekeeper(Worker):
    """Calls `keep_house` whenever it is woken."""

    def __init__(
        self,
        first: TierSettings,
        further: Sequence[TierSettings],
        *,
        tell: Callable[[Note], None],
        on_removed: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        """Args:
        first: the tier, with its rules.
        further: the other tiers.
        tell: told of each checkpoint that goes without having been carried, and of failures.
        on_removed: told when something is gone.
        on_idle: as for `Worker`.
        """
        super().__init__(on_idle)
        self._first = first
        self._further = further
        self._tell = tell
        self._on_removed = on_removed

    def _turn(self) -> None:
        begin = time.monotonic()
        path = self._first.path
        try:
            removed, lost = keep_house(self._first, self._further)
        except Exception as error:  # noqa: BLE001 - the top of a thread: a tier never harms a save
            text = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
            self._tell(Note(Step.FAILED, "", path, path, 0, begin, time.monotonic(), text))
            return
        for loss in lost:
            self._tell_of(loss, begin)
        if removed:
            self._on_removed()

    def _tell_of(self, loss: Loss, begin: float) -> None:
        path, one = self._first.path, loss.checkpoint
        message = (
            f"it was removed before, since {path} is at its limit of {self._first.limit_gb:g} GB, and that tier is"
            " slower than the saves; raise limit_gb, or save less often"
        )
        for tier in loss.tiers:
            directory = os.path.join(path, one.name)
            self._tell(Note(Step.GIVEN_UP, one.attempt, directory, tier, one.nbytes, begin, time.monotonic(), message))
