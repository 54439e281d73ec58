"""Ready-made listeners (``on_event``) that hand the numbers of each save to the tools people look at.

They call those tools on a thread of their own: a slow or broken one holds up neither training nor saves. Each save
gives one set of values when it is committed, and one when it is lost or skipped; `VALUES` names them.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from datastates.errors import WaitTimeoutError
from datastates.events import Event
from datastates.recent_names import RecentNames
from datastates.retention import step_of

logger = logging.getLogger(__name__)

VALUES = (
    "nbytes",
    "blocked_seconds",
    "fenced_seconds",
    "staged_seconds",
    "durable_seconds",
    "committed_seconds",
    "nbytes_per_second",
    "num_in_flight",
    "num_free_slabs",
    "flush_nbytes_per_second",
    "copy_nbytes_per_second",
    "step_seconds",
    "advised_seconds",
    "advised_steps",
    "advised_host_cache_bytes",
)
"""What is handed on of the record ``summary`` (`datastates.events`), as far as it is known. Besides, counted since the
logger was made: ``num_committed``, ``num_lost``, ``num_skipped``."""

CLOSE_SECONDS = 10.0
"""So long the end of its owner, or of the interpreter, waits for what is queued."""

_MAX_QUEUED = 4096
_COUNTED = {"summary": "num_committed", "failed": "num_lost", "skipped": "num_skipped"}


class RelayedListener:
    """A listener whose work is done by a thread of its own, in the order of the records.

    Thread safe. Subclasses say in `_handle` what the work is, and in `_wants` which records mean any; the first error
    of the work is logged, later records are tried again. Where the work is slower than the records come, the newest
    are dropped, and their number is in `num_dropped`. `close` it, or use it as a context manager, which calls `end`. In
    a forked child it does nothing.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._queue: queue.Queue[Event | None] = queue.Queue(_MAX_QUEUED)
        self._has_failed = False
        self._is_closed = False
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name="datastates-logger", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def __call__(self, record: Event) -> None:
        """Take one record; returns at once."""
        if self._is_closed or os.getpid() != self._owner or not self._wants(record):
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def __enter__(self) -> RelayedListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def close(self, timeout: float | None = None) -> None:
        """Do what is queued, then end the thread; idempotent. Records that come later are left out.

        To be called after the engine, whose last saves are otherwise not seen.

        Raises:
            WaitTimeoutError: not done within ``timeout`` seconds.
        """
        if os.getpid() != self._owner:
            return
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.end)
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                raise WaitTimeoutError(f"records were not handed on within {timeout} s") from None
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise WaitTimeoutError(f"records were not handed on within {timeout} s")

    def end(self) -> None:
        """As `close`, within `CLOSE_SECONDS` and without an error: for owners that must not fail for it."""
        try:
            self.close(CLOSE_SECONDS)
        except WaitTimeoutError as error:
            logger.warning("%s", error)

    def _wants(self, record: Event) -> bool:  # noqa: ARG002 - for those that do not want all
        return True

    def _handle(self, record: Event) -> None:
        raise NotImplementedError

    def _wait_seconds(self) -> float | None:
        """How long the thread waits for the next record before it calls `_tick`; None: for ever."""
        return None

    def _tick(self) -> None:
        """Do what is not done at each record; called at the end, too."""

    def _run(self) -> None:
        is_open = True
        while is_open:
            try:
                record = self._queue.get(timeout=self._wait_seconds())
            except queue.Empty:
                self._try(self._tick)
                continue
            is_open = record is not None
            self._try(self._tick if record is None else functools.partial(self._handle, record))

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:  # the tool is the caller's: training and saves go on without it
            if not self._has_failed:
                self._has_failed = True
                logger.exception("%s: numbers of a save could not be handed on; said once", type(self).__name__)


class _ValuesLogger(RelayedListener):
    """Makes the values of a record, and counts."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._counts = dict.fromkeys(_COUNTED.values(), 0)
        self._lost = RecentNames()
        super().__init__()

    def _wants(self, record: Event) -> bool:
        return record["event"] in _COUNTED

    def _handle(self, record: Event) -> None:
        if record["event"] == "failed":
            if record["attempt"] in self._lost:
                return  # a lost checkpoint tells of each of its files
            self._lost.add(record["attempt"])
        self._counts[_COUNTED[record["event"]]] += 1
        values = {name: record[name] for name in VALUES if record.get(name) is not None}
        step = step_of(str(record.get("tag", "")))
        self._log({f"{self._prefix}{name}": value for name, value in {**values, **self._counts}.items()}, step)

    def _log(self, values: dict[str, float], step: int | None) -> None:
        raise NotImplementedError


class DictLogger(_ValuesLogger):
    """Hands a dictionary per save to a function, as ``wandb.log`` and its like take it.

    Weights & Biases puts all that is logged into rows in the order of their steps: let it join the row that the
    training logs next, ``DictLogger(lambda values: run.log(values, commit=False))``.
    """

    def __init__(self, log: Callable[[dict[str, float]], object], *, prefix: str = "checkpoint/") -> None:
        """Args:
        log: called on the logger's thread, with names and numbers; ``step`` is among them where the tag has one.
        prefix: before each name.
        """
        self._call = log
        super().__init__(prefix)

    def _log(self, values: dict[str, float], step: int | None) -> None:
        self._call(values if step is None else {**values, f"{self._prefix}step": step})


class ScalarWriter(Protocol):
    """What is used of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> object: ...


class TensorBoardLogger(_ValuesLogger):
    """Adds a scalar per value and save to a ``SummaryWriter``, at the step in the checkpoint's tag.

    The training may use the same writer: it queues what it is given. The writer stays the caller's, to be closed after
    the logger. What has no step in its tag is put at the number of saves so far.
    """

    def __init__(self, writer: ScalarWriter, *, prefix: str = "checkpoint/") -> None:
        """Args:
        writer: of ``torch.utils.tensorboard`` or tensorboardX.
        prefix: before each name.
        """
        self._writer = writer
        super().__init__(prefix)

    def _log(self, values: Mapping[str, float], step: int | None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=sum(self._counts.values()) if step is None else step)
