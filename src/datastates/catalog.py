"""The checkpoints of a folder: which there are, and which of them are complete."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from datastates.attempt_folder import attempts, has_attempts
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from datastates.integrity import check
from datastates.manifest import (
    ABORTED_NAME,
    RANK_NAME,
    Manifest,
    attempt_directory,
    read_causes,
    read_commit,
    read_latest,
    read_manifest,
)
from datastates.node_parts import NodePart
from datastates.retention import step_of
from datastates.system_calls import patiently, storage_errors
from datastates.tier_settings import TierSettings, is_url
from datastates.tiers.store import open_store
from datastates.whole_records import doubt

_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A checkpoint as its records describe it.

    Attributes:
        path: its folder.
        tag: what ``latest`` would say.
        step: the last number in the tag, None where it has none.
        nbytes: of all files, as far as they are known.
        created_at: Unix time of the commit; of the youngest sign of life where there is none.
        world_size: number of ranks, None where no rank has left a record.
        file_nbytes: sizes of the files by name, as far as they are known.
        is_committed: all ranks' parts were there once; of a node's part: those of the ranks on the node.
        problem: why it is not complete, or what is missing or damaged; empty when names and sizes are right.
        is_latest: ``latest`` names it.
        part: of which node it is the part, None for all of a checkpoint.
    """

    path: str
    tag: str
    step: int | None
    nbytes: int
    created_at: float
    world_size: int | None
    file_nbytes: Mapping[str, int] = field(default_factory=dict)
    is_committed: bool = False
    problem: str = ""
    is_latest: bool = False
    part: NodePart | None = None

    @property
    def is_complete(self) -> bool:
        return not self.problem


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointRecord]:
    """The checkpoints of this package directly below a folder, the oldest first; the folder itself if it is one.

    Of the URL of a place in an object store (``s3://bucket/prefix``): those that are committed there, as their records
    say; the credentials are taken from the environment.

    Reads records and sizes only, changes nothing, and takes what another process is just saving for incomplete. What
    another process removes meanwhile is left out.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be read.
        ConfigError: it is a URL that cannot be, or the library for object stores is missing.
    """
    if is_url(os.fspath(directory)):
        return _in_store(TierSettings(os.fspath(directory)))
    directory = os.path.abspath(os.fspath(directory))
    if has_attempts(directory):
        record = _described(directory, read_latest(os.path.dirname(directory)))
        if record is None:
            raise CheckpointNotFoundError(f"{directory} was removed while it was looked at")
        return [record]
    try:
        with storage_errors("list", directory):
            names = sorted(patiently(os.listdir, directory))
    except OSError as error:
        if not os.path.isdir(directory):
            raise CheckpointNotFoundError(f"there is no folder {directory}") from error
        raise
    latest = read_latest(directory)
    folders = [folder for name in names if has_attempts(folder := os.path.join(directory, name))]
    found = [record for folder in folders if (record := _described(folder, latest)) is not None]
    return sorted(found, key=lambda one: (one.created_at, one.step or -1))


def _in_store(tier: TierSettings) -> list[CheckpointRecord]:
    store = open_store(tier, lambda _: None)
    latest = store.latest("")
    found = [
        CheckpointRecord(
            f"{tier.path}/{one.name}",
            one.tag,
            one.step,
            one.nbytes,
            one.created_at,
            one.record.world_size,
            one.record.file_nbytes,
            True,
            "",
            latest in (one.tag, one.name),
        )
        for one in store.committed("")
    ]
    return sorted(found, key=lambda one: (one.created_at, one.step or -1))


def _described(directory: str, latest: str | None) -> CheckpointRecord | None:
    """What is known of a checkpoint; None where it was removed meanwhile."""
    try:
        with storage_errors("look at", directory):
            record = _describe(directory, latest)
    except StorageError:
        if os.path.lexists(directory):
            raise
        return None
    return record if record.is_complete or os.path.lexists(directory) else None


def _describe(directory: str, latest: str | None) -> CheckpointRecord:
    name = os.path.basename(directory)
    try:
        record = read_commit(directory)
    except CorruptCheckpointError as error:
        return _incomplete(directory, latest, str(error))
    if record is None:
        return _incomplete(directory, latest, "")
    problems = check(directory)
    more = f" and {len(problems) - 1} more problems" if len(problems) > 1 else ""
    return CheckpointRecord(
        directory,
        record.tag or name,
        step_of(record.tag or name),
        record.nbytes,
        record.committed_at,
        record.world_size,
        record.file_nbytes,
        True,
        f"{problems[0].message}: {problems[0].path}{more}" if problems else doubt(directory, record),
        latest in (record.tag, name),
        record.node,
    )


def _incomplete(directory: str, latest: str | None, problem: str) -> CheckpointRecord:
    """What is known of a checkpoint that was never committed: its youngest attempt."""
    found = [(attempt, *_manifests(directory, attempt)) for attempt in attempts(directory)]
    attempt, manifests, damaged = max(
        found, key=lambda item: max((one.written_at for one in item[1]), default=0.0), default=("", [], "")
    )
    name = os.path.basename(directory)
    tag = manifests[0].tag if manifests and manifests[0].tag else name
    files = {file.name: file.nbytes for manifest in manifests for file in manifest.files}
    written_at = max((manifest.written_at for manifest in manifests), default=os.stat(directory).st_mtime)
    return CheckpointRecord(
        directory,
        tag,
        step_of(tag),
        sum(files.values()),
        written_at,
        manifests[0].world_size if manifests else None,
        files,
        False,
        problem or damaged or _missing(directory, attempt, manifests),
        latest in (tag, name),
    )


def _manifests(directory: str, attempt: str) -> tuple[list[Manifest], str]:
    """The manifests of an attempt that are there, by rank, and what is wrong with one of the others."""
    manifests: list[Manifest] = []
    damaged = ""
    found = map(RANK_NAME.fullmatch, os.listdir(attempt_directory(directory, attempt)))
    for rank in sorted(int(match[1]) for match in found if match is not None):
        try:
            entry = read_manifest(directory, attempt, rank)
        except CorruptCheckpointError as error:
            damaged = str(error)
            continue
        if entry is not None:
            manifests.append(entry[0])
    return manifests, damaged


def _missing(directory: str, attempt: str, manifests: list[Manifest]) -> str:
    """Why an attempt is not complete."""
    causes: dict[int, str] = {}
    if attempt:
        try:
            causes = read_causes(directory, attempt, ABORTED_NAME) or {}
        except CorruptCheckpointError as error:
            return str(error)
    causes.update({one.rank: one.failed.message for one in manifests if one.failed is not None})
    if causes:
        rank, cause = min(causes.items())
        return f"given up: rank {rank}: {cause}"
    if not manifests:
        return "not committed: no rank has finished its part"
    there = {one.rank for one in manifests}
    expected = manifests[0].ranks
    missing = [rank for rank in expected if rank not in there]
    if not missing:
        return "not committed: all ranks have finished, the commit was cut or is under way; loading completes it"
    shown = ", ".join(map(str, missing[:_RANKS_SHOWN])) + (", …" if len(missing) > _RANKS_SHOWN else "")
    node = "" if manifests[0].node is None else f" on {manifests[0].node.described(manifests[0].node.index)}"
    return f"not committed: of {len(expected)} ranks{node} the parts of {len(missing)} are missing: {shown}"
