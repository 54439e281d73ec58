"""The second phase of a commit: the files of a complete attempt become the checkpoint.

It may be cut anywhere and done again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from datastates.attempt_folder import attempts
from datastates.directories import fsync_directory, make_names_durable
from datastates.errors import CorruptCheckpointError, StorageError
from datastates.manifest import (
    COMMIT_NAME,
    METADATA_NAME,
    RANK_NAME,
    CommitRecord,
    Manifest,
    attempt_directory,
    commit_path,
    read_manifest,
)
from datastates.partial_names import partial_path
from datastates.storage import size_of, write_atomically
from datastates.system_calls import patiently, storage_errors


def roll_forward(
    directory: str, manifests: Sequence[tuple[Manifest, int]], tag: str, committed_at: float | None = None
) -> CommitRecord:
    """Give the files of a complete attempt their final names and commit them; may be repeated after a crash.

    An older checkpoint in the directory stops being one when the first file is renamed, so its record is
    withdrawn before. The new record is written (and its space taken) before that. Files of the older one that the new
    one does not have are removed: a tool that looks for files by pattern must not find those of two saves.

    Args:
        directory: the checkpoint directory.
        manifests: of all ranks, or of all on a node, by rank, each with the CRC-32 of its bytes; all complete and of
            one attempt.
        tag: goes into the record.
        committed_at: Unix time of the commit that this one repeats elsewhere; None: now, or the time in the first
            manifest where the clock was set back since.

    Raises:
        StorageError: a call failed; the attempt can be rolled forward later.
    """
    attempt = manifests[0][0].attempt
    folder = attempt_directory(directory, attempt)
    files = [file for manifest, _ in manifests for file in manifest.files]
    if committed_at is None:
        committed_at = max(time.time(), manifests[0][0].written_at)
    record = _record_of(manifests, tag, committed_at)
    staged = os.path.join(folder, COMMIT_NAME)
    with storage_errors("make durable", folder):
        make_names_durable([folder])
    write_atomically(staged, record.to_bytes())
    with storage_errors("commit", directory):
        _withdraw(directory, attempt)
        folders = {directory}
        for file in files:
            path = os.path.join(directory, file.name)
            _rename(partial_path(path, attempt), path, file.nbytes)
            folders.add(os.path.dirname(path))
        for name in _replaced_files(directory, attempt) - record.file_nbytes.keys():
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                patiently(os.unlink, path)
                folders.add(os.path.dirname(path))
        for name in sorted(folders):
            fsync_directory(name)
        patiently(os.replace, staged, commit_path(directory))
        fsync_directory(os.path.join(directory, METADATA_NAME))
    return record


def _replaced_files(directory: str, attempt: str) -> set[str]:
    """Names of the files of all other attempts in the directory, as far as their manifests are there and whole."""
    names: set[str] = set()
    for other in attempts(directory):
        if other == attempt:
            continue
        for entry in patiently(os.listdir, attempt_directory(directory, other)):
            rank = RANK_NAME.fullmatch(entry)
            if rank is None:
                continue
            with contextlib.suppress(CorruptCheckpointError):  # a damaged record names nothing
                found = read_manifest(directory, other, int(rank[1]))
                names |= {file.name for file in found[0].files} if found is not None else set()
    return names


def _record_of(manifests: Sequence[tuple[Manifest, int]], tag: str, committed_at: float) -> CommitRecord:
    return CommitRecord(
        manifests[0][0].attempt,
        tag,
        manifests[0][0].world_size,
        committed_at,
        tuple(value for _, value in manifests),
        {file.name: file.nbytes for manifest, _ in manifests for file in manifest.files},
        manifests[0][0].node,
    )


def _withdraw(directory: str, attempt: str) -> None:
    """Take back every record but that of the attempt, so that no reader pairs old and new files.

    A record that went from an attempt's folder to its place may be in both after a power loss, until its first
    folder is durable, too: that is made sure of here.
    """
    stale = [
        os.path.join(attempt_directory(directory, other), COMMIT_NAME)
        for other in attempts(directory)
        if other != attempt
    ]
    for path in [*stale, commit_path(directory)]:
        with contextlib.suppress(FileNotFoundError):
            patiently(os.unlink, path)
        with contextlib.suppress(FileNotFoundError):  # the folder is gone: its owner has just cleaned up
            fsync_directory(os.path.dirname(path))


def _rename(source: str, path: str, nbytes: int) -> None:
    try:
        patiently(os.replace, source, path)
    except FileNotFoundError as error:
        if size_of(path) != nbytes:
            message = f"{path}: neither it nor its partial file has {nbytes} bytes"
            raise StorageError(message, error.errno, path) from error
