"""Copies of eager tensors, made inside ``save()`` within a budget of bytes."""

from __future__ import annotations

import threading

import torch

from datastates.state import capture_host


class EagerBudget:
    """Host memory that copies of eager tensors may take, over all saves in flight. Thread safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()  # protects _taken_bytes
        self._taken_bytes = 0

    def __repr__(self) -> str:
        return f"EagerBudget({self._taken_bytes} of {self._limit_bytes} bytes taken)"

    def take(self, nbytes: int) -> bool:
        """Take a part of the budget if there is enough left; does not block."""
        with self._lock:
            if self._taken_bytes + nbytes > self._limit_bytes:
                return False
            self._taken_bytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._taken_bytes -= nbytes


class Captures:
    """The copies of eager tensors that one save makes; owned by the save until it is staged."""

    def __init__(self, budget: EagerBudget) -> None:
        self._budget = budget
        self.nbytes = 0

    def capture(self, tensor: torch.Tensor) -> memoryview | torch.Tensor | None:
        """A copy that nobody else changes, or None where the budget is used up (see `state.Capture`).

        A device tensor is cloned on its device, in the order of the current stream: the host does not wait.
        """
        nbytes = tensor.numel() * tensor.element_size()
        if not self._budget.take(nbytes):
            return None
        self.nbytes += nbytes
        return capture_host(tensor) if tensor.device.type == "cpu" else tensor.detach().clone()

    def release(self) -> None:
        """Give the memory back to the budget; idempotent."""
        self._budget.give_back(self.nbytes)
        self.nbytes = 0
