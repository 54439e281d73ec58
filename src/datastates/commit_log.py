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

    def __init__(self) -> None:
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
            logger.warning(
                "flushing is slower than saving: training was held back for %.1f s because the host cache was full; "
                "raise host_cache_size to >= %.1f or save less often than every %.1f s",
                held_seconds,
                gib * 1.05,
                seconds,
            )
