"""What a tier can do with checkpoints; `FolderStore` and `ObjectStore` do it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import posixpath
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

from datastates.checksum import crc32
from datastates.errors import ConfigError, CorruptCheckpointError
from datastates.manifest import COMMIT_NAME, METADATA_NAME, CommitRecord, FileRecord, Manifest
from datastates.tier_settings import TierSettings
from datastates.tiers.first_tier import Placed
from datastates.tiers.folder_store import FolderStore

OBJECT_STORE_EXTRA = "datastates[object-store]"


class Store(Protocol):
    """One tier. Names of checkpoints are relative to its root, those of files to the checkpoint.

    A method blocks until what it did is durable there. Not thread safe. All raise StorageError.
    """

    @property
    def url(self) -> str:
        """The root, for people: it holds no secret."""

    def begin(self, name: str, attempt: str) -> None:
        """Make sure that nobody pairs an older checkpoint of that name with new files. Rank 0, before any file."""

    def clean(self, name: str, files: Sequence[FileRecord]) -> None:
        """Remove what interrupted uploads of these files have left. Whoever sends them, before it does."""

    def clean_forgotten(self, names: Sequence[str]) -> None:
        """Remove what dead processes have left of checkpoints other than these."""

    def has_part(self, name: str, attempt: str, rank: int, manifest: Manifest, data: bytes) -> bool:
        """Whether all files of a rank and its manifest, which is these bytes, are there already."""

    def has(self, name: str, attempt: str, file: FileRecord, receipt: str | None) -> bool:
        """Whether a file is there already, as `send` has given the receipt for."""

    def send(self, name: str, attempt: str, file: FileRecord, pieces: Iterable[memoryview]) -> str:
        """Put a file there; what the pieces raise passes through, and nothing of the file is left then."""

    def send_manifest(self, name: str, attempt: str, rank: int, data: bytes) -> None:
        """Say that the files of a rank of the checkpoint are there."""

    def manifest(self, name: str, attempt: str, rank: int) -> bytes | None:
        """The manifest of a rank, None while it is not there."""

    def commit(self, name: str, record: CommitRecord, manifests: Sequence[tuple[Manifest, int]]) -> None:
        """All manifests are there: make the checkpoint complete. Rank 0. May be repeated."""

    def release(self, name: str, attempt: str) -> None:
        """The carrying of an attempt has ended, one way or the other: let go of what is held for it."""

    def discard(self, name: str, record: CommitRecord, kept: Iterable[str]) -> None:
        """Remove what was sent of an attempt that will not be committed, all ranks' part. Rank 0.

        Does nothing where a checkpoint of that name is committed, of whatever attempt.

        Args:
            name: of the checkpoint.
            record: that it was to be committed with.
            kept: files that belong to another attempt of that name by now.
        """

    def latest(self, folder: str) -> str | None:
        """What ``latest`` in a folder of checkpoints names."""

    def set_latest(self, folder: str, tag: str) -> None:
        """Let ``latest`` name a committed checkpoint."""

    def committed(self, folder: str | None) -> list[Placed]:
        """The committed checkpoints in a folder of them; None: in all. Those with a damaged record are left out."""

    def pinned(self, names: Iterable[str]) -> set[str]:
        """Which of these committed checkpoints are pinned in the tier."""

    def set_pin(self, name: str, *, wanted: bool) -> None:
        """Pin a checkpoint in the tier, or take its pin away; idempotent."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint: its record first. What a crash leaves of it goes by `clean_forgotten`."""

    def read(self, name: str, file: str) -> bytes | None:
        """All of a small file of a checkpoint; None where it is not there."""

    def read_piece(self, name: str, file: str, begin: int, end: int) -> memoryview:
        """A part of a file. Several threads may call it at once."""


def open_store(tier: TierSettings, warn: Callable[[str], None]) -> Store:
    """The store of a tier; does not connect.

    Args:
        tier: which.
        warn: told, once, of what goes wrong there without harm to a checkpoint.

    Raises:
        ConfigError: it is an object store, and the library for them is not installed, or its environment is wrong.
    """
    if not tier.is_object_store:
        return FolderStore(tier.path)
    try:  # not at the top of this module: the library is needed here alone
        module = importlib.import_module("datastates.tiers.object_store")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("obstore"):
            raise
        raise ConfigError(_missing_library(tier)) from error
    return cast(Store, module.ObjectStore(tier.path, warn))


def check_installed(tiers: Iterable[TierSettings]) -> None:
    """Raise ConfigError where a tier needs a library that is not installed. Imports nothing."""
    for tier in tiers:
        if tier.is_object_store and importlib.util.find_spec("obstore") is None:
            raise ConfigError(_missing_library(tier))


def _missing_library(tier: TierSettings) -> str:
    return f"tier {tier.path} needs the package obstore: pip install '{OBJECT_STORE_EXTRA}'"


def manifest_name(attempt: str, rank: int) -> str:
    return f"{METADATA_NAME}/{attempt}/rank-{rank:05d}.json"


def record_in(store: Store, name: str) -> CommitRecord | None:
    """The commit record of a checkpoint in a tier, None where it is not committed there.

    Raises:
        CorruptCheckpointError: there is something else in its place.
        StorageError: it cannot be read.
    """
    data = store.read(name, f"{METADATA_NAME}/{COMMIT_NAME}")
    return None if data is None else CommitRecord.from_bytes(data, posixpath.join(store.url, name))


def manifests_in(store: Store, name: str, record: CommitRecord) -> list[tuple[Manifest, bytes]]:
    """The manifests of a committed checkpoint in a tier, by rank, each with its bytes.

    Raises:
        CorruptCheckpointError: one is missing, damaged, or not the one that was committed.
        StorageError: one cannot be read.
    """
    found = []
    for rank, expected in enumerate(record.manifest_crc32):
        path = os.path.join(store.url, name, manifest_name(record.attempt, rank))
        data = store.manifest(name, record.attempt, rank)
        if data is None:
            raise CorruptCheckpointError(f"{path}: the manifest of rank {rank} is missing", path)
        if crc32(data) != expected:
            raise CorruptCheckpointError(f"{path}: CRC-32 {crc32(data):08x}, committed with {expected:08x}", path)
        found.append((Manifest.from_bytes(data, path), data))
    return found
