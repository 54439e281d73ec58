"""The thread that carries checkpoints to one tier, as long as there are any."""

from __future__ import annotations

import random
import time
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
        placed = self._lead(carrying, waiting, carried) if self._rank == 0 else self._follow(carrying, waiting)
        if placed is None:
            return _FOLLOW_SECONDS if waiting and self._rank else None
        begin = time.monotonic()
        try:
            self._carry(carrying, placed)
        except SupersededError as error:
            self._note(Step.GIVEN_UP, placed, begin, str(error))
        except DamagedError as error:
            carrying.marks(placed).settle(Outcome.DAMAGED, str(error))
            self._note(Step.GIVEN_UP, placed, begin, f"it is damaged and is not carried: {error}")
        except DataStatesError as error:
            self._note(Step.FAILED, placed, begin, str(error))
            return self._pause()
        else:
            self._finish(carrying, placed, begin)
        self._num_failures = 0
        return 0.0

    def _finish(self, carrying: Carrying, placed: Placed, begin: float) -> None:
        """Rank 0: say that it is done, and make room in the tier."""
        if self._rank:
            return
        self._note(Step.CARRIED, placed, begin, "")
        try:
            carrying.apply_retention()
        except DataStatesError as error:  # tried again after the next one
            self._note(Step.FAILED, placed, begin, f"older ones stay in {self._tier.path}: {error}")

    def _make_carrying(self) -> Carrying:
        carrying = Carrying(
            self._root,
            self._tier,
            self._open_tier(self._tier, self._warn),
            rank=self._rank,
            world_size=self._world_size,
            is_stopped=self._stopped.is_set,
        )
        if self._rank == 0:
            carrying.clean_forgotten()
        return carrying

    def _warn(self, message: str) -> None:
        self._note(Step.FAILED, None, time.monotonic(), message)

    def _lead(self, carrying: Carrying, waiting: list[Placed], carried: list[Placed]) -> Placed | None:
        """Rank 0: what is carried next; the newest, unless another has been begun and has not failed since."""
        wanted, unwanted = to_carry(waiting, carried, self._tier, carrying.pinned(waiting))
        for placed in unwanted:
            carrying.marks(placed).settle(Outcome.SKIPPED, "newer ones are there; the tier would not keep it")
        begun = [placed for placed in wanted if carrying.marks(placed).chosen_at is not None]
        if begun and not self._num_failures:
            return begun[0]
        for placed in begun:
            if placed is not wanted[0]:
                carrying.marks(placed).forgo()
        return wanted[0] if wanted else None

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


class LateRanksError(DataStatesError):
    """Other ranks have not sent their parts of a checkpoint."""
