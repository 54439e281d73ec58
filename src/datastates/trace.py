"""The records of a run as a trace for Perfetto or ``chrome://tracing``: what each rank did when.

Each rank is a process, each kind of work a row of it (several where pieces of it overlap). Hosts stand on one time
line as far as their clocks agree.

Source: "Trace Event Format" of the Chromium project: complete events (``X``), instants (``i``), counters (``C``) and
metadata (``M``); times in microseconds, here to a nanosecond.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any

from datastates.events import Event
from datastates.record_files import no_records, record_paths, records_of

_ROWS = {
    "step": "steps",
    "save_checkpoint": "save_checkpoint()",
    "save": "save()",
    "fence": "fence: the step is held back",
    "stage": "staging: device to host cache",
    "flush": "flushing: host cache to storage",
    "staged": "file: until staged",
    "durable": "file: until durable",
    "committed": "checkpoint: until committed",
    "carried": "carrying to the next tier",
    "carry_failed": "carrying to the next tier",
}
"""Kind of record to row, from the top to the bottom."""

_ORDER = {row: number for number, row in enumerate(dict.fromkeys(_ROWS.values()))}
_INSTANTS = ("failed", "skipped")
_LANES = 1000  # no kind of work has so many pieces at the same time
_STRIDE = _LANES * 16  # viewers take the numbers of threads as those of the whole trace
_GZIP_LEVEL = 5
_NOT_SHOWN = frozenset({"event", "rank", "begin", "end"})


def write_trace(records: str, out: str) -> int:
    """Write the trace of a folder of records, or of one file of it; gives the number of records that it shows.

    Reads and writes one record after the other, whatever the size. The file appears when it is complete.

    Args:
        records: as ``events_dir`` names it.
        out: the file to write or replace; ``*.gz`` is compressed, which Perfetto opens, too.

    Raises:
        CheckpointNotFoundError: there are no records.
        OSError: a file cannot be read or written.
    """
    first = {path: record for path in record_paths(records) if (record := next(records_of(path), None)) is not None}
    if not first:
        raise no_records(records)
    num_records, rows = 0, _Rows()
    with _replacing(out) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for path, begin in _origins(first).items():
            for record in records_of(path):
                for entry in rows.entries(record, begin):
                    file.write(separator + json.dumps(entry))
                    separator = ",\n"
                num_records += 1
        file.write("\n]}\n")
    return num_records


def _origins(first: Mapping[str, Event]) -> dict[str, float]:
    """Per file, the time that is the begin of the trace: one for all that have a clock, one for all others."""
    origins: dict[bool, float] = {}
    for record in first.values():
        has_clock = record["event"] == "clock"
        origins[has_clock] = min(origins.get(has_clock, record["begin"]), record["begin"])
    return {path: origins[record["event"] == "clock"] for path, record in first.items()}


class _Rows:
    """Makes trace events of records, and finds them rows in which they do not overlap."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, str], list[float]] = {}  # when the last event of each lane has ended
        self._named: set[int] = set()

    def entries(self, record: Event, origin: float) -> Iterator[dict[str, Any]]:
        """What a record becomes: names of new rows first. The trace begins at ``origin``."""
        event, rank = record["event"], int(record["rank"])
        at = {"pid": rank + 1, "tid": rank * _STRIDE, "cat": event, "ts": _microseconds(record["begin"] - origin)}
        if event == "clock" or rank not in self._named:
            self._named.add(rank)
            yield _meta("process_name", rank, rank * _STRIDE, {"name": f"rank {rank} {record.get('host', '')}".strip()})
            yield _meta("process_sort_index", rank, rank * _STRIDE, {"sort_index": rank})
        if event in _ROWS:
            yield from self._complete(record, rank, at, _microseconds(record["end"] - origin))
        elif event in _INSTANTS:
            ends = {"ts": _microseconds(record["end"] - origin)}
            yield at | ends | {"ph": "i", "s": "p", "name": _name(record), "args": _args(record)}

    def _complete(self, record: Event, rank: int, at: dict[str, Any], end: float) -> Iterator[dict[str, Any]]:
        event = record["event"]
        row = _ROWS[event]
        lanes = self._lanes.setdefault((rank, row), [])
        lane = next((number for number, end in enumerate(lanes) if end <= record["begin"]), len(lanes))
        thread = rank * _STRIDE + _ORDER[row] * _LANES + lane + 1
        if lane == len(lanes):
            lanes.append(0.0)
            yield _meta("thread_name", rank, thread, {"name": row})
            yield _meta("thread_sort_index", rank, thread, {"sort_index": thread})
        lanes[lane] = record["end"]
        length = {"dur": round(end - at["ts"], 3)}  # so that what follows at once begins where this ends
        yield at | length | {"ph": "X", "tid": thread, "name": _name(record), "args": _args(record)}
        if event == "save" and "num_free_slabs" in record:
            for name in ("num_free_slabs", "num_in_flight"):
                yield at | {"ph": "C", "name": name, "args": {name: record.get(name, 0)}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _meta(name: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank + 1, "tid": thread, "args": args}


def _name(record: Event) -> str:
    event = record["event"]
    if event == "step":
        return f"step {record.get('number', '')}"
    if event in ("stage", "flush"):
        return f"{os.path.basename(str(record.get('path', '')))} [{record.get('index', '')}]"
    if event == "fence":
        return "fence"
    where = os.path.basename(str(record.get("path", "")))
    return f"{event} {where}" if event != "carry_failed" else f"failed {where}"


def _args(record: Event) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in _NOT_SHOWN}


def _made(partial: str, path: str) -> IO[bytes]:
    """The file that will take the place of ``path``, which is the name that an error is about."""
    try:
        return open(partial, "wb")
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from error


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[IO[str]]:
    """A text file that takes the place of ``path`` when the body is done, and vanishes when it fails."""
    partial = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.tmp")
    try:
        with contextlib.ExitStack() as stack:
            plain = stack.enter_context(_made(partial, path))
            if path.endswith(".gz"):
                packed = stack.enter_context(gzip.GzipFile(os.path.basename(path)[:-3], "wb", _GZIP_LEVEL, plain))
                yield stack.enter_context(io.TextIOWrapper(packed, "ascii"))
            else:
                yield stack.enter_context(io.TextIOWrapper(plain, "ascii"))
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
