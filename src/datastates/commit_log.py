"""What the log says of commits."""

from __future__ import annotations

import logging

from datastates.attempt import Attempt
from datastates.events import now

logger = logging.getLogger(__name__)

ADVICE_SECONDS = 0.5
"""So long may training be held back for want of host cache, all in all, before the log says what to do about it."""


class CommitLog:
    """One line per commit, and once what to do where flushing is slower than saving."""

    def __init__(self, host_cache_bytes: int) -> None:
        self._host_cache_bytes = host_cache_bytes
        self._has_advised = False

    def note(self, attempt: Attempt, held_seconds: float, starved_seconds: float) -> None:
        """An attempt is committed.

        Args:
            attempt: which.
            held_seconds: so long training has been held back, all in all.
            starved_seconds: so long staging has waited for host cache, all in all.
        """
        seconds, gib = now() - attempt.begin, attempt.nbytes / 2**30
        logger.info(
            "committed %s: %.3f GiB of this rank, blocked %.4f s, durable after %.2f s (%.2f GiB/s)",
            attempt.path,
            gib,
            attempt.blocked_seconds,
            seconds,
            gib / seconds,
        )
        if min(held_seconds, starved_seconds) > ADVICE_SECONDS and not self._has_advised:
            self._has_advised = True
            wanted = gib * 1.05
            is_small = wanted * 2**30 > self._host_cache_bytes  # else one save fits: several follow each other too fast
            logger.warning(
                "flushing is slower than saving: training was held back for %.3g s because the host cache was full; "
                "%ssave less often than every %.3g s",
                held_seconds,
                f"raise host_cache_size to >= {wanted:.3g} or " if is_small else "",
                seconds,
            )
