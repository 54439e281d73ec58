"""The checkpoints of a folder, one per step: which there are, in the order in which they were saved."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from datastates import recovery
from datastates.attempt_folder import has_attempts
from datastates.catalog import list_checkpoints
from datastates.checkpoints.summary import Summary, read_summary
from datastates.directories import make_directories
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from datastates.manifest import LATEST_NAME, commit_path, read_commit, read_latest
from datastates.node_parts import NodePart
from datastates.pins import is_pinned
from datastates.storage import write_atomically
from datastates.system_calls import patiently, storage_errors
from datastates.whole_records import is_whole

logger = logging.getLogger(__name__)

_TAG = re.compile(r"step(0|[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        tag: the folder's name.
        created_at: Unix time of the commit.
        nbytes: of all files.
        summary: what it says of itself.
        part: of which node it is the part, None for all of a checkpoint.
    """

    path: str
    tag: str
    created_at: float
    nbytes: int
    summary: Summary
    part: NodePart | None = None

    @property
    def step(self) -> int:
        return self.summary.step

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose files are in the folder."""
        return tuple(range(self.summary.world_size)) if self.part is None else self.part.ranks

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.summary.metrics

    @property
    def is_pinned(self) -> bool:
        """Looked up anew each time: another process may pin it."""
        return is_pinned(self.path)


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A folder with the name of a step from which nothing can be loaded.

    Attributes:
        tag: its name.
        problem: what is missing or damaged.
    """

    tag: str
    problem: str


def tag_of(step: int) -> str:
    """The name of the folder of a step, which is what ``latest`` names."""
    return f"step{step}"


class StepFolder:
    """The folder that holds one checkpoint per step. Thread safe.

    Names of any other form are somebody else's: neither looked at nor touched. So are folders that hold no summary.
    """

    def __init__(self, directory: str) -> None:
        """Args:
        directory: absolute, without links; need not be there yet.
        """
        self.directory = directory
        self._lock = threading.RLock()  # protects _known; a signal handler may save, too
        self._known: dict[str, tuple[tuple[int, ...], StepRecord]] = {}

    def open(self) -> int:
        """Make the folder, and bring it out of a crash. Only one process does so at a time.

        Returns:
            The highest serial that any checkpoint in it has, complete or not; 0 where there is none.

        Raises:
            StorageError: the folder cannot be made or read. What only cannot be cleaned up is logged.
        """
        with storage_errors("make", self.directory):
            make_directories(self.directory)
        try:
            changed = recovery.clean_leftovers(self.directory)
            newest = self.records()[-1:]
            if newest and newest[0].path in changed:  # its commit was cut, `latest` was not moved
                write_atomically(os.path.join(self.directory, LATEST_NAME), os.fsencode(newest[0].tag))
        except (CorruptCheckpointError, StorageError) as error:
            logger.warning("%s: what an earlier run has left could not be cleaned up: %s", self.directory, error)
        return self._last_serial()

    def path(self, step: int) -> str:
        return os.path.join(self.directory, tag_of(step))

    def records(self, *, anew: bool = True) -> list[StepRecord]:
        """The complete checkpoints, the one saved first before the others. Those behind a link are among them.

        Args:
            anew: look at the files of all of them. False: what was found complete once is believed to be so as long as
                its commit record is the same file.

        Raises:
            StorageError: the folder cannot be read.
        """
        found = {path: entry for path in self._paths() if (entry := self._look(path, anew)) is not None}
        with self._lock:
            self._known = found
        return in_order([record for _, record in found.values()])

    def survey(self) -> tuple[list[StepRecord], list[Incomplete]]:
        """The complete checkpoints, looked at anew, and what is wrong with the others.

        Completes first what a crash has cut, and waits while a process that has outlived its trainer still does that.

        Raises:
            StorageError: the folder cannot be read.
        """
        complete, incomplete = [], []
        for path in self._paths():
            record, problem = _examined(path)
            if record is not None:
                complete.append(record)
            elif problem:
                incomplete.append(Incomplete(os.path.basename(path), problem))
        return in_order(complete), incomplete

    def find(self, step: int) -> StepRecord:
        """The complete checkpoint of a step.

        Raises:
            CheckpointNotFoundError: there is none; says which there are.
        """
        path = self.path(step)
        record, problem = _examined(path) if os.path.isdir(path) else (None, "")
        if record is None:
            there = ", ".join(str(one.step) for one in self.records()) or "none"
            reason = f": {problem}" if problem else ""
            raise CheckpointNotFoundError(
                f"{self.directory} has no complete checkpoint of step {step}{reason}; complete steps: {there}"
            )
        return record

    def best(self, metric: str, *, is_larger_better: bool) -> int | None:
        """The step with the best value of a metric, the younger of two that are equal; None where none has one."""
        sign = 1 if is_larger_better else -1
        known = [
            (sign * record.metrics[metric], position, record.step)
            for position, record in enumerate(self.records())
            if not math.isnan(record.metrics.get(metric, math.nan))
        ]
        return max(known)[2] if known else None

    def forsaken(self) -> list[str]:
        """Folders that hold a node's part of a checkpoint that is not whole, and older than one that is."""
        records = self.records(anew=False)
        youngest = records[-1].summary.serial if records else 0
        return [path for path in self._paths() if _serial_of_doubtful(path) in range(1, youngest)]

    def latest_serial(self, *, besides: int | None) -> int:
        """The serial of the checkpoint that ``latest`` names, 0 where there is none that could be compared with.

        Args:
            besides: a step whose serial the caller knows: its files are not looked at.
        """
        with contextlib.suppress(CorruptCheckpointError, StorageError):  # the save itself says if nothing works here
            tag = read_latest(self.directory)
            if tag is not None and _TAG.fullmatch(tag) and (besides is None or tag != tag_of(besides)):
                summary = read_summary(os.path.join(self.directory, tag))
                return 0 if summary is None else summary.serial
        return 0

    def linked(self) -> set[str]:
        """Paths, without links, that links in the folder lead to."""
        with self._entries() as entries:
            return {os.path.realpath(entry.path) for entry in entries if entry.is_symlink()}

    def _last_serial(self) -> int:
        serials = [0]
        for path in self._paths():
            with contextlib.suppress(CorruptCheckpointError):  # it has none that anybody could compare with
                summary = read_summary(path)
                serials += [summary.serial] if summary is not None else []
        return max(serials)

    def _paths(self) -> list[str]:
        with self._entries() as entries:
            # a link to itself is no folder, and no reason to refuse the others
            return sorted(entry.path for entry in entries if _TAG.fullmatch(entry.name) and os.path.isdir(entry.path))

    @contextlib.contextmanager
    def _entries(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        with storage_errors("list", self.directory):
            try:
                entries = patiently(os.scandir, self.directory)
            except FileNotFoundError:
                yield iter(())
                return
            with entries:
                yield entries

    def _look(self, path: str, anew: bool) -> tuple[tuple[int, ...], StepRecord] | None:
        """A complete checkpoint and what its commit record was known by; None where it is not complete."""
        try:
            status = os.stat(commit_path(path))
        except OSError:
            return None
        key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        with self._lock:
            known = None if anew else self._known.get(path)
        if known is not None and known[0] == key:
            return known
        record, _ = _described(path)
        return None if record is None else (key, record)


def _serial_of_doubtful(path: str) -> int:
    """The serial of a node's part of a checkpoint that is not known to be whole; 0 where it is none."""
    with contextlib.suppress(CorruptCheckpointError):  # nobody knows what it is
        record = read_commit(path)
        if record is not None and record.node is not None and not is_whole(path, record):
            summary = read_summary(path)
            return 0 if summary is None else summary.serial
    return 0


def in_order(records: Iterable[StepRecord]) -> list[StepRecord]:
    """The one that was saved first before the others."""
    return sorted(records, key=lambda one: (one.summary.serial, one.created_at, one.step))


def _examined(path: str) -> tuple[StepRecord | None, str]:
    """The checkpoint of a folder after what a crash has cut is finished, and what is wrong with it."""
    try:
        if has_attempts(path) and read_commit(path) is None:
            recovery.committed_record(path)
    except (CorruptCheckpointError, StorageError) as error:
        return None, str(error)
    return _described(path)


def _described(path: str) -> tuple[StepRecord | None, str]:
    """The complete checkpoint of a folder, or what is wrong with it; empty where it is none of ours."""
    try:
        if not has_attempts(path):
            return None, ""
        found = list_checkpoints(path)[0]
        if not found.is_complete:
            return None, found.problem
        summary = read_summary(path)
    except CheckpointNotFoundError:
        return None, ""  # removed meanwhile
    except (CorruptCheckpointError, StorageError) as error:
        return None, str(error)
    tag = os.path.basename(path)
    if summary is None:
        return None, ""
    if tag_of(summary.step) != tag:
        return None, f"it holds step {summary.step}: it was renamed"
    return StepRecord(path, tag, found.created_at, found.nbytes, summary, found.part), ""
