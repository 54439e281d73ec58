"""The folder in which the ranks meet: what one tells the others of an attempt there, and hears from them.

There are no messages between flushers.
"""

from __future__ import annotations

import os
import time

from datastates.attempt_folder import AttemptLock, is_decided
from datastates.directories import make_names_durable
from datastates.errors import CorruptCheckpointError, StorageError
from datastates.flusher.incoming import Attempt
from datastates.flusher.protocol import Commit
from datastates.manifest import (
    ABORTED_NAME,
    CommitRecord,
    Failure,
    Manifest,
    manifest_path,
    read_commit,
    read_manifest,
    write_causes,
    write_manifest,
)
from datastates.partial_names import partial_path
from datastates.system_calls import storage_errors


class MeetingPoint:
    """One rank's access to the records of attempts. Reads and writes storage."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size

    def record(self, attempt: Attempt) -> CommitRecord | None:
        """The record of the attempt if it is committed; a damaged one counts as none: the next commit replaces it."""
        try:
            record = read_commit(attempt.directory)
        except CorruptCheckpointError:
            return None
        return record if record is not None and record.attempt == attempt.name else None

    def has_promised(self, attempt: Attempt) -> bool:
        """Whether this rank's manifest is there, perhaps by an earlier flusher. Raises CorruptCheckpointError."""
        own = read_manifest(attempt.directory, attempt.name, self._rank)
        return own is not None and own[0].failed is None

    def promise(self, attempt: Attempt, tag: str) -> None:
        """Write this rank's manifest, once its files are durable.

        One that is there stays: rank 0 may have committed with the checksum of those very bytes, and written again,
        with another time, it would not be the one that was committed.
        """
        if self.has_promised(attempt):
            return
        files = tuple(file.record(os.path.relpath(file.path, attempt.directory)) for file in attempt.files)
        manifest = Manifest(attempt.name, self._rank, self._world_size, tag, files, time.time())
        partials = [partial_path(file.path, attempt.name) for file in attempt.files]
        with storage_errors("make durable", attempt.directory):
            make_names_durable(partials, attempt.directory)
        write_manifest(attempt.directory, manifest)

    def is_removed(self, attempt: Attempt) -> bool:
        """Whether the records of an attempt are gone that this rank has promised its part to: somebody deleted them."""
        return not os.path.lexists(manifest_path(attempt.directory, attempt.name, self._rank))

    def is_bound(self, attempt: Attempt) -> bool:
        """Whether this rank's files must stay: promised to rank 0, or part of a commit that rank 0 has decided."""
        if not isinstance(attempt.request, Commit):
            return False
        try:
            return is_decided(attempt.directory, attempt.name) if self._rank == 0 else self.has_promised(attempt)
        except StorageError:
            return True  # it may be
        except CorruptCheckpointError:
            return False

    def collect(self, attempt: Attempt) -> dict[int, str]:
        """Read the manifests that have come into the attempt; returns the cause by rank of those that failed."""
        causes = {}
        for rank in range(self._world_size):
            if rank in attempt.manifests:
                continue
            found = read_manifest(attempt.directory, attempt.name, rank)
            if found is None:
                continue
            if found[0].failed is not None:
                causes[rank] = found[0].failed.message
            elif found[0].world_size != self._world_size:
                causes[rank] = f"its world size is {found[0].world_size}, that of rank 0 is {self._world_size}"
            else:
                attempt.manifests[rank] = found
        return causes

    def decline(self, attempt: Attempt, failure: Failure, causes: dict[int, str]) -> None:
        """Tell the other ranks that this one gives the attempt up, unless it has promised its part or decided."""
        attempt.lock = attempt.lock or AttemptLock(attempt.directory, attempt.name)
        is_promised = self.has_promised(attempt)
        if is_promised and (self._rank != 0 or is_decided(attempt.directory, attempt.name)):
            return  # an earlier flusher of this rank promised its part, or even committed
        if not is_promised:
            manifest = Manifest(attempt.name, self._rank, self._world_size, "", (), time.time(), failure)
            write_manifest(attempt.directory, manifest)
        if self._rank == 0:
            write_causes(attempt.directory, attempt.name, ABORTED_NAME, causes)
