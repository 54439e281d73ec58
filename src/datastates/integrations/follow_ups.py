"""What has to wait for a save is done on a thread of its own: renames, links, deletions.

The thread of the flusher's answers must not do it: deleting a large file takes seconds, and slabs would not be freed.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from datastates.errors import DataStatesError, WaitTimeoutError
from datastates.flusher.work import CommitResult

logger = logging.getLogger(__name__)

EXIT_SECONDS = 600.0
"""So long the end of the interpreter waits for what is to be done."""

Act = Callable[[BaseException | None], None]
"""Is told why the save is lost, None where it is committed. What it raises is logged, and raised by `finish`."""


class FollowUps:
    """Does one thing after the other, each when the save that it waits for has settled. Thread safe.

    The thread is a daemon that lives while something is to be done. The end of the interpreter waits for it.
    """

    def __init__(self, name: str) -> None:
        """Args:
        name: of the thread.
        """
        self._name = name
        self._lock = threading.Lock()  # protects the fields below
        self._todo: deque[tuple[Future[CommitResult], Act]] = deque()
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        atexit.register(self._finish_at_exit)

    def after(self, committed: Future[CommitResult], act: Act) -> None:
        """Do it when a save has settled, and what was asked for earlier is done. Returns at once."""
        with self._lock:
            self._todo.append((committed, act))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def finish(self, timeout: float | None = None) -> None:
        """Block until all is done.

        Raises:
            WaitTimeoutError: not within ``timeout`` seconds.
            DataStatesError, OSError: the first failure that has not been raised yet.
        """
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                raise WaitTimeoutError(f"what follows the saves in flight is not done within {timeout} s")
        with self._lock:
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Nothing will be asked for any more; what is to be done is finished by the end of the interpreter at last."""
        if not self._todo:
            atexit.unregister(self._finish_at_exit)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._thread = None
                    return
                committed, act = self._todo[0]
            concurrent.futures.wait([committed])
            try:
                act(committed.exception())
            except Exception as error:  # the top of a thread: raised by `finish`
                logger.exception("datastates: what follows a save has failed")
                with self._lock:
                    self._errors.append(error)
            with self._lock:
                self._todo.popleft()

    def _finish_at_exit(self) -> None:
        try:
            self.finish(EXIT_SECONDS)
        except (DataStatesError, OSError) as error:
            logger.critical("datastates: this process ends with a save lost, exit status notwithstanding: %s", error)
