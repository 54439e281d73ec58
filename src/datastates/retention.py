"""Which checkpoints stay: pure decisions, no file is touched here.

Only committed checkpoints are counted. Whatever the rule, the newest one stays, the one that ``latest`` names, and
what was pinned. Order is that of the steps, where tags hold a number, and of the times in the commit records
otherwise; never that of the file system's times, which copies and clocks falsify.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from datastates.errors import ConfigError

Checkpoint = TypeVar("Checkpoint", bound="Retained")


class Retained(Protocol):
    """What a decision needs to know of a committed checkpoint."""

    @property
    def tag(self) -> str: ...

    @property
    def step(self) -> int | None: ...

    @property
    def created_at(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Which checkpoints stay; each rule keeps some, and what no rule keeps goes."""

    keep_last: int = 1
    """The newest so many."""

    keep_every: int | None = None
    """Those whose step is a multiple of this, for ever. None: no such rule."""

    keep_best: int = 0
    """So many with the best values of a metric, among those that have one."""

    is_larger_better: bool = False
    """Whether a larger value is the better one (accuracy), rather than a smaller (loss)."""

    pinned: frozenset[str] = frozenset()
    """Tags that stay whatever else is said."""

    def __post_init__(self) -> None:
        for name, least in (("keep_last", 1), ("keep_best", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} is {value!r}, expected a number from {least}")
        every = self.keep_every
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ConfigError(f"keep_every is {every!r}, expected a number of steps from 1, or None")

    def survivors(
        self,
        checkpoints: Sequence[Retained],
        *,
        latest: str | None = None,
        metrics: Mapping[str, float] | None = None,
        is_ordered: bool = False,
    ) -> set[str]:
        """Tags of the checkpoints that stay; all of them are among ``checkpoints``.

        Args:
            checkpoints: the committed ones of one folder.
            latest: the tag that ``latest`` names, where there is one.
            metrics: by tag, for ``keep_best``; values that are no numbers (NaN) do not count.
            is_ordered: they come in the order in which they were saved, the oldest first; else `in_order` says it.
        """
        ordered = list(checkpoints) if is_ordered else in_order(checkpoints)
        tags = list(dict.fromkeys(checkpoint.tag for checkpoint in reversed(ordered)))[::-1]  # copies count once
        kept = set(tags[-self.keep_last :]) | ({latest} if latest is not None else set()) | self.pinned
        if self.keep_every is not None:
            kept |= {one.tag for one in ordered if one.step is not None and one.step % self.keep_every == 0}
        return (kept | self._best(tags, metrics or {})) & set(tags)

    def _best(self, tags: Collection[str], metrics: Mapping[str, float]) -> set[str]:
        """Of equal values the newer one is the better."""
        known = [tag for tag in tags if tag in metrics and not math.isnan(metrics[tag])]
        sign = 1 if self.is_larger_better else -1
        ranked = sorted(known, key=lambda tag: sign * metrics[tag])
        return set(ranked[-self.keep_best :]) if self.keep_best else set()


_STEP = re.compile(r"(\d+)\D*$")


def step_of(tag: str) -> int | None:
    """The last number in a tag, None where it has none."""
    found = _STEP.search(tag)
    return int(found[1]) if found else None


def in_order(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Oldest first: by step; those without one before them, by the time of their commit."""

    def age(checkpoint: Checkpoint) -> tuple[bool, int, float, str]:
        step = checkpoint.step
        return step is not None, step or 0, checkpoint.created_at, checkpoint.tag

    return sorted(checkpoints, key=age)
