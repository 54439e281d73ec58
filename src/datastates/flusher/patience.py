"""How long a flusher waits for the other ranks' parts of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable

ORPHAN_SECONDS = 60.0
"""So long a flusher without its trainer waits for other ranks, which may still have to write what is in their cache."""

_LAST_PATIENCE_SECONDS = 1.0  # for one more look at what is there already


class Patience:
    """The time limit of every attempt, and what shortens it once the trainer is gone. Not thread safe."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._abandoned_at: float | None = None
        self._given_up: set[int] = set()  # ranks that an abandoned attempt has waited for in vain

    @property
    def is_forsaken(self) -> bool:
        """The trainer is gone for so long that the other ranks' parts, should they come, are left to `recover`."""
        return self._abandoned_at is not None and time.monotonic() > self._abandoned_at + ORPHAN_SECONDS

    def abandon(self) -> None:
        """The trainer is gone."""
        self._abandoned_at = self._abandoned_at or time.monotonic()

    def give_up(self, ranks: Iterable[int]) -> None:
        """An attempt has waited for these ranks in vain."""
        self._given_up.update(ranks)

    def deadline(self) -> float:
        """When an attempt of which this rank's part is durable now is given up."""
        return time.monotonic() + self._limit_seconds

    def has_ended(self, deadline: float | None, ranks: set[int]) -> bool:
        """Whether these ranks have had their time for an attempt that is given up at the deadline."""
        spared_seconds = self._limit_seconds - self.seconds(ranks)
        return deadline is not None and time.monotonic() > deadline - spared_seconds

    def seconds(self, ranks: set[int]) -> float:
        """How long to wait for these ranks. Without trainers, one that missed an attempt will not come to a later one:
        that is not waited for again, or the flushers of a dead job would outlive it by the time limit of each save."""
        is_hopeless = self._abandoned_at is not None and not self._given_up.isdisjoint(ranks)
        return min(_LAST_PATIENCE_SECONDS, self._limit_seconds) if is_hopeless else self._limit_seconds
