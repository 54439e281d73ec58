"""What the ranks of a job do together on their training threads: settle saves, wait for each other, agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from datastates.ranks import Ranks
from datastates.saver import open_savers

Value = TypeVar("Value")


def settle() -> None:
    """Block until every save of this process is committed or has failed; failures stay for their owners to raise."""
    for saver in open_savers():
        saver.settle()


def barrier() -> None:
    """Block until all ranks are here, where there are several."""
    Ranks().barrier()


def agreed(compute: Callable[[], Value]) -> Value:
    """What the first rank finds, on all ranks: each calls it, and blocks until the first has found it.

    Raises:
        DataStatesError, OSError: what was raised there, on all of them.
    """
    return Ranks().agree(compute)
