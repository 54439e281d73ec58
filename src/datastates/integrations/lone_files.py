"""The files that a framework saves one by one, and what follows each: older ones go, links move."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Mapping
from typing import Any

from datastates.attempt import SaveHandle
from datastates.config import CheckpointConfig
from datastates.deadline import Deadline
from datastates.errors import DataStatesError
from datastates.integrations.succession import Succession
from datastates.leftovers import remove_leftovers
from datastates.paths import resolved
from datastates.saver import Saver
from datastates.state import IsEager

logger = logging.getLogger(__name__)


class LoneFiles:
    """Saves files that are checkpoints of their own; what a framework wants removed or linked waits for them.

    Attributes:
        saver: has them in flight.
        succession: removes files and moves links.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        """Start host cache and flusher; they live until `close`.

        Args:
            config: the settings.
        """
        self._timeout = config.close_timeout_seconds
        self.saver = Saver(config, run_id=uuid.uuid4().hex[:12])
        self.succession = Succession()
        self._cleaned: set[str] = set()
        self._told: list[BaseException] = []

    def save(self, checkpoint: Mapping[str, Any], path: str, is_eager: IsEager) -> SaveHandle:
        """`Saver.save`; what a run that died has left in the folder is removed first."""
        path = resolved(path)
        folder = os.path.dirname(path)
        if folder not in self._cleaned and os.path.isdir(folder):
            remove_leftovers(folder)
        self._cleaned.add(folder)
        handle = self.saver.save(checkpoint, path, is_eager=is_eager)
        self.succession.note(handle)
        return handle

    def wait_for(self, handle: SaveHandle) -> None:
        """Block until a file is there.

        Raises:
            DataStatesError: why it is lost.
            WaitTimeoutError: not within ``close_timeout_seconds``.
        """
        Deadline(self._timeout).wait(handle.committed, f"{handle.path}: not there")
        try:
            handle.committed.result()
        except DataStatesError as error:
            self._told.append(error)
            raise

    def wait(self, timeout: float | None) -> None:
        """Block until all files are there and what follows is done; raises the first that is lost for good."""
        self.saver.settle(timeout)
        self.succession.finish(timeout)
        for error in self.succession.lost.values():
            if error not in self._told:
                self._told.append(error)
                raise error

    def close(self) -> None:
        """Finish, whatever fails; raises the first file that is lost for good, or what keeps the saver from ending."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.succession.close)
            stack.callback(self._close_saver)
            self.wait(self._timeout)

    def _close_saver(self) -> None:
        try:
            self.saver.close(self._timeout)
        except DataStatesError as error:
            if error not in self.succession.failures:
                raise
            logger.info("datastates: a later save or removal has made up for it, or it was raised: %s", error)
