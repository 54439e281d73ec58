"""The newest checkpoint of a folder that can be loaded."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from datastates import recovery
from datastates.catalog import CheckpointRecord, list_checkpoints
from datastates.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, MismatchError, StorageError
from datastates.fqns import listed, near
from datastates.reader import MapLocation, load
from datastates.tier_settings import TierLike, TierSettings, is_url, read_tiers
from datastates.tiers.fetching import fetch, placed_in
from datastates.tiers.first_tier import Placed

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
    directory: str | os.PathLike[str] | Sequence[TierLike],
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
        directory: the folder of the checkpoints; or several tiers, the nearest first, of which the first is a folder:
            then the newest of all of them is loaded, from the nearest that has it whole. What is in an object store
            is brought to the first tier before, compared with its checksums (`tiers.fetching.fetch`).
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
        StorageError: the folder cannot be read. Of several tiers one that cannot be read is skipped.
        ConfigError: a tier cannot be one.
    """
    skipped: dict[str, str] = {}
    tried: set[str] = set()
    is_damaged = False
    for candidate in _newest_first(directory, missing_ok, skipped):
        record, problem = candidate.bring(distrusted=tried)
        tried.add(record.path)
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
        skipped[record.tag] = f"{skipped[record.tag]}; {problem}" if record.tag in skipped else problem
        logger.warning("checkpoint %s is not loaded: %s", record.path, problem)
    if missing_ok and not is_damaged:
        return None
    what = "; ".join(f"{tag}: {problem}" for tag, problem in skipped.items()) or "there are no checkpoints at all"
    where = os.fspath(directory) if isinstance(directory, (str, os.PathLike)) else "no tier"
    raise CheckpointNotFoundError(f"{where} holds no complete checkpoint: {what}")


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A checkpoint that may be loaded: a folder, or one of a tier that has to be brought to a folder first."""

    record: CheckpointRecord
    tier: TierSettings | None = None
    name: str = ""

    def bring(self, distrusted: set[str]) -> tuple[CheckpointRecord, str]:
        """The checkpoint in its folder, and what is wrong with it.

        Args:
            distrusted: folders of which the content could not be loaded.
        """
        if self.tier is None:
            return _completed(self.record)
        path = self.record.path
        try:
            fetch(self.tier, self.name, path, again=path in distrusted)
            record = list_checkpoints(path)[0]
        except (CheckpointNotFoundError, CorruptCheckpointError, StorageError) as error:
            return self.record, f"not fetched from {self.tier.path}: {error}"
        return record, record.problem


def _newest_first(
    directory: str | os.PathLike[str] | Sequence[TierLike], missing_ok: bool, skipped: dict[str, str]
) -> list[_Candidate]:
    """What may be loaded, the newest first, and of the same age the nearest. Unreadable tiers go to skipped."""
    if isinstance(directory, (str, os.PathLike)):
        if is_url(os.fspath(directory)):
            message = f"{os.fspath(directory)} is loaded by way of a folder: name both, load_latest([folder, URL])"
            raise ConfigError(message)
        return [_Candidate(record) for record in reversed(_listed(os.fspath(directory), missing_ok))]
    tiers = read_tiers(directory)
    found: list[tuple[float, int, _Candidate]] = []
    for distance, tier in enumerate(tiers):
        try:
            if tier.is_object_store:
                here = [_Candidate(_expected(tiers[0].path, one), tier, one.name) for one in placed_in(tier)]
            else:
                here = [_Candidate(record) for record in _listed(tier.path, missing_ok=True)]
        except StorageError as error:
            logger.warning("tier %s cannot be read: %s", tier.path, error)
            skipped[tier.path] = str(error)
            continue
        found += [(-one.record.created_at, distance, one) for one in here]
    return [candidate for _, _, candidate in sorted(found, key=lambda entry: entry[:2])]


def _listed(directory: str, missing_ok: bool) -> list[CheckpointRecord]:
    try:
        return list_checkpoints(directory)
    except CheckpointNotFoundError:
        if not missing_ok:
            raise
        return []


def _expected(root: str, placed: Placed) -> CheckpointRecord:
    """What a checkpoint of a tier will be once it is fetched."""
    record = placed.record
    return CheckpointRecord(
        os.path.join(root, placed.name),
        placed.tag,
        placed.step,
        placed.nbytes,
        placed.created_at,
        record.world_size,
        record.file_nbytes,
        True,
    )


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
