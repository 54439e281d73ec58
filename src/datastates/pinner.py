"""Registers the host cache with the CUDA driver in the background, once its memory is reserved."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from concurrent.futures import Future

import torch

from datastates.copier import pin, unpin
from datastates.errors import WaitTimeoutError

logger = logging.getLogger(__name__)


class Pinner:
    """Owns a thread that pins memory once, and the registration itself. Not pinning is slower, never wrong."""

    def __init__(self, memory: torch.Tensor, reserved: Future[None]) -> None:
        """Start pinning ``memory`` for the current CUDA device when ``reserved`` has succeeded."""
        self._memory = memory
        self._is_pinned = False
        self._device_index = torch.cuda.current_device()
        self._thread = threading.Thread(target=self._run, args=(reserved,), name="datastates-pinner", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None) -> None:
        """Block until the memory is pinned, or cannot be. Raises WaitTimeoutError."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise WaitTimeoutError(f"the host cache was not pinned within {timeout} s")

    def close(self, timeout: float | None) -> None:
        """Undo the registration; no copy may use the memory any more. Raises WaitTimeoutError."""
        self.wait(timeout)
        if self._is_pinned:
            self._is_pinned = False
            unpin(self._memory)

    def _run(self, reserved: Future[None]) -> None:
        concurrent.futures.wait([reserved])
        if reserved.exception() is not None:
            return
        try:
            torch.cuda.set_device(self._device_index)
            self._is_pinned = pin(self._memory)
        except Exception:
            logger.exception("the host cache could not be pinned; copies from the device will be slower")
