"""Who may still use a saver, and for whom its end has to wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from datastates.errors import ClosedError, ReentranceError
from datastates.life_cycle import LifeCycle

_ORDER = list(LifeCycle)


class Entrance:
    """Lets threads in while the saver is open, in the process that made it. Thread safe."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        # protects _life and _inside; reentrant, so that a signal handler is refused, and does not wait for itself
        self._condition = threading.Condition(threading.RLock())
        self._life = LifeCycle.OPEN
        self._inside: set[int] = set()  # threads
        self._closed = threading.Event()

    @property
    def is_ours(self) -> bool:
        """Whether this process made the saver; a forked child did not."""
        return os.getpid() == self._owner

    @property
    def is_open(self) -> bool:
        return self._life is LifeCycle.OPEN and self.is_ours

    def check(self) -> None:
        """Raise ClosedError unless the saver is open and this process's, ReentranceError on a thread that is inside."""
        if not self.is_ours:
            raise ClosedError(
                f"this saver belongs to process {self._owner}; a forked child ({os.getpid()}) cannot save through it"
            )
        if self._life is not LifeCycle.OPEN:
            raise ClosedError(f"the saver is {self._life.value}: nothing more can be saved through it")
        self._refuse_reentrance()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Closing waits for the body to end. Raises what `check` does."""
        thread, is_in = threading.get_ident(), False
        try:
            with self._condition:
                self.check()
                is_in = True  # before it is noted: what a signal handler raises in between leaves nothing behind
                self._inside.add(thread)
            yield
        finally:
            if is_in:
                with self._condition:
                    self._inside.discard(thread)
                    self._condition.notify_all()

    def begin_closing(self, timeout: float | None) -> bool:
        """Let nobody in any more. Returns False if somebody else closes, after waiting for that.

        Raises:
            ReentranceError: this thread is inside.
        """
        self._refuse_reentrance()
        with self._condition:
            is_first, self._life = self._life is LifeCycle.OPEN, max(self._life, LifeCycle.CLOSING, key=_ORDER.index)
        if not is_first:
            self._closed.wait(timeout)
        return is_first

    def wait_empty(self, timeout: float | None) -> None:
        """Block until nobody is inside, or the time is over."""
        with self._condition:
            self._condition.wait_for(lambda: not self._inside, timeout)

    def end_closing(self) -> None:
        """All is closed."""
        self._life = LifeCycle.CLOSED
        self._closed.set()

    def _refuse_reentrance(self) -> None:
        if threading.get_ident() in self._inside:
            raise ReentranceError(ReentranceError.ADVICE)
