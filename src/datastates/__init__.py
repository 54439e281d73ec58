"""Lazy, asynchronous checkpoints for PyTorch: saving does not stop the training.

The names below resolve on first use. Importing the package itself loads neither torch nor numpy, because
the flusher process imports it, too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datastates.checkpoint_engine import CheckpointEngine
    from datastates.config import CheckpointConfig
    from datastates.errors import DataStatesError
    from datastates.reader import load

__all__ = ["CheckpointConfig", "CheckpointEngine", "DataStatesError", "load"]
__version__ = "0.1.0"

_HOMES = {
    "CheckpointConfig": "datastates.config",
    "CheckpointEngine": "datastates.checkpoint_engine",
    "DataStatesError": "datastates.errors",
    "load": "datastates.reader",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
