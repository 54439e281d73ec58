"""Records of what a save did and when: numbers for machines, beside the log that is for people.

A record is one flat dictionary. Every record has ``event`` (its name), ``rank``, ``begin`` and ``end``:
seconds of ``CLOCK_MONOTONIC``, comparable between processes of one host, of no meaning across hosts. All but ``fence``
have ``attempt``, which is the same for all files and ranks of one checkpoint, and ``path``: the file, or the
checkpoint's folder. The other keys depend on the event; lengths end in ``nbytes``, durations in ``_seconds``.

===================  =====================================================================================
event                what happened between ``begin`` and ``end``; further keys
===================  =====================================================================================
``save``             the call of ``save()`` for one file: ``nbytes``, ``eager_nbytes``
``save_checkpoint``  DeepSpeed's whole ``save_checkpoint``
``fence``            an optimizer step (or ``wait()``) was held back for copies: ``num_files``
``stage``            one slab was filled: ``index``, ``nbytes``
``flush``            one slab was written: ``index``, ``nbytes``
``staged``           from ``save()`` to the last copy of one file: ``nbytes``
``durable``          from ``save()`` until one file was durable: ``nbytes``
``committed``        from the first ``save()`` of a checkpoint (or of a file alone) until it was visible: ``nbytes``
``failed``           a file or a checkpoint was lost: ``error``
``skipped``          a save was not made, or dropped, as ``when_busy`` asks: ``error``
===================  =====================================================================================
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

now = time.monotonic
Event = dict[str, Any]
Listener = Callable[[Event], None]


class EventLog:
    """Hands records to a listener and, if asked, appends them to a file of JSON lines.

    Thread safe. `record` never raises for the file: a log that cannot be written must not harm a save; the
    first such error is kept in `error`. A listener's exception is the listener's and passes through.
    """

    def __init__(self, rank: int = 0, directory: str | None = None, listener: Listener | None = None) -> None:
        """Args:
        rank: goes into every record.
        directory: where ``events-rank<rank>.jsonl`` is appended to; made when missing. None: no file.
        listener: called with each record on the thread that made it; must be quick.
        """
        self.error: OSError | None = None
        self._rank = rank
        self._listener = listener
        self._lock = threading.Lock()  # protects the order of lines in the file
        self._descriptor: int | None = None
        if directory is not None:
            os.makedirs(directory, exist_ok=True)
            path = os.path.join(directory, f"events-rank{rank:05d}.jsonl")
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def record(self, event: str, begin: float, end: float, **fields: Any) -> None:
        """Make one record. Does not wait for the disk."""
        if self._descriptor is None and self._listener is None:
            return
        entry: Event = {"event": event, "rank": self._rank, "begin": begin, "end": end, **fields}
        if self._descriptor is not None:
            line = json.dumps(entry, default=str) + "\n"
            with self._lock:
                self._write(line.encode("utf-8", "backslashreplace"))
        if self._listener is not None:
            self._listener(entry)

    def close(self) -> None:
        """Close the file; idempotent. Later records reach the listener only."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _write(self, line: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, line)
        except OSError as error:
            self.error = self.error or error
