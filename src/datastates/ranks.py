"""The ranks that save together, and what they agree on, on the calling thread."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed

from datastates.errors import ConfigError, DataStatesError, WaitTimeoutError
from datastates.events import now
from datastates.fqns import listed

Value = TypeVar("Value")

_FIRST_POLL_SECONDS = 0.001
_LAST_POLL_SECONDS = 0.25
_RANKS_SHOWN = 8


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

        Raises:
            ConfigError: this process is none of the group's.
        """
        if is_initialized() and distributed.get_rank(group) < 0:
            raise ConfigError(f"rank {distributed.get_rank()} of the job does not belong to the group that was given")
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
            DataStatesError, OSError: what was raised there, on all of them. In place of any other exception the other
                ranks raise a DataStatesError that names it.
        """
        found: list[Any] = [None, None]
        failure: Exception | None = None
        if self.rank == 0:
            try:
                found[0] = compute()
            except Exception as error:  # noqa: BLE001 - whatever it is: the others wait for this rank's word
                failure = error
                is_ours = isinstance(error, (DataStatesError, OSError))
                found[1] = error if is_ours else DataStatesError(f"rank 0 has failed: {_described(error)}")
        if self.size > 1:
            distributed.broadcast_object_list(found, group=self._group, group_src=0)
        if failure is not None or found[1] is not None:
            raise failure or found[1]
        return found[0]  # type: ignore[no-any-return]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """The body, which makes no collective, ends well on all ranks, or every one raises; its end is a collective.

        So none goes on to wait for one that has failed.

        Args:
            what: for the message on the ranks that have not failed themselves.

        Raises:
            Exception: what the body has raised.
            DataStatesError: it has raised on other ranks only; names them and the causes.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is: the others wait for this rank's word
            failure = error
        causes = self.gather("" if failure is None else _described(failure))
        if failure is not None:
            raise failure
        told = [f"rank {rank}: {cause}" for rank, cause in enumerate(causes) if cause]
        if told:
            raise DataStatesError(f"{what} has failed on {listed(told, _RANKS_SHOWN)}")

    def agree_at_leisure(self, compute: Callable[[], Value], timeout: float) -> Value:
        """As `agree`, where the first rank may take longer than the group allows: the others ask the store.

        Args:
            compute: called on the first rank.
            timeout: seconds to wait for it.

        Raises:
            WaitTimeoutError: it has not found anything in that time.
            DataStatesError, OSError: what was raised there, on all ranks.
        """
        if self.size == 1:
            return compute()
        name = self.agree(lambda: f"datastates/leisure/{uuid.uuid4().hex}")
        found: Future[Value] = Future()
        if self.rank == 0:
            try:
                found.set_result(compute())
            except Exception as error:  # noqa: BLE001 - `agree` passes it on
                found.set_exception(error)
        self.exchange(name, "", timeout)
        return self.agree(found.result)

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
        self.tell(name, value)
        return self.hear(name, timeout)

    def tell(self, name: str, value: str) -> None:
        """This rank's part of an `exchange`; no collective, does not wait for anybody."""
        if self.size > 1:
            _store().set(f"{name}/{self.rank}", value)

    def hear(self, name: str, timeout: float) -> list[str]:
        """What every rank of several has told in an `exchange`; no collective. May be called again after it has failed.

        Raises:
            WaitTimeoutError: names the ranks that have not come within ``timeout`` seconds.
        """
        store = _store()
        keys = [f"{name}/{rank}" for rank in range(self.size)]
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


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def is_initialized() -> bool:
    """Whether ``torch.distributed`` knows of other ranks."""
    return distributed.is_available() and distributed.is_initialized()


def agree_on_run(ranks: Ranks) -> str:
    """An id that all ranks share and no other run has; a collective."""
    return ranks.agree(lambda: uuid.uuid4().hex[:12])
