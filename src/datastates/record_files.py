"""The files of records that a run leaves: read one record after the other, or as they grow.

The records are those of `datastates.events`. Their times become Unix times by the ``clock`` records of their file, so
that hosts can be put together as far as their clocks agree; where there is none they stay as they are. What is
no record is left out: a line that a crash has cut, or what another program has written.
"""

from __future__ import annotations

import heapq
import itertools
import json
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any

from datastates.errors import CheckpointNotFoundError
from datastates.events import PREFIX, Event

SUFFIX = ".jsonl"

EVENTS = "events"
"""Name of a folder of records that is looked for in a folder of checkpoints."""

CHUNK_BYTES = 4 << 20
"""A file that grows is read by so much at a time; no record is nearly so long."""

TAIL_BYTES, LEAST_TAIL_BYTES = 8 << 20, 64 << 10
"""Whoever looks at a running job reads so much of what was before, of all files together, but so much of each."""

_MAX_SECONDS, _MAX_COUNT = 1e12, 1 << 63  # what is beyond is no record of ours; nor are NaN and infinity

_NEEDED = frozenset({"event", "rank", "begin", "end"})
_TEXTS = frozenset({"event", "attempt", "path", "error", "host", "tag", "tier"})
_TIMES = frozenset({"begin", "end", "time"})
_COUNTS = frozenset({"rank", "pid", "index", "number", "nbytes", "host_cache_bytes"}) | frozenset(
    {"num_files", "num_in_flight", "num_slabs", "num_free_slabs"}
)
_CLOCK = b'{"event": "clock"'


def record_paths(path: str) -> list[str]:
    """The files of records that a path means; empty where there are none.

    A file means itself. A folder means those that `EventLog` has made in it, or else in its folder `EVENTS`: files of
    others are not touched, they may be large. Raises OSError for a folder that cannot be read.
    """
    if not os.path.isdir(path):
        return [path] if os.path.exists(path) else []
    return _paths_in(path) or _paths_in(os.path.join(path, EVENTS))


def _paths_in(folder: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(os.path.join(folder, name) for name in names if name.startswith(PREFIX) and name.endswith(SUFFIX))


def read_records(path: str) -> Iterator[Event]:
    """The records of what a path means, file by file, each in the order in which they were made.

    Holds one of them at a time, however many there are.

    Raises:
        CheckpointNotFoundError: there are none.
        OSError: a file cannot be read.
    """
    is_empty = True
    for record in itertools.chain.from_iterable(map(records_of, record_paths(path))):
        is_empty = False
        yield record
    if is_empty:
        raise no_records(path)


def no_records(path: str) -> CheckpointNotFoundError:
    """To be raised where a path means no records."""
    where = f"{PREFIX}*{SUFFIX}, here or in {EVENTS!r}"
    return CheckpointNotFoundError(f"{path}: no records of saves ({where}); they are written where events_dir is set")


def records_of(path: str) -> Iterator[Event]:
    """The records of one file, one after the other as they stand there. Raises OSError."""
    parser = _Parser()
    with open(path, "rb") as lines:
        for line in lines:
            if (record := parser.parse(line)) is not None:
                yield record


class GrowingFile:
    """One file of records that somebody writes to. Not thread safe.

    It need not be there yet, may vanish, be cut, or be replaced by another: then it is read from its begin.
    """

    def __init__(self, path: str, tail_bytes: int = TAIL_BYTES) -> None:
        """Args:
        path: the file.
        tail_bytes: so much of what is there at first is read.
        """
        self._path = path
        self._tail_bytes = tail_bytes
        self._parser = _Parser()
        self._identity: tuple[int, int] | None = None
        self._position = 0
        self._is_cut = False

    @property
    def is_cut(self) -> bool:
        """Whether what was there at first was not read from its begin."""
        return self._is_cut

    def read(self) -> list[Event]:
        """The records that have become complete since the last call.

        A last line without an end is left for a later call. Raises OSError; a file that is not there has no records.
        """
        try:
            file = open(self._path, "rb")  # noqa: SIM115 - closed below; only what fails to open is no file
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino
            if identity != self._identity or status.st_size < self._position:
                self._identity, self._parser = identity, _Parser()
                self._position = self._skip(file.fileno(), status.st_size)
            file.seek(self._position)
            found = []
            while self._position < status.st_size and (chunk := file.read(CHUNK_BYTES)):
                whole = chunk.rfind(b"\n") + 1
                if not whole and len(chunk) < CHUNK_BYTES:
                    break
                whole = whole or len(chunk)  # too long for a record: passed over
                self._position += whole
                file.seek(self._position)
                records = map(self._parser.parse, chunk[:whole].splitlines())
                found += [record for record in records if record is not None]
            return found

    def _skip(self, descriptor: int, size: int) -> int:
        """Where to begin; notes the clock of what is passed over."""
        begin = size - self._tail_bytes
        self._is_cut = begin > 0
        if begin <= 0:
            return 0
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as memory:
            found = memory.rfind(_CLOCK, 0, begin)
            if found >= 0:
                memory.seek(found)
                self._parser.parse(memory.readline())
        return begin


class GrowingFolder:
    """The files of records that a path means; also those that come later. Not thread safe."""

    def __init__(self, path: str) -> None:
        """Args:
        path: as `record_paths` takes it; it need not be there yet.
        """
        self._path = path
        self._files: dict[str, GrowingFile] = {}

    @property
    def is_cut(self) -> bool:
        """Whether of some file what was there at first was not read from its begin."""
        return any(file.is_cut for file in self._files.values())

    def read(self) -> Iterable[Event]:
        """The records that have become complete since the last call: of each file in their order, all about by time.

        Raises OSError; a folder that is not there has no records.
        """
        paths = record_paths(self._path)
        for path in paths:
            if path not in self._files:
                self._files[path] = GrowingFile(path, max(TAIL_BYTES // len(paths), LEAST_TAIL_BYTES))
        return heapq.merge(*(self._files[path].read() for path in paths), key=lambda record: float(record["end"]))


class _Parser:
    """Makes records of lines of one file, in their order."""

    def __init__(self) -> None:
        self._offset = 0.0  # from the clock of the records to Unix time

    def parse(self, line: bytes) -> Event | None:
        try:
            record = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or not record.keys() >= _NEEDED or not all(map(_is_sound, *_columns(record))):
            return None
        if record["begin"] > record["end"]:
            return None
        if record["event"] == "clock" and "time" in record:
            self._offset = record["time"] - record["begin"]
        record["begin"] += self._offset
        record["end"] += self._offset
        return record


def _columns(record: Event) -> tuple[list[str], list[Any]]:
    return list(record), list(record.values())


def _is_sound(name: str, value: Any) -> bool:
    """Whether a field is what readers of records take it for."""
    if name in _TEXTS:
        return isinstance(value, str)
    if name in _COUNTS:
        return type(value) is int and 0 <= value < _MAX_COUNT
    if name in _TIMES:
        return type(value) in (int, float) and abs(value) < _MAX_SECONDS
    if name.endswith(("_seconds", "_per_second")):
        return value is None or (type(value) in (int, float) and 0 <= value < _MAX_COUNT)
    return True
