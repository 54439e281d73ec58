"""Which checkpoints are carried to a tier, in which order, and which may go: pure decisions about listings."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from datastates.retention import RetentionPolicy, in_order
from datastates.tier_settings import TierSettings


class Placed(Protocol):
    """What a decision needs to know of a committed checkpoint: `retention.Retained`, and its place and size."""

    @property
    def name(self) -> str: ...

    @property
    def tag(self) -> str: ...

    @property
    def step(self) -> int | None: ...

    @property
    def created_at(self) -> float: ...

    @property
    def nbytes(self) -> int: ...


Found = TypeVar("Found", bound=Placed)


@dataclass(frozen=True, slots=True)
class Removals:
    """What may go from a tier, oldest first.

    Attributes:
        names: by its rules, or by its limit though all other tiers have it.
        dropped: by its limit, though a further tier does not have it yet: a loss.
    """

    names: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def folder_of(name: str) -> str:
    """The folder of checkpoints that a checkpoint lies in, as a name below the root; empty for the root itself."""
    return posixpath.dirname(name)


def to_carry(
    waiting: Sequence[Found], known: Sequence[Found], tier: TierSettings, pinned: Collection[str] = ()
) -> tuple[list[Found], list[Found]]:
    """What to carry to a tier, the youngest first, and what need not be: the tier's own rules would remove it at once.

    Args:
        waiting: committed in the first tier, not in this one.
        known: those that this tier has already; any part of them will do.
        tier: the rules.
        pinned: names of those that are carried whatever the rules say.
    """
    kept: set[str] = set(pinned)
    for folder in {folder_of(one.name) for one in waiting}:
        kept |= _kept([one for one in (*waiting, *known) if folder_of(one.name) == folder], tier, None)
    ordered = sorted(waiting, key=lambda one: one.created_at, reverse=True)
    return [one for one in ordered if one.name in kept], [one for one in ordered if one.name not in kept]


def to_remove(
    checkpoints: Sequence[Found],
    tier: TierSettings,
    *,
    latest: dict[str, str | None],
    uncarried: Collection[str] = (),
    in_progress: Collection[str] = (),
    pinned: Collection[str] = (),
) -> Removals:
    """What may go from a tier. The newest of each folder stays whatever is said, and what ``latest`` names there.

    What some further tier does not have yet stays, too, unless the limit is exceeded without it: then the oldest of
    those go, and what is just being carried goes last, or a slow tier would never get anything.

    Args:
        checkpoints: all that are committed in the tier.
        tier: its rules.
        latest: the tag that ``latest`` names, by folder.
        uncarried: names of those that a further tier does not have.
        in_progress: names of those that are just being carried there.
        pinned: names of those that stay, like the newest.
    """
    newest: set[str] = set(pinned)
    kept: set[str] = set()
    for folder in {folder_of(one.name) for one in checkpoints}:
        inside = in_order([one for one in checkpoints if folder_of(one.name) == folder])
        newest |= {inside[-1].name} | {one.name for one in inside if one.tag == latest.get(folder)}
        kept |= _kept(inside, tier, latest.get(folder))
    ordered = in_order(checkpoints)
    gone = [one for one in ordered if one.name not in kept | newest and one.name not in uncarried]
    dropped: list[Found] = []
    if tier.limit_bytes is not None:
        left = sum(one.nbytes for one in ordered) - sum(one.nbytes for one in gone)
        removable = [one for one in ordered if one not in gone and one.name not in newest]
        for one in sorted(removable, key=lambda one: (one.name in in_progress, one.name in uncarried)):
            if left <= tier.limit_bytes:
                break
            (dropped if one.name in uncarried else gone).append(one)
            left -= one.nbytes
    return Removals(tuple(one.name for one in gone), tuple(one.name for one in dropped))


def _kept(checkpoints: Sequence[Found], tier: TierSettings, latest: str | None) -> set[str]:
    """Names of those that the rules keep in one folder."""
    if tier.keep_last is None and tier.keep_every is None:
        return {one.name for one in checkpoints}
    policy = RetentionPolicy(keep_last=tier.keep_last or 1, keep_every=tier.keep_every)
    tags = policy.survivors(checkpoints, latest=latest)
    return {one.name for one in checkpoints if one.tag in tags}
