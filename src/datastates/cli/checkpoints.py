"""Which checkpoint a path on the command line means."""

from __future__ import annotations

import os

from datastates.attempt_folder import has_attempts
from datastates.catalog import CheckpointRecord, list_checkpoints
from datastates.errors import CheckpointNotFoundError
from datastates.fqns import listed
from datastates.manifest import read_latest
from datastates.system_calls import storage_errors

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def checkpoints_below(directory: str) -> list[CheckpointRecord]:
    """The checkpoints in a folder, the oldest first; one folder deeper where it has none itself (Hugging Face's).

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be read.
    """
    found = list_checkpoints(directory)
    if found:
        return found
    folders = sorted(entry.path for entry in os.scandir(directory) if entry.is_dir())
    deeper = [record for folder in folders for record in list_checkpoints(folder)]
    return sorted(deeper, key=lambda record: record.created_at)


def nothing_in(directory: str) -> str:
    """What to say of a folder that holds no checkpoint: the way on, where it holds single files or folders that do.

    Raises:
        StorageError: it cannot be read.
    """
    message = f"{directory} holds no checkpoint of datastates"
    with storage_errors("list", directory):
        files = sorted(name for name in os.listdir(directory) if name.endswith(_SUFFIXES))
    if files:
        return f"{message}, but single files: name one of them, {listed(files)}"
    deeper = [os.path.relpath(record.path, directory) for record in checkpoints_below(directory)]
    return f"{message} itself; below it are {listed(deeper)}" if deeper else message


def find_checkpoint(path: str) -> CheckpointRecord:
    """The checkpoint that a folder is, or that its ``latest`` names, or that alone lies in it.

    Raises:
        CheckpointNotFoundError: there is none, or several that might be meant.
        StorageError: the folder cannot be read.
    """
    found = list_checkpoints(path)
    if has_attempts(path):
        return found[0]
    latest = read_latest(path)
    named = [record for record in found if record.is_latest]
    if len(named or found) == 1:
        return (named or found)[0]
    if not found and latest is None:
        raise CheckpointNotFoundError(nothing_in(path))
    if latest is not None:
        raise CheckpointNotFoundError(f"{path}: its latest names {latest!r}, of which there is no checkpoint here")
    names = ", ".join(os.path.basename(record.path) for record in found)
    raise CheckpointNotFoundError(f"{path} holds several checkpoints, name one of them: {names}")
