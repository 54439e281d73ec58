"""A thread that looks for work whenever it is woken, and knows whether it has found all there is."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable


class Worker(ABC):
    """`run` is the thread's body; the other methods are for any thread, and do not block."""

    def __init__(self, on_idle: Callable[[], None]) -> None:
        """Args:
        on_idle: told, on the thread, whenever `is_idle` may have changed.
        """
        self._on_idle = on_idle
        self._lock = threading.Lock()  # protects the two numbers
        self._num_wakes = 1
        self._num_seen = 0
        self._woken = threading.Event()
        self._stopped = threading.Event()

    @property
    def is_idle(self) -> bool:
        """Whether a look since the last `wake` has found nothing to do, or the worker is stopped."""
        with self._lock:
            return self._stopped.is_set() or self._num_seen == self._num_wakes

    def wake(self) -> None:
        """There may be something to do."""
        with self._lock:
            self._num_wakes += 1
        self._woken.set()

    def stop(self) -> None:
        """Leave everything as it is, as soon as may be."""
        self._stopped.set()
        self._woken.set()

    def run(self) -> None:
        """Work until stopped."""
        while not self._stopped.is_set():
            with self._lock:
                num_wakes = self._num_wakes
            delay = self._turn()
            with self._lock:
                if delay is None:
                    self._num_seen = num_wakes
            self._on_idle()
            self._woken.wait(delay)
            self._woken.clear()
        self._on_idle()

    @abstractmethod
    def _turn(self) -> float | None:
        """Do something, if there is anything. Returns the seconds until the next look; None: all is done."""
