"""How often a run can save, and how large a host cache hides a save, by what was measured. Pure.

A save is sustainable when it is committed before the next one begins. It is hidden when training does not wait for it:
what does not fit the host cache must have been written, and all be copied, before the next optimizer step.
All numbers are those of one rank, whose share of a disk shows in the rate that it was measured at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from datastates.config import GIB, MIB
from datastates.figures import figure

HEADROOM = 1.25
"""Disks are shared and their rates vary: an interval is advised that is so many times the shortest."""

CACHE_HEADROOM = 1.05
"""Files are cut into slabs, whose last ones are not full: so many times its bytes a save may take in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a rank has done so far; None where it has not been seen yet.

    Attributes:
        nbytes: of one checkpoint.
        host_cache_bytes: 0 where it is not known.
        flush_nbytes_per_second: from the host cache to durable, while there was something to write.
        copy_nbytes_per_second: into the host cache, while there was something to copy.
        step_seconds: of a training step, without what saves add to it.
        overlap_seconds: from a save to the optimizer step that would wait for its copies.
        interval_seconds: between the begins of two saves, without what saves add to it.
        num_steps: optimizer steps between two saves.
        commit_seconds: from durable to visible: a few calls on small files, and waiting for slower ranks.
    """

    nbytes: int = 0
    host_cache_bytes: int = 0
    flush_nbytes_per_second: float | None = None
    copy_nbytes_per_second: float | None = None
    step_seconds: float | None = None
    overlap_seconds: float | None = None
    interval_seconds: float | None = None
    num_steps: float | None = None
    commit_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """What follows from a `Measured`.

    Attributes:
        committed_seconds: so long it takes to write and commit one checkpoint.
        interval_seconds: the shortest advised time between the begins of two saves.
        interval_steps: the same in optimizer steps; None where no step was seen.
        host_cache_bytes: of the smallest cache that hides a save, given that interval.
        held_seconds: each save holds training back so long with the present cache, whatever the interval.
        is_outrun: saves are begun faster than they are committed; None where fewer than two were seen.
        is_cache_short: the present cache does not hide a save.
    """

    committed_seconds: float
    interval_seconds: float
    interval_steps: int | None
    host_cache_bytes: int
    held_seconds: float
    is_outrun: bool | None
    is_cache_short: bool

    @property
    def remedy(self) -> str:
        """What to change, with numbers; empty where nothing needs to be."""
        return " and ".join(filter(None, (self.cache_remedy, self.interval_remedy)))

    @property
    def cache_remedy(self) -> str:
        """What to do about the host cache; empty where it is large enough."""
        return f"raise host_cache_size to >= {_gigabytes(self.host_cache_bytes)}" if self.is_cache_short else ""

    @property
    def interval_remedy(self) -> str:
        """What to do about the interval; empty where it is sustainable, or the cache alone may be to blame."""
        if self.is_outrun and self.interval_steps is not None:
            return f"raise save-interval to >= {self.interval_steps} ({figure(self.interval_seconds)} s)"
        if self.is_outrun or (self.is_outrun is None and self.is_cache_short):
            return f"save every {self.interval_text} or less often"
        return ""

    @property
    def interval_text(self) -> str:
        """The interval in steps where it is known, and in seconds; to be read after "every"."""
        seconds = f"{figure(self.interval_seconds)} s"
        if self.interval_steps is None:
            return seconds
        return f"step ({seconds})" if self.interval_steps == 1 else f"{self.interval_steps} steps ({seconds})"

    def plain(self) -> dict[str, Any]:
        """As plain values for machines, with the remedy."""
        return asdict(self) | {"remedy": self.remedy}


def advise(measured: Measured) -> Advice | None:
    """What interval is sustainable, and which cache hides a save; None before anything was written."""
    nbytes, flush, step = measured.nbytes, measured.flush_nbytes_per_second, measured.step_seconds
    if not nbytes or not flush:
        return None
    committed = nbytes / flush + measured.commit_seconds
    seconds = committed * HEADROOM
    overlap = (step or 0.0) if measured.overlap_seconds is None else measured.overlap_seconds
    unhidden = max(nbytes - int(flush * overlap), 0)
    cache = measured.host_cache_bytes
    is_cache_short = 0 < cache < unhidden
    copying = nbytes / measured.copy_nbytes_per_second if measured.copy_nbytes_per_second else 0.0
    staging = max(copying, (nbytes - cache) / flush if cache else 0.0)
    return Advice(
        committed_seconds=committed,
        interval_seconds=seconds,
        interval_steps=None if not step else max(math.ceil(seconds / step), 1),
        host_cache_bytes=int(unhidden * CACHE_HEADROOM),
        held_seconds=max(staging - overlap, 0.0),
        is_outrun=None if measured.interval_seconds is None else measured.interval_seconds < committed,
        is_cache_short=is_cache_short,
    )


def widest(advices: Iterable[Advice]) -> Advice | None:
    """One advice that is right for all ranks; None without any."""
    found = list(advices)
    if not found:
        return None
    steps = [advice.interval_steps for advice in found if advice.interval_steps is not None]
    outrun = [advice.is_outrun for advice in found if advice.is_outrun is not None]
    return Advice(
        committed_seconds=max(advice.committed_seconds for advice in found),
        interval_seconds=max(advice.interval_seconds for advice in found),
        interval_steps=max(steps) if steps else None,
        host_cache_bytes=max(advice.host_cache_bytes for advice in found),
        held_seconds=max(advice.held_seconds for advice in found),
        is_outrun=any(outrun) if outrun else None,
        is_cache_short=any(advice.is_cache_short for advice in found),
    )


def _gigabytes(nbytes: int) -> str:
    """A size as ``host_cache_size`` takes it, rounded up: to a tenth, below one to a thousandth; at least 4 MiB."""
    gigabytes = max(nbytes, 4 * MIB) / GIB
    digits = 10 if gigabytes >= 1 else 1000
    return f"{math.ceil(gigabytes * digits) / digits:g}"
