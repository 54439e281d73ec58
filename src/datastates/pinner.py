"""Registers the host cache with the CUDA driver in the background, once its memory is reserved."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from concurrent.futures import Future

import torch

from datastates.cuda_runtime import register, unregister
from datastates.errors import WaitTimeoutError

logger = logging.getLogger(__name__)

PIECE_BYTES = 128 << 20
"""So much is registered by one call, whole slabs: the driver may hold up the training's calls while it locks pages."""

_abandoned: list[torch.Tensor] = []
"""Memory that a copy may still land in: it stays mapped, and registered, for as long as the process lives."""


class Pinner:
    """Owns a thread that registers memory once, and the registration itself. Not pinning is slower, never wrong."""

    def __init__(self, memory: torch.Tensor, slab_bytes: int, reserved: Future[None]) -> None:
        """Do nothing yet.

        Args:
            memory: the host cache.
            slab_bytes: no slab is cut by the border of two registrations: a copy to both would be refused.
            reserved: done when the memory is really there; it is touched by registering it.
        """
        size = max(PIECE_BYTES // slab_bytes, 1) * slab_bytes
        self._memory: torch.Tensor | None = memory
        self._nbytes = memory.nbytes
        self._pieces = [memory[begin : begin + size] for begin in range(0, memory.nbytes, size)]
        self._registered: list[torch.Tensor] = []
        self._reserved = reserved
        self._is_closing = False
        self._lock = threading.RLock()  # protects the thread's start and _is_closing; a signal handler may save, too
        self._is_started = False
        self._thread: threading.Thread | None = None

    @property
    def num_pinned_bytes(self) -> int:
        """How much is registered so far."""
        return sum(piece.nbytes for piece in self._registered)

    def start(self, device_index: int) -> None:
        """Begin to register the memory, with this CUDA device current; idempotent, returns at once."""
        with self._lock:
            if not self._is_started and not self._is_closing:
                self._is_started = True
                name = "datastates-pinner"
                self._thread = threading.Thread(target=self._run, args=(device_index,), name=name, daemon=True)
                self._thread.start()

    def wait(self, timeout: float | None) -> None:
        """Block until the memory is pinned, or cannot be; at once if nobody has started it. Raises WaitTimeoutError."""
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise WaitTimeoutError(f"the host cache was not pinned within {timeout} s")

    def close(self, timeout: float | None) -> None:
        """Undo the registration; no copy may use the memory any more. Raises WaitTimeoutError."""
        with self._lock:
            self._is_closing = True
        self.wait(timeout)
        while self._registered:
            unregister(self._registered.pop())
        self._pieces.clear()
        self._memory = None  # whoever keeps this object must not keep the memory mapped

    def abandon(self) -> None:
        """Keep the memory mapped for ever, instead of `close`: somebody may still copy to it."""
        with self._lock:
            self._is_closing = True
        if self._memory is not None:
            _abandoned.append(self._memory)

    def _run(self, device_index: int) -> None:
        concurrent.futures.wait([self._reserved])
        if self._reserved.exception() is not None:
            return
        try:
            torch.cuda.set_device(device_index)
            self._register_pieces()
        except Exception:
            logger.exception("the host cache could not be pinned; copies from the device will be slower")

    def _register_pieces(self) -> None:
        for piece in self._pieces:
            if self._is_closing:
                return
            refusal = register(piece)
            if refusal:
                logger.warning(
                    "the driver refused to pin more than %.2f of the host cache's %.2f GiB (cudaHostRegister: %s); "
                    "copies to the rest will be slower and may hold up the training: raise the memlock limit "
                    "(ulimit -l) or lower host_cache_size",
                    self.num_pinned_bytes / 2**30,
                    self._nbytes / 2**30,
                    refusal,
                )
                return
            self._registered.append(piece)
