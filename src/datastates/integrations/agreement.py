"""What the ranks of a job do together on their training threads: settle saves, wait for each other, agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from datastates.errors import DataStatesError
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


def agreed_at_leisure(compute: Callable[[], Value], timeout: float) -> Value:
    """`agreed`, where the first rank may take up to so many seconds. See `Ranks.agree_at_leisure`."""
    return Ranks().agree_at_leisure(compute, timeout)


def done_by_all(act: Callable[[], Value]) -> Value:
    """What the first rank finds, once all ranks have done it: each calls this, and blocks until all have.

    Raises:
        DataStatesError, OSError: what was raised on the first rank that failed, on all of them.
    """
    found: Value | None = None
    failure: BaseException | None = None
    try:
        found = act()
    except (DataStatesError, OSError) as error:
        failure = error
    results = Ranks().gather((found, failure))
    failures = [failed for _, failed in results if failed is not None]
    if failures:
        raise failures[0]
    return results[0][0]  # type: ignore[no-any-return]


def agreed(compute: Callable[[], Value]) -> Value:
    """What the first rank finds, on all ranks: each calls it, and blocks until the first has found it.

    Raises:
        DataStatesError, OSError: what was raised there, on all of them.
    """
    return Ranks().agree(compute)
