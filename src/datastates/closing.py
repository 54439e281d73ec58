"""The end of a saver, also where its process ends without having asked for it."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize

from datastates.deadline import Deadline
from datastates.entrance import Entrance
from datastates.errors import DataStatesError

logger = logging.getLogger(__name__)


class Closing:
    """Ends the parts of a saver one after the other, once; in the process that made it, and not in a forked child."""

    def __init__(
        self, entrance: Entrance, ends: Sequence[Callable[[float | None], object]], at_exit_seconds: float
    ) -> None:
        """From now on the parts are ended when the interpreter ends, at the latest.

        Args:
            entrance: lets nobody in any more once closing has begun.
            ends: the ends of the parts, in order; each gets what is left of the time. One that fails keeps none of the
                others from being called.
            at_exit_seconds: the timeout when nobody has called `close`.
        """
        self._entrance = entrance
        self._ends = tuple(ends)
        self._at_exit_seconds = at_exit_seconds
        atexit.register(self._close_at_exit)
        # children of multiprocessing run its own finalizers, not those of atexit
        self._finalizer = Finalize(None, self._close_at_exit, exitpriority=100)

    def close(self, timeout: float | None) -> None:
        """Wait for the threads inside, then end the parts; idempotent. Raises the first failure of theirs."""
        if not self._entrance.is_ours:
            return
        deadline = Deadline(timeout)
        if not self._entrance.begin_closing(timeout):
            return  # somebody else has done it
        atexit.unregister(self._close_at_exit)
        self._finalizer.cancel()
        self._entrance.wait_empty(deadline.left())
        errors: list[BaseException] = []
        for end in self._ends:
            try:
                end(deadline.left())
            except (DataStatesError, OSError) as error:
                errors.append(error)
        self._entrance.end_closing()
        if errors:
            raise errors[0]

    def _close_at_exit(self) -> None:
        """Finish what is in flight when the interpreter ends without `close`; a failure goes to the log, or stderr."""
        try:
            self.close(self._at_exit_seconds)
        except (DataStatesError, OSError) as error:
            logger.critical("datastates: this process ends with a save lost, exit status notwithstanding: %s", error)
