"""The newest checkpoint of a folder that can be loaded."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from datastates import recovery
from datastates.catalog import CheckpointRecord, list_checkpoints
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, MismatchError, StorageError
from datastates.fqns import listed, near
from datastates.reader import MapLocation, load

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint and the files of it that were loaded.

    Attributes:
        path: its folder.
        tag: its tag, and the number in it, `step`.
        step: None where the tag has no number.
        files: what `reader.load` gave, by the names of the files in the folder.
        skipped: younger checkpoints, by tag, and why each was not taken.
    """

    path: str
    tag: str
    step: int | None
    files: dict[str, Any]
    skipped: dict[str, str]


def load_latest(
    directory: str | os.PathLike[str],
    names: str | Iterable[str] | None = None,
    map_location: MapLocation = None,
    *,
    missing_ok: bool = False,
    **options: Any,
) -> LoadedCheckpoint | None:
    """Load files of the newest complete checkpoint below a folder, by the time of its commit.

    One that is incomplete or turns out to be damaged is skipped for the next older one: that is logged as a warning,
    and stands in `LoadedCheckpoint.skipped`. A commit that a crash has cut is completed first.

    Args:
        directory: the folder of the checkpoints.
        names: of the files to load, as names relative to the checkpoint's folder or as patterns
            (``"mp_rank_00*"``); None: all.
        map_location: as for `reader.load`.
        missing_ok: give None where there is no complete checkpoint: a fresh start.
        options: as for `reader.load`.

    Raises:
        CheckpointNotFoundError: there is no complete checkpoint; says what there is. With ``missing_ok`` only where
            there are damaged ones: a fresh start would be a loss then.
        MismatchError: the newest complete checkpoint has no file of such a name.
        ForeignObjectError: as from `reader.load`.
        StorageError: the folder cannot be read.
    """
    skipped: dict[str, str] = {}
    is_damaged = False
    for found in _newest_first(os.fspath(directory), missing_ok):
        record, problem = _completed(found)
        if not problem:
            try:
                files = {
                    name: load(os.path.join(record.path, name), map_location, **options)
                    for name in _chosen(record, names)
                }
                return LoadedCheckpoint(record.path, record.tag, record.step, files, skipped)
            except (CorruptCheckpointError, StorageError, FileNotFoundError) as error:
                problem, is_damaged = str(error), True
        is_damaged |= record.is_committed
        skipped[record.tag] = problem
        logger.warning("checkpoint %s is not loaded: %s", record.path, problem)
    if missing_ok and not is_damaged:
        return None
    what = "; ".join(f"{tag}: {problem}" for tag, problem in skipped.items()) or "there are no checkpoints at all"
    raise CheckpointNotFoundError(f"{os.fspath(directory)} holds no complete checkpoint: {what}")


def _newest_first(directory: str, missing_ok: bool) -> Iterator[CheckpointRecord]:
    try:
        yield from reversed(list_checkpoints(directory))
    except CheckpointNotFoundError:
        if not missing_ok:
            raise


def _completed(record: CheckpointRecord) -> tuple[CheckpointRecord, str]:
    """The checkpoint after what a crash has cut is finished, and what is wrong with it."""
    if record.is_complete:
        return record, ""
    try:
        if recovery.committed_record(record.path) is None:
            return record, record.problem
        again = list_checkpoints(record.path)[0]
    except (CheckpointNotFoundError, CorruptCheckpointError, StorageError) as error:
        return record, str(error)
    return again, again.problem


def _chosen(record: CheckpointRecord, names: str | Iterable[str] | None) -> list[str]:
    known = sorted(record.file_nbytes)
    if names is None:
        return known
    chosen: list[str] = []
    for pattern in [names] if isinstance(names, str) else names:
        found = [name for name in known if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        if not found:
            hint = near(pattern, known) or f"; it has {listed(known)}"
            message = f"checkpoint {record.path} has no file {pattern!r}{hint}"
            raise MismatchError(message, (pattern,))
        chosen += [name for name in found if name not in chosen]
    return chosen
