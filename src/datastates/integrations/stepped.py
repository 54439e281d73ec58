"""Which tensors only an optimizer's step changes: those that may be copied while training goes on.

The fence closes when an optimizer steps. What a framework saves beside the parameters and states of the optimizers that
have stepped (buffers, moving averages, metrics, frozen weights that a teacher's update writes to) may change at any
time, and nobody says which of it does. It is therefore copied inside ``save()``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from datastates.state import IsEager, has_own_storage


class SteppedOptimizers:
    """Sees every step of a ``torch.optim.Optimizer`` of this process from when it is made. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the fields below
        self._last_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._num_steps = 0
        register_optimizer_step_pre_hook(self._note)

    @property
    def num_steps(self) -> int:
        """How often any optimizer has stepped, or has begun to."""
        return self._num_steps

    def eager_rule(self, since: int = 0) -> IsEager:
        """What to copy inside ``save()``: all but parameters and states of optimizers that step.

        Args:
            since: only of those that have stepped since `num_steps` was this.
        """
        with self._lock:
            stepped = [optimizer for optimizer, number in self._last_steps.items() if number > since]
        found = [optimizer for optimizer in stepped if not _swaps_weights(optimizer)]
        guarded = frozenset(
            tensor.untyped_storage().data_ptr()
            for optimizer in found
            for tensor in _tensors_of(optimizer)
            if has_own_storage(tensor)
        ) - {0}

        def is_eager(_: str, tensor: torch.Tensor) -> bool:
            return not has_own_storage(tensor) or tensor.untyped_storage().data_ptr() not in guarded

        return is_eager

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with self._lock:
            self._num_steps += 1
            self._last_steps[optimizer] = self._num_steps


def _swaps_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has a mode for training and one for evaluation: it writes to the parameters when it changes.

    Source: schedulefree 1.4, whose optimizers ``transformers.Trainer`` and many loops know by these two methods.
    """
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """A parameter without a gradient may be in a group, but the optimizer leaves it alone: somebody else changes it."""
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.requires_grad)
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


STEPPED = SteppedOptimizers()
"""The one of this process."""
