"""The directory that checkpoints are saved in, as the others are filled from it: what is committed there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from datastates.attempt_folder import MAX_DEPTH
from datastates.errors import CorruptCheckpointError
from datastates.manifest import METADATA_NAME, CommitRecord, read_commit, read_latest
from datastates.pins import is_pinned
from datastates.retention import step_of
from datastates.system_calls import patiently, storage_errors


@dataclass(frozen=True, slots=True)
class Placed:
    """A committed checkpoint of a tier.

    Attributes:
        name: its folder relative to the tier's root, parts joined by ``/``.
        record: its commit record.
    """

    name: str
    record: CommitRecord

    @property
    def attempt(self) -> str:
        return self.record.attempt

    @property
    def tag(self) -> str:
        return self.record.tag

    @property
    def step(self) -> int | None:
        return step_of(self.record.tag)

    @property
    def created_at(self) -> float:
        return self.record.committed_at

    @property
    def nbytes(self) -> int:
        return self.record.nbytes


def committed_below(root: str) -> list[Placed]:
    """The committed checkpoints in a directory and the folders in it, three deep. Links are not followed.

    One with a damaged record is left out.

    Raises:
        StorageError: a folder or a record cannot be read.
    """
    with storage_errors("list", root):
        return [
            Placed(os.path.relpath(path, root), record)
            for path in checkpoint_folders(root)
            if (record := _record(path)) is not None
        ]


def name_below(root: str, directory: str) -> str | None:
    """The name of a checkpoint's folder in a tier; None where `committed_below` does not find it, were it there.

    That is outside of the root, more than three folders deep, or in a hidden folder.
    """
    name = os.path.relpath(os.path.realpath(directory), os.path.realpath(root))
    parts = name.split(os.sep)
    return None if len(parts) > MAX_DEPTH or any(part.startswith(".") for part in parts) else name


def latest_tags(root: str, folders: set[str]) -> dict[str, str | None]:
    """What ``latest`` names in each of these folders below a root. Raises StorageError."""
    return {folder: read_latest(os.path.join(root, folder) if folder else root) for folder in folders}


def pinned_names(root: str, checkpoints: Iterable[Placed]) -> set[str]:
    """Names of those that are pinned in the directory."""
    return {one.name for one in checkpoints if is_pinned(os.path.join(root, one.name))}


def is_current(directory: str, attempt: str) -> bool:
    """Whether a checkpoint's folder still holds what this attempt has committed. Raises StorageError."""
    record = _record(directory)
    return record is not None and record.attempt == attempt


def _record(path: str) -> CommitRecord | None:
    """The record of a whole checkpoint: what is one node's part is none that could be carried by itself."""
    try:
        record = read_commit(path)
    except CorruptCheckpointError:
        return None
    return record if record is not None and record.node is None else None


def checkpoint_folders(root: str, depth: int = MAX_DEPTH) -> Iterator[str]:
    """The folders of checkpoints, committed or not, below a directory; links are not followed."""
    try:
        with patiently(os.scandir, root) as entries:
            folders = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in folders:
        if os.path.basename(path).startswith("."):
            continue  # ours, or being removed
        if os.path.isdir(os.path.join(path, METADATA_NAME)):
            yield path
        elif depth > 1:
            yield from checkpoint_folders(path, depth - 1)
