"""Carriers of several ranks in this process: their turns are taken one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datastates.tier_settings import TierLike, TierSettings, read_tiers
from datastates.tiers.carrier import Carrier, Note, Step
from datastates.tiers.store import Store, open_store


def tier_of(entry: TierLike) -> TierSettings:
    return read_tiers(["/nowhere", entry])[1]


class Ranks:
    """A carrier per rank, of one tier.

    Attributes:
        notes: what they have told.
    """

    def __init__(self, root: Path, tier: TierLike, *, world_size: int = 1, **options: Any) -> None:
        self.notes: list[Note] = []
        self.tier = tier_of(tier)
        self.carriers = [
            Carrier(
                str(root),
                self.tier,
                rank=rank,
                world_size=world_size,
                **{"patience_seconds": 0.0, "tell": self.notes.append, "on_idle": lambda: None, **options},
            )
            for rank in range(world_size)
        ]

    @property
    def store(self) -> Store:
        return open_store(self.tier, self.fail)

    @staticmethod
    def fail(message: str) -> None:
        raise AssertionError(message)

    def turn(self, rank: int = 0) -> float | None:
        """One turn, as the thread takes it: errors become notes."""
        return self.carriers[rank]._turn()

    def work(self) -> None:
        """Turns of all ranks until nothing is left to do, or one has failed."""
        for _ in range(100):
            delays = [self.turn(rank) for rank in reversed(range(len(self.carriers)))]
            if all(delay is None for delay in delays):
                return
        raise AssertionError(f"no end: {self.notes}")

    def carried(self) -> list[str]:
        """Names of the folders that were carried, in order."""
        return [Path(note.path).name for note in self.notes if note.step is Step.CARRIED]

    def errors(self) -> list[str]:
        return [note.error for note in self.notes if note.step is not Step.CARRIED]
