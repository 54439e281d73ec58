"""Records of what a save did and when: numbers for machines, beside the log that is for people.

A record is one flat dictionary. Every record has ``event`` (its name), ``rank``, ``begin`` and ``end``:
seconds of ``CLOCK_MONOTONIC``, comparable between processes of one host; a file says in its ``clock`` records what time
that is. All but ``clock``, ``fence`` and ``step`` have ``attempt``, which is the same for all files and ranks of one
checkpoint, and ``path``: the file, or the checkpoint's folder. The other keys depend on the event; lengths end in
``nbytes``, durations in ``_seconds``, what is not known is null.

===================  =====================================================================================
event                what happened between ``begin`` and ``end``; further keys
===================  =====================================================================================
``clock``            in files only, when one is opened and when the host's clock was set: ``time`` (Unix time of
                     ``begin``), ``host``, ``pid``
``step``             from one optimizer step to the next: ``number`` since the start; of the first, only when it was
``save``             the call of ``save()`` for one file: ``nbytes``, ``eager_nbytes``, and how much was in flight then:
                     ``num_in_flight`` (checkpoints not settled yet), ``num_slabs``, ``num_free_slabs`` (host cache)
``save_checkpoint``  DeepSpeed's whole ``save_checkpoint``
``fence``            an optimizer step (or ``wait()``) was held back for copies: ``num_files``
``stage``            one slab was filled: ``index``, ``nbytes``
``flush``            one slab was written: ``index``, ``nbytes``
``staged``           from ``save()`` to the last copy of one file: ``nbytes``
``durable``          from ``save()`` until one file was durable: ``nbytes``
``committed``        from the first ``save()`` of a checkpoint (or of a file alone) until it was visible: ``nbytes``
``summary``          this rank's account of what is committed now, and advice; see below
``failed``           a file or a checkpoint was lost: ``error``
``carried``          a checkpoint was committed in a further tier, from the begin of the try that succeeded: ``tier``
                     (where to), ``nbytes``; of rank 0
``carry_failed``     a try to carry a checkpoint (``attempt`` is empty where it is about none): ``tier``, ``error``,
                     ``is_final`` (it is not tried again)
``skipped``          a save was not made, or dropped, as ``when_busy`` asks: ``error``
===================  =====================================================================================

``summary`` has ``tag`` (empty for a file alone), ``nbytes`` and ``num_files`` of this rank, ``blocked_seconds`` (in the
calls that saved it), ``fenced_seconds`` (steps held back between it and the next), ``staged_seconds``,
``durable_seconds``, ``committed_seconds`` (each from its begin), ``nbytes_per_second`` (durable), ``num_in_flight`` and
``num_free_slabs`` (the most and the least when its files were saved), ``num_slabs``, ``host_cache_bytes``; what was
measured so far: ``flush_nbytes_per_second`` and ``copy_nbytes_per_second`` while there was something to flush or
copy, ``step_seconds`` and ``interval_seconds`` (between two saves) without what saves add to them,
``num_steps_between_saves``; and what follows: ``advised_seconds``, ``advised_steps`` (between two saves),
``advised_host_cache_bytes``, as `datastates.advice` has them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

PREFIX = "events-rank"
"""The name of each file begins so; the rank and ``.jsonl`` follow."""

CLOCK_SECONDS = 1.0
"""A file says again what time it is when the host's clock was moved by so much: set by hand, or after a suspension."""

now = time.monotonic
Event = dict[str, Any]
Listener = Callable[[Event], None]

logger = logging.getLogger(__name__)


def unix_offset() -> float:
    """What is added to `now` for Unix time; changes when the host's clock is set."""
    return time.time() - now()


class EventLog:
    """Hands records to listeners and, if asked, appends them to a file of JSON lines.

    Thread safe. `record` never raises: neither a log that cannot be written nor a listener that fails may harm a save.
    The first such error of the file, and of each listener, is logged.
    """

    def __init__(self, rank: int = 0, directory: str | None = None, listener: Listener | None = None) -> None:
        """Args:
        rank: goes into every record.
        directory: where ``events-rank<rank>.jsonl`` is appended to; made when missing. None: no file.
        listener: see `add`.

        Raises:
            OSError: the file cannot be made.
        """
        self.error: OSError | None = None
        self._rank = rank
        self._listeners: list[Listener] = [] if listener is None else [listener]
        self._broken: list[Listener] = []
        self._ends: list[Callable[[], object]] = []
        self._lock = threading.RLock()  # protects the order of lines in the file; a signal handler may save, too
        self._descriptor: int | None = None
        self._path = ""
        self._is_cut = False
        self._offset: float | None = None  # from the clock of the records to Unix time, as the file was told
        if directory is not None:
            os.makedirs(directory, exist_ok=True)
            self._path = os.path.join(directory, f"{PREFIX}{rank:05d}.jsonl")
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._begin_file(self._descriptor)

    def add(self, listener: Listener, end: Callable[[], object] | None = None) -> None:
        """Call this with each record from now on, on the thread that made it; the record is not to be changed.

        It holds up what it is called by: the training for ``save``, ``fence`` and ``step``, the background otherwise.
        It must be quick, and must not wait for saves: the thread that it runs on may be the one that settles them.

        Args:
            listener: what is called.
            end: called by `close`.
        """
        self._listeners.append(listener)
        if end is not None:
            self._ends.append(end)

    def record(self, event: str, begin: float, end: float, **fields: Any) -> None:
        """Make one record. Does not wait for the disk."""
        if self._descriptor is None and not self._listeners:
            return
        entry: Event = {"event": event, "rank": self._rank, "begin": begin, "end": end, **fields}
        if self._descriptor is not None:
            self._append(entry)
        for listener in self._listeners:
            try:
                listener(entry)
            except Exception:  # noqa: BLE001 - a listener is the caller's code: whatever it raises, the save goes on
                if listener not in self._broken:
                    self._broken.append(listener)
                    # as text: whoever keeps the exception keeps all frames of this thread, and a whole host cache
                    text = "a listener failed at the record %r; saves go on, and this is said once\n%s"
                    logger.error(text, event, traceback.format_exc().rstrip())

    def close(self) -> None:
        """Close the file; idempotent. Later records reach the listeners only."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
            ends, self._ends = self._ends, []
        for end in ends:
            end()

    def _begin_file(self, descriptor: int) -> None:
        """Say what time it is, in a line of its own: a run that was killed may have left half a line."""
        size = os.fstat(descriptor).st_size
        self._is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        self._append()

    def _clock(self, offset: float) -> Event:
        """The record that says what time it is, ``offset`` being what `unix_offset` gives."""
        begin = now()
        anchor = {"time": begin + offset, "host": os.uname().nodename, "pid": os.getpid()}
        return {"event": "clock", "rank": self._rank, "begin": begin, "end": begin, **anchor}

    def _append(self, *entries: Event) -> None:
        """Write them to the file, behind what time it is where the file has not been told yet, or no longer knows."""
        lines = b"".join(map(_line, entries))
        offset = unix_offset()
        with self._lock:
            if self._descriptor is None:
                return
            if self._offset is None or abs(offset - self._offset) > CLOCK_SECONDS:
                self._offset, lines = offset, _line(self._clock(offset)) + lines
            try:
                data = b"\n" + lines if self._is_cut else lines
                self._is_cut = os.write(self._descriptor, data) < len(data)
                if self._is_cut:
                    self._offset = None
            except OSError as error:
                self._offset = None
                if self.error is None:
                    self.error = error
                    logger.warning("%s: records of saves cannot be written, saves go on: %s", self._path, error)


def _line(entry: Event) -> bytes:
    return (json.dumps(entry, default=str) + "\n").encode("utf-8", "backslashreplace")
