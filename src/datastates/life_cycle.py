"""The life of an object that owns threads, processes or memory."""

from __future__ import annotations

import enum


class LifeCycle(enum.Enum):
    """Forwards only: open, then closing while work in flight is finished, then closed."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
