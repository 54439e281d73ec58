"""The thread that carries checkpoints to one tier, as long as there are any."""

from __future__ import annotations

import errno
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from datastates.errors import DataStatesError
from datastates.tier_settings import TierSettings
from datastates.tiers.carrying import Carrying, DamagedError, StoppedError, SupersededError
from datastates.tiers.first_tier import Placed
from datastates.tiers.marks import Outcome
from datastates.tiers.selection import to_carry
from datastates.tiers.store import Store, open_store
from datastates.tiers.worker import Worker

_FIRST_RETRY_SECONDS = 1.0
_LAST_RETRY_SECONDS = 60.0
_FIRST_POLL_SECONDS = 0.05
_LAST_POLL_SECONDS = 5.0
_TAKEN_SECONDS = 0.5  # how often it is looked whether a process that an earlier run has left is done with a checkpoint
_TRIES_IN_A_ROW = 3
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_FOLLOW_SECONDS = 0.25  # how often another rank looks for what rank 0 has chosen


class Step(Enum):
    """What a note tells of."""

    CARRIED = "carried"
    FAILED = "failed"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class Note:
    """What became of a try to carry a checkpoint, for the trainer.

    Attributes:
        path: the checkpoint's folder in the first tier.
        tier: where to.
        nbytes: of the whole checkpoint.
        begin: ``time.monotonic()`` of the try.
        end: likewise.
        error: why not; empty where it is carried.
    """

    step: Step
    attempt: str
    path: str
    tier: str
    nbytes: int
    begin: float
    end: float
    error: str = ""


class Carrier(Worker):
    """Carries to one tier. Idle when all that is committed in the first tier has come to an end in this one."""

    def __init__(
        self,
        root: str,
        tier: TierSettings,
        *,
        rank: int,
        world_size: int,
        patience_seconds: float,
        tell: Callable[[Note], None],
        on_idle: Callable[[], None],
        open_tier: Callable[[TierSettings, Callable[[str], None]], Store] = open_store,
    ) -> None:
        """Args:
        root: the first tier.
        tier: where to.
        rank: of this process.
        world_size: number of ranks that take part.
        patience_seconds: how long rank 0 waits for the others' parts before it turns to a newer checkpoint.
        tell: told what becomes of each try, on the thread.
        on_idle: as for `Worker`.
        open_tier: opens the store.
        """
        super().__init__(on_idle)
        self._root = root
        self._tier = tier
        self._rank = rank
        self._world_size = world_size
        self._patience_seconds = patience_seconds
        self._tell = tell
        self._open_tier = open_tier
        self._carrying: Carrying | None = None
        self._num_failures = 0
        self._failed_tries: Counter[tuple[str, str]] = Counter()  # of those that wait, by name and attempt
        self._is_clean = False  # of what crashes have left
        self._is_told = False  # that it cannot be cleaned

    def _turn(self) -> float | None:
        """`turn`, and after whatever may go wrong there a pause that gets longer: a tier never harms a save."""
        begin = time.monotonic()
        try:
            return self.turn()
        except StoppedError:
            return None
        except Exception as error:  # noqa: BLE001 - the top of a thread
            self._note(Step.FAILED, None, begin, f"{type(error).__name__}: {error}")
            return self._pause()

    def turn(self) -> float | None:
        """Carry one checkpoint, if there is one. Returns the seconds until the next look; None: when woken."""
        carrying = self._carrying = self._carrying or self._make_carrying()
        waiting, carried = carrying.survey()
        if self._rank == 0:
            self._tidy(carrying)
        placed = self._lead(carrying, waiting, carried) if self._rank == 0 else self._follow(carrying, waiting)
        if placed is None:
            return _FOLLOW_SECONDS if waiting and self._rank else None
        with carrying.marks(placed).turn(self._rank) as is_mine:
            if not is_mine:
                return _TAKEN_SECONDS
            if carrying.marks(placed).outcome is not None:
                return 0.0
            return self._try(carrying, placed)

    def _try(self, carrying: Carrying, placed: Placed) -> float:
        """Carry this one, and say what came of it. Returns the seconds until the next look."""
        begin = time.monotonic()
        try:
            self._carry(carrying, placed)
        except SupersededError as error:
            self._note(Step.GIVEN_UP, placed, begin, str(error))
        except DamagedError as error:
            carrying.marks(placed).settle(Outcome.DAMAGED, str(error))
            self._note(Step.GIVEN_UP, placed, begin, f"it is damaged and is not carried: {error}")
        except DataStatesError as error:
            if not carrying.is_superseded(placed):
                self._note(Step.FAILED, placed, begin, str(error))
                self._failed_tries[_key_of(placed)] += 1
                if self._rank == 0 and isinstance(error, OSError) and error.errno in _NO_SPACE:
                    self._make_room(carrying, placed, begin)
                return self._pause()
            self._note(Step.GIVEN_UP, placed, begin, f"it was removed or saved anew: {error}")
        else:
            if self._rank == 0:
                self._note(Step.CARRIED, placed, begin, "")
                self._make_room(carrying, placed, begin)
        self._num_failures = 0
        return 0.0

    def _make_room(self, carrying: Carrying, placed: Placed, begin: float) -> None:
        """Rank 0: remove from the tier what its rules do not keep."""
        try:
            carrying.apply_retention()
        except DataStatesError as error:  # tried again after the next one
            self._note(Step.FAILED, placed, begin, f"older ones stay in {self._tier.path}: {error}")

    def _tidy(self, carrying: Carrying) -> None:
        """Rank 0: remove what crashes have left, and what was begun in vain. What stays is in nobody's way."""
        begin = time.monotonic()
        try:
            if not self._is_clean:
                carrying.clean_forgotten()
                self._is_clean = True
            carrying.discard_abandoned()
        except DataStatesError as error:
            if not self._is_told:
                self._note(Step.FAILED, None, begin, f"parts of earlier tries may stay in {self._tier.path}: {error}")
            self._is_told = True

    def _make_carrying(self) -> Carrying:
        return Carrying(
            self._root,
            self._tier,
            self._open_tier(self._tier, self._warn),
            rank=self._rank,
            world_size=self._world_size,
            is_stopped=self._stopped.is_set,
        )

    def _warn(self, message: str) -> None:
        self._note(Step.FAILED, None, time.monotonic(), message)

    def _lead(self, carrying: Carrying, waiting: list[Placed], carried: list[Placed]) -> Placed | None:
        """Rank 0: what is carried next.

        The newest, unless another has been begun and has not failed since; one that has failed a few times lets the
        others go first, or a single one that cannot be carried would hold up all that are older.
        """
        wanted, unwanted = to_carry(waiting, carried, self._tier, carrying.pinned(waiting))
        for placed in unwanted:
            carrying.marks(placed).settle(Outcome.SKIPPED, "newer ones are there; the tier would not keep it")
        begun = [placed for placed in wanted if carrying.marks(placed).chosen_at is not None]
        if begun and not self._num_failures:
            return begun[0]
        tries = self._failed_tries = Counter({key: self._failed_tries[key] for key in map(_key_of, wanted)})
        chosen = min(wanted, key=lambda placed: tries[_key_of(placed)] // _TRIES_IN_A_ROW, default=None)
        for placed in begun:
            if placed is not chosen:
                carrying.marks(placed).forgo()
        return chosen

    def _follow(self, carrying: Carrying, waiting: list[Placed]) -> Placed | None:
        """Another rank: what rank 0 has chosen last, unless this rank's part is there."""
        chosen = {at: placed for placed in waiting if (at := carrying.marks(placed).chosen_at) is not None}
        if not chosen:
            return None
        placed = chosen[max(chosen)]
        own = range(self._rank, placed.record.world_size, self._world_size)
        return placed if carrying.missing_ranks(placed, list(own)) else None

    def _carry(self, carrying: Carrying, placed: Placed) -> None:
        if self._rank == 0:
            carrying.choose(placed)
        carrying.send_part(placed)
        if self._rank == 0:
            self._wait_for_others(carrying, placed)
            carrying.commit(placed)

    def _wait_for_others(self, carrying: Carrying, placed: Placed) -> None:
        """Until all manifests are there. Raises LateRanksError when newer ones wait, and these ranks are late."""
        deadline = time.monotonic() + self._patience_seconds
        delay = _FIRST_POLL_SECONDS
        missing = list(range(placed.record.world_size))
        while missing := carrying.missing_ranks(placed, missing):
            if time.monotonic() > deadline:
                message = f"the parts of ranks {missing} have not come within {self._patience_seconds:g} s"
                raise LateRanksError(message)
            self._stopped.wait(delay)
            delay = min(2 * delay, _LAST_POLL_SECONDS)

    def _pause(self) -> float:
        """Seconds until the next try: longer each time, and not the same on all ranks."""
        self._num_failures += 1
        longest = min(_FIRST_RETRY_SECONDS * 2.0 ** min(self._num_failures - 1, 10), _LAST_RETRY_SECONDS)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret

    def _note(self, step: Step, placed: Placed | None, begin: float, error: str) -> None:
        path = self._root if placed is None or self._carrying is None else self._carrying.directory(placed)
        attempt, nbytes = ("", 0) if placed is None else (placed.attempt, placed.nbytes)
        self._tell(Note(step, attempt, path, self._tier.path, nbytes, begin, time.monotonic(), error))


def _key_of(placed: Placed) -> tuple[str, str]:
    return placed.name, placed.attempt


class LateRanksError(DataStatesError):
    """Other ranks have not sent their parts of a checkpoint."""
