"""The end that a scheduler has announced by a signal: noticed by all ranks at the same step, and kept in time."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

from datastates.errors import ConfigError, WaitTimeoutError
from datastates.events import now
from datastates.ranks import Ranks

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they kill. Source: SIGTERM by Slurm, Kubernetes and cloud machines; SIGUSR1 by
``sbatch --signal=USR1@90``, as its manual proposes."""


class Preemption:
    """Notices signals while its block runs; made by `Checkpointer.preemption`.

    The signals do nothing but to be noticed, however often they come: the grace time runs from the first. Handlers that
    were there before are called as well, and are put back at the end of the block. Forked children, such as workers of
    a pool, take signals as if the block were not there.

    Leaving the block after a signal waits until all saves in flight are committed or the grace time is over. What is
    not committed by then is logged as an error; it does not stop the training's own end. An exception passes through.
    """

    def __init__(
        self,
        ranks: Ranks,
        settle: Callable[[float | None], None],
        signals: Iterable[int],
        grace_seconds: float,
        check_every: int,
    ) -> None:
        """Args:
        ranks: those that have to agree.
        settle: waits so many seconds for the saves in flight. Raises WaitTimeoutError.
        signals: which ones.
        grace_seconds: from the first signal until all must be done.
        check_every: ranks agree at every so many questions.

        Raises:
            ConfigError: a signal cannot be handled, or a number is out of range.
        """
        self._signals = [_checked(number) for number in signals]
        if not self._signals:
            raise ConfigError("signals is empty, expected at least one, such as signal.SIGTERM")
        if not isinstance(check_every, int) or isinstance(check_every, bool) or check_every < 1:
            raise ConfigError(f"check_every is {check_every!r}, expected a number of questions from 1")
        self.grace_seconds = grace_seconds
        self._ranks = ranks
        self._settle = settle
        self._check_every = check_every
        self._num_asked = 0
        self._num_signals = 0
        self._name = ""  # of the first signal
        self._begin: float | None = None  # when it came, or another rank was heard to have had one
        self._is_agreed = False
        self._before: dict[int, Any] = {}
        self._owner = os.getpid()

    @property
    def requested(self) -> bool:
        """Whether it is time to save and to end: the same answer on all ranks.

        With several ranks a collective, so all of them ask, equally often; at every ``check_every``-th question a small
        one. From the first True on it stays True.
        """
        if not self._is_agreed:
            self._num_asked += 1
            if self._ranks.size == 1:
                self._is_agreed = self._num_signals > 0
            elif self._num_asked % self._check_every == 0:
                self._is_agreed = self._ranks.any(self._num_signals > 0)
            if self._is_agreed:
                self._note_agreed()
        return self._is_agreed

    @property
    def seconds_left(self) -> float | None:
        """What is left of the grace time, never less than 0; None as long as no signal has come."""
        return None if self._begin is None else max(self._begin + self.grace_seconds - now(), 0.0)

    def __enter__(self) -> Preemption:
        """Start to notice. Raises ConfigError: not on the main thread, where Python handles signals."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("preemption() was entered on another thread: signals are handled on the main thread only")
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if self._begin is not None:
                self._finish()
        finally:
            for number in self._before:
                self._put_back(number)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler. It takes no lock that the interrupted code may hold: what it has to say is logged later."""
        if os.getpid() != self._owner:
            self._act_as_before(number)
            return
        self._num_signals += 1
        if self._begin is None:
            self._begin = now()
        self._name = self._name or signal.Signals(number).name
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _act_as_before(self, number: int) -> None:
        """In a forked child, which has the handler and no part in this: one that is told to end has to end."""
        self._put_back(number)
        signal.raise_signal(number)

    def _put_back(self, number: int) -> None:
        before = self._before[number]
        signal.signal(number, signal.SIG_DFL if before is None else before)

    def _note_agreed(self) -> None:
        if self._begin is None:
            self._begin = now()
        what = f"received {self._name}" if self._name else "another rank has received a signal"
        logger.warning("datastates: %s: %.1f s are left to save and to end", what, self.seconds_left or 0.0)

    def _finish(self) -> None:
        if self._num_signals > 1:
            logger.warning("datastates: %d signals have come; the grace time runs from the first", self._num_signals)
        try:
            self._settle(self.seconds_left)
        except WaitTimeoutError as error:
            logger.error(
                "datastates: the grace time of %g s is over, and a save is not committed; the checkpoint before it is"
                " the latest, unless the flusher process still finishes this one: %s",
                self.grace_seconds,
                error,
            )


def _checked(number: int) -> int:
    try:
        found = signal.Signals(number)
    except ValueError as error:
        raise ConfigError(f"signals has {number!r}, which is no signal") from error
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(f"signals has {found.name}, which no process can handle")
    return int(found)
