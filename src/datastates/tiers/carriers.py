"""All threads of one flusher process that deal with tiers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from datastates.tier_settings import TierSettings
from datastates.tiers.carrier import Carrier, Note
from datastates.tiers.housekeeping import Housekeeper
from datastates.tiers.worker import Worker


class Carriers:
    """A carrier per further tier and, on rank 0, a housekeeper where the first tier has rules. May be of no tiers.

    For any thread; nothing blocks.
    """

    def __init__(
        self,
        tiers: Sequence[TierSettings],
        *,
        rank: int,
        world_size: int,
        patience_seconds: float,
        tell: Callable[[Note], None],
        on_idle: Callable[[], None],
    ) -> None:
        """Args:
        tiers: the first one is the directory that is saved to.
        rank: of this process.
        world_size: number of ranks that take part.
        patience_seconds: as for `Carrier`.
        tell: told what becomes of each checkpoint, by any of the threads.
        on_idle: told whenever `is_idle` may have changed.
        """
        self._root = os.path.realpath(tiers[0].path) if tiers else ""
        self._carriers = [
            Carrier(
                self._root,
                tier,
                rank=rank,
                world_size=world_size,
                patience_seconds=patience_seconds,
                tell=tell,
                on_idle=self._changed,
            )
            for tier in tiers[1:]
        ]
        self._keepers = [
            Housekeeper(tiers[0], tiers[1:], tell=tell, on_removed=self._wake_carriers, on_idle=on_idle)
            for _ in range(rank == 0 and bool(tiers) and tiers[0].has_retention)
        ]
        self._workers: list[Worker] = [*self._carriers, *self._keepers]
        self._on_idle = on_idle

    @property
    def is_idle(self) -> bool:
        """Whether all that is committed in the first tier has come to an end in all others, or `stop` was called."""
        return all(worker.is_idle for worker in self._workers)

    def start(self, spawn: Callable[[str, Callable[[], None]], None]) -> None:
        """Start the threads; the spawner gets their names."""
        for number, carrier in enumerate(self._carriers, start=1):
            spawn(f"carrier-{number}", carrier.run)
        for keeper in self._keepers:
            spawn("housekeeper", keeper.run)

    def on_committed(self, directory: str) -> None:
        """A checkpoint was committed in a folder, perhaps of the first tier."""
        if self._root and os.path.realpath(directory).startswith(self._root + os.sep):
            self._wake_carriers()
            self._wake_keepers()

    def stop(self) -> None:
        """Leave everything as it is, as soon as may be."""
        for worker in self._workers:
            worker.stop()

    def _changed(self) -> None:
        self._wake_keepers()  # what is carried may go from the first tier
        self._on_idle()

    def _wake_carriers(self) -> None:
        for carrier in self._carriers:
            carrier.wake()

    def _wake_keepers(self) -> None:
        for keeper in self._keepers:
            keeper.wake()
