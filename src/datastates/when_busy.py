"""What a checkpoint does that is begun while earlier ones are in flight, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from datastates.errors import CommitError
from datastates.fqns import listed
from datastates.ranks import Ranks
from datastates.saver import Saver

_TAGS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Start:
    """How a checkpoint is begun.

    Attributes:
        is_skipped: nothing is saved for it.
        refusal: why nothing is saved for it; a failure.
    """

    is_skipped: bool = False
    refusal: CommitError | None = None


def agree_on_start(saver: Saver, ranks: Ranks, directory: str, tag: str, when_busy: str) -> Start:
    """Whether to skip the next checkpoint, or not to save it at all; drops what waits, where it replaces that.

    A collective. No rank must wait then for parts of a checkpoint that the others do not make.

    Args:
        saver: of this rank.
        ranks: all that take part.
        directory: the checkpoint's folder.
        tag: its tag here; where the ranks do not use the same, it is refused.
        when_busy: the setting.
    """
    known = ranks.gather((tag, saver.is_busy, saver.waiting))
    tags = [other for other, _, _ in known]
    if len(set(tags)) > 1:
        named = {rank: f"it saves {other!r}" for rank, other in enumerate(tags)}
        shown = listed([f"rank {rank} {other!r}" for rank, other in enumerate(tags)], _TAGS_SHOWN)
        message = f"{directory}: nothing is saved, since the ranks save different checkpoints: {shown}"
        return Start(refusal=CommitError(message, named, tag))
    if when_busy == "replace":
        saver.drop(known[0][2], f"{directory} was saved")
    return Start(is_skipped=when_busy == "skip" and any(busy for _, busy, _ in known))
