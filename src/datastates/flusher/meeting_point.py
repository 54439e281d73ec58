"""The folder in which the ranks meet: what one tells the others of an attempt there, and hears from them.

There are no messages between flushers.
"""

from __future__ import annotations

import errno
import os
import time

from datastates.attempt_folder import AttemptLock, is_decided
from datastates.commit_times import CommitTimes
from datastates.directories import make_names_durable
from datastates.errors import CorruptCheckpointError, StorageError
from datastates.flusher.incoming import Attempt
from datastates.flusher.protocol import Commit
from datastates.manifest import (
    ABORTED_NAME,
    CommitRecord,
    Failure,
    Manifest,
    attempt_directory,
    manifest_path,
    read_commit,
    read_manifest,
    write_causes,
    write_manifest,
)
from datastates.node_parts import NodePart
from datastates.partial_names import partial_path
from datastates.system_calls import patiently, storage_errors


class MeetingPoint:
    """One rank's access to the records of attempts. Reads and writes storage."""

    def __init__(self, rank: int, world_size: int, node: NodePart | None = None) -> None:
        """Args:
        rank: this one.
        world_size: number of ranks, on all nodes.
        node: the one whose ranks meet here; None: all do.
        """
        self._rank = rank
        self._world_size = world_size
        self._node = node
        self._times = CommitTimes()
        self.ranks = tuple(range(world_size)) if node is None else node.ranks
        """Those that meet here. The first of them decides."""

    @property
    def is_first(self) -> bool:
        """Whether this rank decides."""
        return self._rank == self.ranks[0]

    def record(self, attempt: Attempt) -> CommitRecord | None:
        """The record of the attempt if it is committed; a damaged one counts as none: the next commit replaces it.

        Raises:
            StorageError: another node has committed its part to this very folder.
        """
        try:
            record = read_commit(attempt.directory)
        except CorruptCheckpointError:
            return None
        if record is None or record.attempt != attempt.name:
            return None
        if record.node != self._node:
            message = (
                f"{attempt.directory} is not seen by this node alone, it holds the {record.node}: set"
                " shared_directory to true"
            )
            raise StorageError(message, path=attempt.directory)
        return record

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
        at = self._times.next(attempt.directory) if self.is_first else time.time()
        manifest = Manifest(attempt.name, self._rank, self._world_size, tag, files, at, None, self._node)
        partials = [partial_path(file.path, attempt.name) for file in attempt.files]
        with storage_errors("make durable", attempt.directory):
            make_names_durable(partials, attempt.directory)
        write_manifest(attempt.directory, manifest)

    def is_removed(self, attempt: Attempt) -> bool:
        """Whether the records of an attempt are gone that this rank has promised its part to: somebody deleted them.

        Raises:
            StorageError: it cannot be told.
        """
        path = manifest_path(attempt.directory, attempt.name, self._rank)
        try:
            with storage_errors("look at", path):
                patiently(os.lstat, path)
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return True
            raise
        return False

    def is_bound(self, attempt: Attempt) -> bool:
        """Whether this rank's files must stay: promised to rank 0, or part of a commit that rank 0 has decided."""
        if not isinstance(attempt.request, Commit):
            return False
        try:
            return is_decided(attempt.directory, attempt.name) if self.is_first else self.has_promised(attempt)
        except StorageError:
            return True  # it may be
        except CorruptCheckpointError:
            return False

    def collect(self, attempt: Attempt) -> dict[int, str]:
        """Read the manifests that have come into the attempt; returns the cause by rank of those that failed."""
        causes = {}
        for rank in self.ranks:
            if rank in attempt.manifests:
                continue
            found = read_manifest(attempt.directory, attempt.name, rank)
            if found is None:
                continue
            if found[0].failed is not None:
                causes[rank] = found[0].failed.message
            elif found[0].world_size != self._world_size:
                theirs, ours = found[0].world_size, self._world_size
                causes[rank] = f"its world size is {theirs}, that of rank {self.ranks[0]} is {ours}"
            else:
                attempt.manifests[rank] = found
        return causes

    def decline(self, attempt: Attempt, failure: Failure, causes: dict[int, str]) -> None:
        """Tell the other ranks that this one gives the attempt up, unless it has promised its part or decided.

        It is given up for all then: what this rank has not promised, and never will, cannot be committed. So any rank
        puts that on record, and nobody waits for the first one, which may not even have come yet.
        """
        attempt.lock = attempt.lock or AttemptLock(attempt.directory, attempt.name)
        is_promised = self.has_promised(attempt)
        if is_promised and (not self.is_first or is_decided(attempt.directory, attempt.name)):
            return  # an earlier flusher of this rank promised its part, or even committed
        if not is_promised:
            manifest = Manifest(attempt.name, self._rank, self._world_size, "", (), time.time(), failure, self._node)
            write_manifest(attempt.directory, manifest)
        if self.is_first or not self._is_aborted(attempt):
            write_causes(attempt.directory, attempt.name, ABORTED_NAME, causes, self._rank)

    def _is_aborted(self, attempt: Attempt) -> bool:
        return os.path.lexists(os.path.join(attempt_directory(attempt.directory, attempt.name), ABORTED_NAME))
