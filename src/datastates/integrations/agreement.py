"""What the ranks of a job do together on their training threads: settle saves, wait for each other, agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

from datastates.errors import DataStatesError
from datastates.saver import open_savers

Value = TypeVar("Value")


def settle() -> None:
    """Block until every save of this process is committed or has failed; failures stay for their owners to raise."""
    for saver in open_savers():
        saver.settle()


def barrier() -> None:
    """Block until all ranks are here, where there are several."""
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.barrier()


def agreed(compute: Callable[[], Value]) -> Value:
    """What the first rank finds, on all ranks: each calls it, and blocks until the first has found it.

    Raises:
        DataStatesError, OSError: what was raised there, on all of them.
    """
    is_alone = not distributed.is_initialized() or distributed.get_world_size() == 1
    found: list[Any] = [None, None]
    if is_alone or distributed.get_rank() == 0:
        try:
            found[0] = compute()
        except (DataStatesError, OSError) as error:
            found[1] = error
    if not is_alone:
        distributed.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    return found[0]  # type: ignore[no-any-return]
