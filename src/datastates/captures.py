"""Copies of eager tensors and other bytes, made inside ``save()`` within a budget of bytes."""

from __future__ import annotations

import threading

import torch

from datastates.bundles import Bundle, BundledTensor
from datastates.state import capture_host


class EagerBudget:
    """Host memory that copies and serialised objects may take, over all saves in flight. Thread safe.

    A device tensor's copy takes as much of the device's memory, for as long.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._condition = threading.Condition()  # protects _taken_bytes
        self._taken_bytes = 0

    def __repr__(self) -> str:
        return f"EagerBudget({self._taken_bytes} of {self._limit_bytes} bytes taken)"

    def take(self, nbytes: int) -> bool:
        """Take a part of the budget if there is enough left; does not block."""
        with self._condition:
            if self._taken_bytes + nbytes > self._limit_bytes:
                return False
            self._taken_bytes += nbytes
            return True

    def wait_take(self, nbytes: int, own_bytes: int) -> None:
        """Take a part of the budget that must be had.

        Blocks while other saves hold so much of it that it is exceeded; what is too large for the budget passes alone.

        Args:
            nbytes: how much.
            own_bytes: what the caller has taken before.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self._taken_bytes <= own_bytes or self._taken_bytes + nbytes <= self._limit_bytes
            )
            self._taken_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        with self._condition:
            self._taken_bytes -= nbytes
            self._condition.notify_all()


class Captures:
    """The copies of eager tensors that one save makes; owned by the save until it is staged.

    Attributes:
        nbytes: what it has taken from the budget.
        bundled_nbytes: the part of that which device tensors take.
    """

    def __init__(self, budget: EagerBudget) -> None:
        self._budget = budget
        self._bundles: dict[torch.device, Bundle] = {}
        self.nbytes = 0
        self.bundled_nbytes = 0

    def capture(self, tensor: torch.Tensor) -> memoryview | BundledTensor | None:
        """A copy that nobody else changes, or None where the budget is used up (see `state.Capture`).

        Those of a device's tensors are made by `pack`, in the order of the current stream: the host does not wait.

        Raises:
            GraphCaptureError: the device's current stream is recording a graph.
        """
        nbytes = tensor.numel() * tensor.element_size()
        if not self.take(nbytes):
            return None
        if _is_on_host(tensor):
            return capture_host(tensor)
        bundle = self._bundles.get(tensor.device)
        if bundle is None:
            bundle = self._bundles[tensor.device] = Bundle(tensor.device)
        self.bundled_nbytes += nbytes
        return bundle.add(tensor)

    def pack(self) -> None:
        """Copy what was captured of device tensors; ``save()`` must not return before."""
        for bundle in self._bundles.values():
            bundle.pack()
        self._bundles.clear()

    def take(self, nbytes: int) -> bool:
        """Count copies that the caller makes in, where there is room for them."""
        if not self._budget.take(nbytes):
            return False
        self.nbytes += nbytes
        return True

    def hold(self, nbytes: int) -> None:
        """Count literal bytes of the same save (pickled objects, arrays) in; blocks while others fill the budget."""
        self._budget.wait_take(nbytes, self.nbytes)
        self.nbytes += nbytes

    def release(self) -> None:
        """Give the memory back to the budget; idempotent."""
        self._budget.give_back(self.nbytes)
        self.nbytes = self.bundled_nbytes = 0


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
