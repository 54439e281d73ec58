"""The record that makes a checkpoint complete.

Inside a checkpoint directory ``D``::

    D/<files>                                  the checkpoint's files, under their final names
    D/.datastates/<attempt>/rank-00000.json    the `Manifest` of one rank: written when its files are durable
    D/.datastates/<attempt>/commit.json        the `CommitRecord`, staged: rank 0 has decided to commit
    D/.datastates/<attempt>/aborted.json       rank 0 has decided not to, or a rank will never complete its part
    D/.datastates/<attempt>/unfinished.json    rank 0 has decided to, but storage does not let it finish
    D/.datastates/<attempt>/lock               shared lock of each flusher that takes part
    D/.datastates/commit.json                  the `CommitRecord`: the checkpoint is complete, or one node's part of it
    D/.datastates/whole.json                   where it is a node's part: all nodes have theirs (`whole_records`)
    D/.datastates/pinned                       it is neither deleted nor replaced

Files keep their partial names until every rank's manifest is there, so saving again under an existing name
does not touch the older checkpoint before the new one is durable as a whole. Then rank 0 decides: the record
is staged, an older record withdrawn, the files renamed, and the staged record moved to its place. Whoever
finds a staged record whose owners are gone can finish that work (`datastates.recovery`).

Completeness is judged by content alone, so a copy of ``D`` is as complete as ``D``. Nothing is promised about
files in ``D`` that no manifest names.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from datastates.checksum import crc32
from datastates.errors import CorruptCheckpointError
from datastates.node_parts import NodePart
from datastates.partial_names import is_attempt
from datastates.storage import write_atomically
from datastates.system_calls import patiently, storage_errors

METADATA_NAME = ".datastates"
COMMIT_NAME = "commit.json"
ABORTED_NAME = "aborted.json"
UNFINISHED_NAME = "unfinished.json"
RANK_NAME = re.compile(r"rank-(\d+)\.json")
LOCK_NAME = "lock"
PINNED_NAME = "pinned"
LATEST_NAME = "latest"
FORMAT = "datastates-manifest"
VERSION = 1
PART_VERSION = 2
"""Of records with a node's part. A release that knows of none must not take them for a whole."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One durable file.

    Attributes:
        name: relative to the checkpoint directory, parts joined by ``/``; for a lone file its absolute path.
        nbytes: size of the file.
        slab_nbytes: the file's bytes are hashed in pieces of this size, the last one may be shorter.
        crc32: one CRC-32 per piece.
    """

    name: str
    nbytes: int
    slab_nbytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank's part is missing."""

    message: str
    errno: int | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One rank's part of a checkpoint: its files, or why there are none.

    Attributes:
        world_size: number of ranks that take part, on all nodes.
        written_at: Unix time; for people, and to choose between two complete attempts of a crashed job.
        node: the node whose part this rank's is in, None where all nodes share the directory.
    """

    attempt: str
    rank: int
    world_size: int
    tag: str
    files: tuple[FileRecord, ...]
    written_at: float
    failed: Failure | None = None
    node: NodePart | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose manifests make a commit together."""
        return _ranks_of(self.world_size, self.node)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def to_bytes(self) -> bytes:
        files = [asdict(file) | {"crc32": [f"{value:08x}" for value in file.crc32]} for file in self.files]
        fields = asdict(self) | {"files": files}
        del fields["node"]
        return _to_json(_header(self.node) | fields)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Manifest:
        """Parse a manifest.

        Raises:
            CorruptCheckpointError: it is none, of an unknown version, or names a file outside its directory.
        """
        fields = _from_json(data, path)
        try:
            failed = fields["failed"]
            return cls(
                str(fields["attempt"]),
                int(fields["rank"]),
                int(fields["world_size"]),
                str(fields["tag"]),
                tuple(_file_record(entry) for entry in fields["files"]),
                float(fields["written_at"]),
                None if failed is None else Failure(**failed),
                _node_in(fields),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{path}: not a manifest: {error!r}", path) from error


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """All ranks' parts are there, or those of all ranks of a node.

    Attributes:
        world_size: number of ranks, on all nodes.
        committed_at: Unix time.
        manifest_crc32: CRC-32 of the manifest of each of `ranks`.
        file_nbytes: size of every file of every rank by name, so that whoever loads a file need not read all manifests.
        node: the node whose part this is, None for a whole checkpoint.
    """

    attempt: str
    tag: str
    world_size: int
    committed_at: float
    manifest_crc32: tuple[int, ...]
    file_nbytes: Mapping[str, int]
    node: NodePart | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose files these are: where it is a node's part, those on the node."""
        return _ranks_of(self.world_size, self.node)

    @property
    def nbytes(self) -> int:
        return sum(self.file_nbytes.values())

    @property
    def num_files(self) -> int:
        return len(self.file_nbytes)

    def to_bytes(self) -> bytes:
        fields = {
            "attempt": self.attempt,
            "tag": self.tag,
            "world_size": self.world_size,
            "committed_at": self.committed_at,
            "manifest_crc32": [f"{value:08x}" for value in self.manifest_crc32],
            "file_nbytes": dict(self.file_nbytes),
        }
        return _to_json(_header(self.node) | fields)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> CommitRecord:
        """Parse a commit record. Raises CorruptCheckpointError."""
        fields = _from_json(data, path)
        try:
            record = cls(
                str(fields["attempt"]),
                str(fields["tag"]),
                int(fields["world_size"]),
                float(fields["committed_at"]),
                tuple(int(value, 16) for value in fields["manifest_crc32"]),
                {str(name): int(nbytes) for name, nbytes in fields["file_nbytes"].items()},
                _node_in(fields),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{path}: not a commit record: {error!r}", path) from error
        if len(record.ranks) != len(record.manifest_crc32) or not is_attempt(record.attempt):
            raise CorruptCheckpointError(f"{path}: {len(record.ranks)} ranks do not fit its manifests", path)
        return record


def attempt_directory(directory: str, attempt: str) -> str:
    return os.path.join(directory, METADATA_NAME, attempt)


def commit_path(directory: str) -> str:
    return os.path.join(directory, METADATA_NAME, COMMIT_NAME)


def manifest_path(directory: str, attempt: str, rank: int) -> str:
    return os.path.join(attempt_directory(directory, attempt), f"rank-{rank:05d}.json")


def read_bytes(path: str) -> bytes | None:
    """The bytes of a small file, None when there is none (or another host has just replaced it).

    Raises:
        StorageError: it cannot be read for another reason.
    """
    with storage_errors("read", path):
        try:
            with patiently(open, path, "rb") as file:
                return patiently(file.read)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return None
            raise


def read_latest(directory: str) -> str | None:
    """The tag that the ``latest`` file of a folder of checkpoints names, None where there is none."""
    data = read_bytes(os.path.join(directory, LATEST_NAME))
    return None if data is None else os.fsdecode(data).strip()


def read_commit(directory: str) -> CommitRecord | None:
    """The commit record of a checkpoint directory, None when it is not committed.

    Raises:
        CorruptCheckpointError: there is something else in its place.
    """
    path = commit_path(directory)
    data = read_bytes(path)
    return None if data is None else CommitRecord.from_bytes(data, path)


def read_manifest(directory: str, attempt: str, rank: int) -> tuple[Manifest, int] | None:
    """A rank's manifest and the CRC-32 of its bytes, None while there is none. Raises CorruptCheckpointError."""
    path = manifest_path(directory, attempt, rank)
    data = read_bytes(path)
    return None if data is None else (Manifest.from_bytes(data, path), crc32(data))


def write_manifest(directory: str, manifest: Manifest) -> None:
    """Write a rank's manifest durably. Raises StorageError."""
    write_atomically(manifest_path(directory, manifest.attempt, manifest.rank), manifest.to_bytes())


def write_causes(directory: str, attempt: str, name: str, ranks: Mapping[int, str], writer: int = 0) -> None:
    """Record that there will be no commit (`ABORTED_NAME`), or that rank 0 could not finish it (`UNFINISHED_NAME`).

    Args:
        directory: the checkpoint's folder.
        attempt: that is given up.
        name: of the record.
        ranks: why, by rank.
        writer: the rank that writes. Several may do so at the same time: one of their records stays, as a whole.

    Raises:
        StorageError: it cannot be written.
    """
    causes = {str(rank): cause for rank, cause in ranks.items()}
    data = _to_json({"format": FORMAT, "version": VERSION, "ranks": causes})
    write_atomically(os.path.join(attempt_directory(directory, attempt), name), data, f".{writer}")


def read_causes(directory: str, attempt: str, name: str) -> dict[int, str] | None:
    """The cause by rank in a record of `write_causes`, None where there is none. Raises CorruptCheckpointError."""
    path = os.path.join(attempt_directory(directory, attempt), name)
    data = read_bytes(path)
    if data is None:
        return None
    try:
        return {int(rank): str(cause) for rank, cause in _from_json(data, path)["ranks"].items()}
    except (KeyError, AttributeError, ValueError) as error:
        raise CorruptCheckpointError(f"{path}: not a record of causes: {error!r}", path) from error


def committed_files(directory: str) -> dict[str, FileRecord]:
    """The files of a committed checkpoint by name; empty when it is not committed.

    Raises:
        CorruptCheckpointError: a manifest is missing, damaged, or not the one that was committed.
    """
    record = read_commit(directory)
    if record is None:
        return {}
    return {file.name: file for manifest in committed_manifests(directory, record) for file in manifest.files}


def committed_manifests(directory: str, record: CommitRecord, first: Iterable[int] = ()) -> Iterator[Manifest]:
    """The manifests of a committed checkpoint, by rank, some of them before the others.

    Raises:
        CorruptCheckpointError: as `committed_files` does.
    """
    committed = dict(zip(record.ranks, record.manifest_crc32, strict=True))
    before = [rank for rank in first if rank in committed]
    for rank in dict.fromkeys([*before, *committed]):
        expected = committed[rank]
        path = manifest_path(directory, record.attempt, rank)
        found = read_manifest(directory, record.attempt, rank)
        if found is None:
            raise CorruptCheckpointError(f"{path}: the manifest of rank {rank} is missing", path)
        manifest, value = found
        if value != expected:
            raise CorruptCheckpointError(f"{path}: CRC-32 {value:08x}, committed with {expected:08x}", path)
        yield manifest


def _file_record(entry: dict[str, Any]) -> FileRecord:
    name, nbytes, slab_nbytes = str(entry["name"]), int(entry["nbytes"]), int(entry["slab_nbytes"])
    values = tuple(int(value, 16) for value in entry["crc32"])
    if not name or os.path.isabs(name) or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} is no name inside the checkpoint")
    if nbytes < 0 or slab_nbytes <= 0 or len(values) != -(-nbytes // slab_nbytes):
        raise ValueError(f"{name!r}: {len(values)} checksums do not cover {nbytes} bytes in pieces of {slab_nbytes}")
    return FileRecord(name, nbytes, slab_nbytes, values)


def _ranks_of(world_size: int, node: NodePart | None) -> tuple[int, ...]:
    return tuple(range(world_size)) if node is None else node.ranks


def _header(node: NodePart | None) -> dict[str, Any]:
    if node is None:
        return {"format": FORMAT, "version": VERSION}
    return {"format": FORMAT, "version": PART_VERSION, "node": node.to_fields()}


def _node_in(fields: Mapping[str, Any]) -> NodePart | None:
    node = NodePart.from_fields(fields["node"]) if fields["version"] == PART_VERSION else None
    if node is not None and node.world_size != int(fields["world_size"]):
        raise ValueError(f"{fields['world_size']} ranks, the nodes have {node.world_size}")
    return node


def _to_json(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1) + "\n").encode("ascii")


def _from_json(data: bytes, path: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: not JSON: {error}", path) from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CorruptCheckpointError(f"{path}: not a record of datastates", path)
    if fields.get("version") not in (VERSION, PART_VERSION):
        message = (
            f"{path}: version {fields.get('version')!r} of the record, this release reads version {VERSION}, and"
            f" {PART_VERSION} of a node's part"
        )
        raise CorruptCheckpointError(message, path)
    return fields
