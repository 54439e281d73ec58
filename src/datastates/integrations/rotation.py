"""Deletes folders of old checkpoints for frameworks that would do so too early.

A framework that saves every so often and keeps the last N deletes the older folders as soon as its call to save has
returned. With lazy saves the younger checkpoint is not there yet at that moment: a crash would leave none. A `Rotation`
takes the wish and fulfils it when it is safe:

- what is in flight is neither counted nor deleted, nor what the framework protects;
- what is lost (its save failed, or its job died) is not counted, and deleted once a younger checkpoint is complete;
- the youngest complete one always stays, and its files are durable before an older one goes;
- what a further tier is still to get stays until that has it.

When rank 0 knows a checkpoint of this run to be complete, all ranks have settled those before it: they commit in
the order of the saves. So no rank's flusher works in a folder that is deleted here.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace

from datastates.deletions import Deletions, is_inside
from datastates.directories import fsync_directory
from datastates.errors import DataStatesError
from datastates.integrations.series import Series, is_complete
from datastates.removal import finish_removals, remove_folder
from datastates.saver import open_savers
from datastates.system_calls import fsync, patiently, storage_errors

logger = logging.getLogger(__name__)

EXIT_SECONDS = 600.0
"""So long the end of the interpreter waits for saves in flight, to delete what they replace."""


class Rotation:
    """Deletes on a thread of its own, which lives while saves are in flight. Thread safe."""

    def __init__(self) -> None:
        self._deletions = Deletions("datastates-rotation")
        self._lock = threading.Lock()  # protects the fields below
        self._asked: dict[str, Series] = {}
        self._saved: dict[str, int] = {}  # folders that this process has saved to, by order

    def note_saved(self, folder: str) -> None:
        """A checkpoint has been saved to this folder, or is in flight: it is younger than all others."""
        folder = os.path.realpath(folder)
        with self._lock:
            self._saved.pop(folder, None)
            self._saved[folder] = 1 + max(self._saved.values(), default=0)

    def has_saved(self, folder: str) -> bool:
        """Whether this process has saved a checkpoint to this folder, or tried to."""
        with self._lock:
            return os.path.realpath(folder) in self._saved

    def has_saved_in(self, folder: str) -> bool:
        """Whether this process has saved a checkpoint to a folder in this one, or tried to."""
        with self._lock:
            return any(os.path.dirname(saved) == os.path.realpath(folder) for saved in self._saved)

    def asked(self, folder: str) -> Series | None:
        """What was asked for last of a folder of checkpoints, None if this process never did."""
        with self._lock:
            return self._asked.get(os.path.realpath(folder))

    def ask(self, series: Series) -> None:
        """Delete what is too many: now where nothing is in flight, else as soon as a save has settled. Does not raise.

        A later wish for the same folder takes the place of an earlier one.
        """
        tiers = next((saver.tiers for saver in open_savers() if saver.tiers), ())
        series = replace(series, tiers=series.tiers or tiers)
        with self._lock:
            self._asked[series.folder] = series
        self._deletions.ask(_Excess(self, series))

    def finish(self, timeout: float | None = None) -> None:
        """Wait until the saves in flight have settled and all wishes are fulfilled.

        Raises:
            WaitTimeoutError: not within ``timeout`` seconds.
        """
        self._deletions.finish(timeout)

    def rotate(self, series: Series, busy: Collection[str]) -> None:
        """Delete what is too many among the checkpoints that have settled: all but the busy ones."""
        with self._lock:
            order = dict(self._saved)
        numbers = series.numbers()
        ranked = sorted(numbers, key=lambda path: (order.get(path, 0), numbers[path]))
        settled = [path for path in ranked if not any(is_inside(other, path) for other in busy)]
        complete = [path for path in settled if is_complete(path)]
        if numbers:
            finish_removals(series.folder)
        if not complete:
            return
        youngest = complete[-1]
        keep = {youngest, *(path for path in complete if path in series.protected)}
        for path in reversed(complete):
            if len(keep) < series.limit:
                keep.add(path)
        lost = [path for path in settled[: settled.index(youngest)] if path not in complete]
        excess = [path for path in (*lost, *complete) if path not in keep and path not in series.protected]
        doomed = [path for path in excess if not series.is_awaited(path)]
        if doomed:
            _make_durable(youngest)
        for path in doomed:
            logger.info("%s: deleted, %s is complete", path, youngest)
            remove_folder(path)


@dataclass(frozen=True)
class _Excess:
    """The checkpoints of a series that are too many; see `deletions.Deletion`."""

    rotation: Rotation
    series: Series

    @property
    def folder(self) -> str:
        return self.series.folder

    def delete(self, busy: Collection[str]) -> None:
        self.rotation.rotate(self.series, busy)


def set_aside(path: str) -> str:
    """Rename the folder of a checkpoint that was never completed, so that nobody takes it for one.

    Returns:
        Its new path: ``incomplete-`` and the old name.

    Raises:
        StorageError: it cannot be renamed.
    """
    parent, name = os.path.split(os.path.realpath(path))
    number = 1
    while True:
        target = os.path.join(parent, f"incomplete-{name}" + (f"-{number}" if number > 1 else ""))
        if not os.path.lexists(target):
            break
        number += 1
    with storage_errors("rename", path):
        patiently(os.rename, path, target)
        fsync_directory(parent)
    return target


def _make_durable(folder: str) -> None:
    """Make the framework's own small files beside ours durable, before an older checkpoint goes for this one."""
    with storage_errors("make durable", folder):
        with os.scandir(folder) as entries:
            paths = [entry.path for entry in entries if entry.is_file(follow_symlinks=False)]
        for path in paths:
            descriptor = patiently(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(folder)


def _finish_at_exit() -> None:
    try:
        ROTATION.finish(EXIT_SECONDS)
    except DataStatesError as error:
        logger.warning("old checkpoints stay, although younger ones may be complete: %s", error)


ROTATION = Rotation()
"""The one of this process."""

atexit.register(_finish_at_exit)
