"""The record that a node's part belongs to a checkpoint of which all nodes have their parts.

A node commits its own part in a directory that no other node sees: its `CommitRecord` says whose part it is, and does
not know what became of the others. Once these are committed, too, ``whole.json`` is written beside it, on every node.
Where a crash comes between, the nodes find out together when they start again (`datastates.nodes.agreement`).
"""

from __future__ import annotations

import contextlib
import json
import os

from datastates.directories import fsync_directory
from datastates.errors import CorruptCheckpointError
from datastates.manifest import FORMAT, METADATA_NAME, PART_VERSION, CommitRecord, read_bytes, read_commit
from datastates.storage import write_atomically
from datastates.system_calls import patiently, storage_errors

WHOLE_NAME = "whole.json"


def is_whole(directory: str, record: CommitRecord) -> bool:
    """Whether a committed checkpoint is whole, as far as this node knows.

    Args:
        directory: the checkpoint's folder.
        record: of its commit, in that folder.

    Raises:
        StorageError: the record cannot be read.
    """
    if record.node is None:
        return True
    data = read_bytes(_whole_path(directory))
    try:
        return data is not None and json.loads(data)["attempt"] == record.attempt
    except (KeyError, TypeError, ValueError):
        return False  # damaged: the nodes find out again


def is_whole_part(directory: str) -> bool:
    """Whether a folder holds a node's part of a checkpoint that is whole. Raises StorageError."""
    try:
        record = read_commit(directory)
    except CorruptCheckpointError:
        return False
    return record is not None and record.node is not None and is_whole(directory, record)


def doubt(directory: str, record: CommitRecord) -> str:
    """Why nothing must be loaded from a committed checkpoint yet; empty where it is whole. Raises StorageError."""
    if is_whole(directory, record):
        return ""
    return f"{record.node}: whether the other nodes have theirs is not known here; loading on all of them finds out"


def mark_whole(directory: str, attempt: str) -> None:
    """Record durably that all nodes have committed their parts of an attempt. Raises StorageError."""
    fields = {"format": FORMAT, "version": PART_VERSION, "attempt": attempt}
    write_atomically(_whole_path(directory), (json.dumps(fields, indent=1) + "\n").encode("ascii"))


def unmark_whole(directory: str) -> None:
    """Take back what `mark_whole` has said: a node has lost its part. Idempotent. Raises StorageError."""
    with storage_errors("remove", _whole_path(directory)), contextlib.suppress(FileNotFoundError):
        patiently(os.unlink, _whole_path(directory))
        fsync_directory(os.path.join(directory, METADATA_NAME))


def _whole_path(directory: str) -> str:
    return os.path.join(directory, METADATA_NAME, WHOLE_NAME)
