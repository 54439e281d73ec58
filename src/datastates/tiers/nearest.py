"""Brings what is to be loaded to the first tier, where that does not have it whole: from the nearest tier that does."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from datastates.integrity import check
from datastates.manifest import LATEST_NAME, METADATA_NAME, read_commit, read_latest
from datastates.recovery import committed_record
from datastates.storage import write_atomically
from datastates.tier_settings import TierSettings
from datastates.tiers.fetching import fetch, placed_in
from datastates.tiers.first_tier import Placed, committed_below, name_below

logger = logging.getLogger(__name__)

FETCH_SECONDS = 6 * 3600.0
"""So long the other ranks wait for the one that fetches: 20 TB at 1 GB/s."""


def fetch_newest(tiers: Sequence[TierSettings], directory: str) -> str | None:
    """Bring what was committed last, over all further tiers, to a folder of the first one that has nothing younger.

    What cannot be brought is logged, and the next older one is tried, as long as it is younger than what is there.

    Args:
        tiers: the first one is a directory.
        directory: a folder of checkpoints in it, or the first tier itself.

    Returns:
        The folder of what was brought, None where nothing was.
    """
    root = os.path.realpath(tiers[0].path)
    relative = os.path.relpath(os.path.realpath(directory), root)
    folder = "" if relative == os.curdir else relative
    here = [one.created_at for one in committed_below(root) if os.path.dirname(one.name) == folder]
    candidates: list[tuple[float, int, TierSettings, Placed]] = []
    for distance, tier in enumerate(tiers[1:]):
        try:
            candidates += [(-one.created_at, distance, tier, one) for one in placed_in(tier, folder)]
        except StorageError as error:
            logger.warning("tier %s cannot be read: %s", tier.path, error)
    for _, _, tier, placed in sorted(candidates, key=lambda entry: entry[:2]):
        if placed.created_at <= max(here, default=0.0):
            return None
        path = os.path.join(root, placed.name)
        try:
            fetch(tier, placed.name, path)
        except (CheckpointNotFoundError, CorruptCheckpointError, StorageError) as error:
            logger.warning("%s is not fetched from %s: %s", placed.name, tier.path, error)
            continue
        logger.info("%s was fetched from %s", path, tier.path)
        return path
    return None


def fetch_named(tiers: Sequence[TierSettings], directory: str) -> bool:
    """Bring one checkpoint to its folder in the first tier, unless it is there with all its files.

    A commit that a crash has cut there is completed first. A folder in which another program has saved, and one that
    lies outside of the first tier, are left alone.

    Args:
        tiers: the first one is a directory.
        directory: the checkpoint's folder.

    Returns:
        Whether it was brought.

    Raises:
        CheckpointNotFoundError: it is whole neither there nor in any further tier; says why not, tier by tier.
    """
    name = name_below(tiers[0].path, directory)
    if name is None or _is_foreign(directory):
        return False
    problem = _problem(directory)
    if not problem:
        return False
    found = [f"{tiers[0].path}: {problem}"]
    for tier in tiers[1:]:
        try:
            fetch(tier, name, directory)
        except (CheckpointNotFoundError, CorruptCheckpointError, StorageError) as error:
            found.append(str(error) if tier.path in str(error) else f"{tier.path}: {error}")
            continue
        logger.info("%s was fetched from %s: %s", directory, tier.path, problem)
        return True
    raise CheckpointNotFoundError(f"{directory} is whole in no tier: {'; '.join(found)}")


def fetch_latest(tiers: Sequence[TierSettings], directory: str) -> str | None:
    """`fetch_newest`, for who reads ``latest``: it names what was brought then, and what it names is whole.

    Args:
        tiers: the first one is a directory.
        directory: a folder of checkpoints; outside of the first tier nothing is done.

    Returns:
        The tag that ``latest`` names now, None where there is none.

    Raises:
        CheckpointNotFoundError: what it names is whole in no tier.
        StorageError: the first tier fails.
    """
    if not _holds(tiers[0].path, directory):
        return read_latest(directory)
    brought = fetch_newest(tiers, directory)
    if brought is not None:
        record = read_commit(brought)
        tag = os.path.basename(brought) if record is None else record.tag
        write_atomically(os.path.join(directory, LATEST_NAME), os.fsencode(tag))
    named = read_latest(directory)
    if named is not None:
        fetch_named(tiers, os.path.join(directory, named))
    return named


def _holds(root: str, directory: str) -> bool:
    root, directory = os.path.realpath(root), os.path.realpath(directory)
    return directory == root or directory.startswith(root.rstrip(os.sep) + os.sep)


def _is_foreign(directory: str) -> bool:
    """Whether there is something in a folder, and nothing of it is ours."""
    return os.path.isdir(directory) and bool(os.listdir(directory)) and not _has_records(directory)


def _has_records(directory: str) -> bool:
    return os.path.isdir(os.path.join(directory, METADATA_NAME)) or any(
        name.endswith(".datastates.partial") for name in os.listdir(directory)
    )


def _problem(directory: str) -> str:
    """Why a checkpoint's folder is not whole, empty where it is."""
    try:
        if committed_record(directory) is None:
            return "not committed" if os.path.isdir(directory) else "not there"
        return "; ".join(problem.message for problem in check(directory)[:3])
    except (CorruptCheckpointError, StorageError) as error:
        return str(error)
