"""Deletes old checkpoints in the background, when saves in flight have settled.

With lazy saves the younger checkpoint is not there yet when it is time to think of the older ones: to delete them at
once would leave none if the job dies. Whoever keeps the last few asks for a `Deletion`, which is made when a save has
settled, and again until nothing is in flight where it looks.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
from collections.abc import Collection
from concurrent.futures import Future
from typing import Protocol

from datastates.deadline import Deadline
from datastates.errors import DataStatesError, WaitTimeoutError
from datastates.flusher.work import CommitResult
from datastates.saver import open_savers

logger = logging.getLogger(__name__)


class Deletion(Protocol):
    """What shall be deleted in one folder."""

    @property
    def folder(self) -> str:
        """The folder of the checkpoints, without links; a later deletion of the same folder replaces this one."""
        ...

    def delete(self, busy: Collection[str]) -> None:
        """Delete what is too many among the checkpoints that have settled.

        Args:
            busy: paths of checkpoints and files in flight: neither they nor what they lie in is counted or deleted.

        Raises:
            DataStatesError, OSError: some stay; that is logged.
        """
        ...


class Deletions:
    """Makes deletions on a thread of its own, which lives while saves are in flight. Thread safe."""

    def __init__(self, name: str) -> None:
        """Args:
        name: of the thread.
        """
        self._name = name
        self._lock = threading.RLock()  # protects the fields below; a signal handler may save, too
        self._wanted: dict[str, Deletion] = {}
        self._thread: threading.Thread | None = None
        self._deleting = threading.Lock()  # one deletes at a time

    def ask(self, deletion: Deletion, *, in_background: bool = False) -> None:
        """Delete as soon as a save has settled, or now where nothing is in flight. Does not raise.

        A later wish for the same folder takes the place of an earlier one.

        Args:
            deletion: what to do.
            in_background: never on the calling thread.
        """
        with self._lock:
            self._wanted[deletion.folder] = deletion
            if self._thread is not None:
                return
            if in_background or in_flight():
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
                return
        self._fulfil()

    def finish(self, timeout: float | None = None) -> None:
        """Wait until the saves in flight have settled and all wishes are fulfilled.

        Raises:
            WaitTimeoutError: not within ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        with self._lock:
            thread = self._thread
        for saver in open_savers() if thread is not None else ():
            saver.settle(deadline.left())
        if thread is not None:
            thread.join(deadline.left())
            if thread.is_alive():
                raise WaitTimeoutError(f"old checkpoints are not deleted within {timeout} s")

    def _work(self) -> None:
        """The thread: until nothing is in flight and every wish is fulfilled."""
        try:
            is_done = False
            while not is_done:
                futures = [future for _, future in in_flight()]
                concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
                self._fulfil()
                with self._lock:
                    is_done = not self._wanted and not in_flight()
                    if is_done:
                        self._thread = None
        except Exception:  # the top of a thread: the next wish starts another one
            logger.exception("old checkpoints stay: their deletion has failed by a defect")
            with self._lock:
                self._thread = None

    def _fulfil(self) -> None:
        with self._deleting:
            with self._lock:
                wanted = list(self._wanted.values())
            for deletion in wanted:
                was_busy = is_busy(deletion.folder)  # what settles from here on needs another look
                try:
                    deletion.delete([path for path, _ in in_flight()])
                except (DataStatesError, OSError) as error:
                    logger.warning("%s: old checkpoints stay, they cannot be deleted: %s", deletion.folder, error)
                with self._lock:
                    if not was_busy and self._wanted.get(deletion.folder) is deletion:
                        del self._wanted[deletion.folder]


def in_flight() -> list[tuple[str, Future[CommitResult]]]:
    """Path and future of every save of this process that has not settled."""
    return [(attempt.path, attempt.committed) for saver in open_savers() for attempt in saver.unsettled]


def is_busy(folder: str) -> bool:
    """Whether a save to a folder, or to what is in it, is in flight."""
    return any(is_inside(path, folder) for path, _ in in_flight())


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is a folder's, or of something in it."""
    return path == folder or path.startswith(folder + os.sep)
