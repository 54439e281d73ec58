"""The trainer's view of tiers: which of its checkpoints are carried, and which never will be."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

from datastates.attempt_folder import MAX_DEPTH
from datastates.errors import WaitTimeoutError
from datastates.tier_settings import TierSettings
from datastates.tiers.first_tier import is_current, name_below
from datastates.tiers.marks import Marks

logger = logging.getLogger(__name__)

_FIRST_POLL_SECONDS = 0.01
_LAST_POLL_SECONDS = 1.0


class CarryWatch:
    """Remembers what this process has committed, until it is carried. Thread safe."""

    def __init__(self, tiers: Sequence[TierSettings]) -> None:
        self._tiers = tuple(tiers)
        self._root = os.path.realpath(tiers[0].path) if tiers else ""
        self._lock = threading.Lock()  # protects the two below
        self._waiting: dict[str, str] = {}
        self._is_warned = False

    def note(self, directory: str, attempt: str) -> None:
        """A checkpoint is committed; one of which the tiers know nothing is not carried, which is said once."""
        if not self._tiers:
            return
        is_inside = name_below(self._root, directory) is not None
        with self._lock:
            if is_inside:
                self._waiting[directory] = attempt
                return
            is_warned, self._is_warned = self._is_warned, True
        if not is_warned:
            logger.warning(
                "%s is not below %s, the first tier, or more than %d folders deep: it is not carried to others",
                directory,
                self._root,
                MAX_DEPTH,
            )

    def behind(self) -> dict[str, list[str]]:
        """The tiers that each checkpoint has still to come to, by folder; what is gone or saved anew is left out."""
        with self._lock:
            waiting = dict(self._waiting)
        behind = {}
        for directory, attempt in waiting.items():
            tiers = [tier.path for tier in self._tiers[1:] if Marks(directory, attempt, tier).outcome is None]
            if tiers and is_current(directory, attempt):
                behind[directory] = tiers
                continue
            with self._lock:
                if self._waiting.get(directory) == attempt:
                    del self._waiting[directory]
        return behind

    def wait(self, timeout: float | None) -> None:
        """Block until nothing is behind. Raises WaitTimeoutError, which names what is."""
        deadline = None if timeout is None else time.monotonic() + timeout
        delay = _FIRST_POLL_SECONDS
        while behind := self.behind():
            if deadline is not None and timeout is not None and time.monotonic() > deadline:
                directory, tiers = next(iter(behind.items()))
                more = f", nor {len(behind) - 1} others" if len(behind) > 1 else ""
                message = f"{directory} is not in {', '.join(tiers)} after {timeout:g} s{more}; the log says why not"
                raise WaitTimeoutError(message)
            time.sleep(delay)
            delay = min(2 * delay, _LAST_POLL_SECONDS)
