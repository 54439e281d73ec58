"""The ranks that save together, and what they agree on, on the calling thread."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import distributed

from datastates.errors import DataStatesError, WaitTimeoutError
from datastates.events import now

Value = TypeVar("Value")

_FIRST_POLL_SECONDS = 0.001
_LAST_POLL_SECONDS = 0.25


class Ranks:
    """This process among those of a process group; alone where there is none.

    Every method is a collective: all ranks call it, in the same order, and it blocks until all have,
    within the time that the group allows.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        """Args:
        group: None: all ranks of the job, once ``torch.distributed`` is initialised.
        """
        self._group = group
        self.rank = int(distributed.get_rank(group)) if is_initialized() else 0
        """This process's number in the group; what it was when this was made, also when the group is gone."""
        self.size = int(distributed.get_world_size(group)) if is_initialized() else 1
        """How many ranks there are; likewise."""

    @classmethod
    def on_host(cls, group: distributed.ProcessGroup | None = None) -> Ranks:
        """The ranks of a group, with collectives that touch no device; a collective itself.

        Where the group's backend serves devices only, another group of the same ranks is made with gloo: a question
        asked at every step must not wait for the device's queue.
        """
        if not is_initialized() or "cpu:" in distributed.get_backend_config(group):
            return cls(group)
        members = None if group is None else distributed.get_process_group_ranks(group)
        return cls(distributed.new_group(members, backend="gloo", use_local_synchronization=members is not None))

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on all of them. It is pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank. The cheapest question there is."""
        if self.size == 1:
            return flag
        found = torch.tensor([int(flag)], dtype=torch.int32)
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._group)
        return bool(found.item())

    def agree(self, compute: Callable[[], Value]) -> Value:
        """What the first rank finds, on all ranks.

        Raises:
            DataStatesError, OSError: what was raised there, on all of them.
        """
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                found[0] = compute()
            except (DataStatesError, OSError) as error:
                found[1] = error
        if self.size > 1:
            distributed.broadcast_object_list(found, group=self._group, group_src=0)
        if found[1] is not None:
            raise found[1]
        return found[0]  # type: ignore[no-any-return]

    def exchange(self, name: str, value: str, timeout: float) -> list[str]:
        """The text of every rank, by way of the job's store: a rank that does not come harms no later collective.

        Args:
            name: of this exchange; never used before.
            value: of this rank.
            timeout: seconds to wait for the others.

        Raises:
            WaitTimeoutError: names the ranks that have not come.
        """
        if self.size == 1:
            return [value]
        store = distributed.distributed_c10d._get_default_store()
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], value)
        end, delay = now() + timeout, _FIRST_POLL_SECONDS
        while not store.check(keys):
            if now() > end:
                missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
                raise WaitTimeoutError(f"ranks {missing} have not come within {timeout:g} s")
            time.sleep(delay)
            delay = min(2 * delay, _LAST_POLL_SECONDS)
        return [store.get(key).decode() for key in keys]

    def barrier(self) -> None:
        """Block until all ranks are here."""
        if self.size > 1:
            distributed.barrier(self._group)


def is_initialized() -> bool:
    """Whether ``torch.distributed`` knows of other ranks."""
    return distributed.is_available() and distributed.is_initialized()


def agree_on_run(ranks: Ranks) -> str:
    """An id that all ranks share and no other run has; a collective."""
    return ranks.agree(lambda: uuid.uuid4().hex[:12])
