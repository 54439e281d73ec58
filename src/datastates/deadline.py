"""A time limit that several waits share."""

from __future__ import annotations

import concurrent.futures
from concurrent.futures import Future
from typing import Any

from datastates.errors import WaitTimeoutError
from datastates.events import now


class Deadline:
    """So many seconds from now on; for ever with None."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._end = None if timeout is None else now() + timeout

    def left(self) -> float | None:
        """What is left of the time, never less than 0; None: no limit."""
        return None if self._end is None else max(self._end - now(), 0.0)

    def wait(self, future: Future[Any], what: str) -> None:
        """Wait until the future is done, whatever its outcome. Raises WaitTimeoutError."""
        if concurrent.futures.wait([future], self.left()).not_done:
            raise WaitTimeoutError(f"{what} within {self._timeout} s")
