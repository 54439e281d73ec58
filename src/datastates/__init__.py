"""Lazy, asynchronous checkpoints for PyTorch: saving does not stop the training.

The names below resolve on first use. Importing the package itself loads neither torch nor numpy, because
the flusher process imports it, too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datastates.catalog import list_checkpoints
    from datastates.checkpoint_engine import CheckpointEngine
    from datastates.checkpointer import Checkpointer
    from datastates.config import CheckpointConfig
    from datastates.contents.listing import list_file
    from datastates.errors import DataStatesError
    from datastates.integrations.dcp_reader import DataStatesReader
    from datastates.integrations.dcp_writer import DataStatesWriter
    from datastates.integrity import verify
    from datastates.latest import load_latest
    from datastates.reader import load

__all__ = [
    "CheckpointConfig",
    "CheckpointEngine",
    "Checkpointer",
    "DataStatesError",
    "DataStatesReader",
    "DataStatesWriter",
    "list_checkpoints",
    "list_file",
    "load",
    "load_latest",
    "verify",
]
__version__ = "0.1.0"

_HOMES = {
    "CheckpointConfig": "datastates.config",
    "CheckpointEngine": "datastates.checkpoint_engine",
    "Checkpointer": "datastates.checkpointer",
    "DataStatesError": "datastates.errors",
    "DataStatesReader": "datastates.integrations.dcp_reader",
    "DataStatesWriter": "datastates.integrations.dcp_writer",
    "list_checkpoints": "datastates.catalog",
    "list_file": "datastates.contents.listing",
    "load": "datastates.reader",
    "load_latest": "datastates.latest",
    "verify": "datastates.integrity",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
