"""What Accelerate does to checkpoints in flight, wrapped function by function.

Each function of this module takes the original and gives what replaces it; see `datastates.integrations.huggingface`.

Source: accelerate 1.15, accelerator.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from datastates.errors import CheckpointNotFoundError
from datastates.integrations.agreement import agreed, barrier, settle
from datastates.integrations.deepspeed import engine_of
from datastates.integrations.rotation import ROTATION, set_aside
from datastates.integrations.series import Series, finish_interrupted, youngest_complete

PREFIX = "checkpoint_"
"""Names of Accelerate's checkpoint folders. Source: accelerate, accelerator.py, ``save_state``."""


def save_state(original: Callable[..., str]) -> Callable[..., str]:
    """``total_limit``: older checkpoints go when a younger one is complete, not before it is begun."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> str:
        project = self.project_configuration
        limit = project.total_limit
        if limit is None or not project.automatic_checkpoint_naming or not _is_ours(self):
            return original(self, *args, **kwargs)
        project.total_limit = None
        try:
            location = original(self, *args, **kwargs)
        finally:
            project.total_limit = limit
        if self.is_main_process:
            folder = os.path.join(self.project_dir, "checkpoints")
            ROTATION.ask(Series(os.path.realpath(folder), PREFIX, max(limit, 1)))
        return location

    return wrapper


def load_state(original: Callable[..., None]) -> Callable[..., None]:
    """Without a folder's name: the youngest checkpoint that was completed; younger ones are set aside."""

    @functools.wraps(original)
    def wrapper(self: Any, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        if _is_ours(self):
            settle()
            ROTATION.finish()
            barrier()
            if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
                folder = os.path.join(self.project_dir, "checkpoints")
                input_dir = agreed(lambda: _choose(folder))
                if input_dir is None:
                    raise CheckpointNotFoundError(f"{folder} holds no complete checkpoint")
        original(self, input_dir, *args, **kwargs)

    return wrapper


def _is_ours(accelerator: Any) -> bool:
    return any(engine_of(model) is not None for model in accelerator._models)


def _choose(folder: str) -> str | None:
    """The youngest complete checkpoint that Accelerate has made; younger ones are set aside, their numbers are free."""
    found = youngest_complete(folder, PREFIX)
    numbers = Series(os.path.realpath(folder), PREFIX, 1).numbers()
    for path, number in numbers.items():
        if found is not None and number > numbers[found] and not finish_interrupted(path):
            set_aside(path)
    return found
