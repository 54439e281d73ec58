"""Files and attempts in flight, as the flusher sees them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum

from datastates.attempt_folder import AttemptLock
from datastates.config import DIRECT_IO_BYTES
from datastates.errors import ProtocolError, StorageError
from datastates.flusher.hasher import ImageHasher
from datastates.flusher.protocol import Acknowledged, Commit, FlushSlab, OpenFile, Publish, SealTable
from datastates.manifest import FileRecord, Manifest
from datastates.plan import Seal
from datastates.storage import PartialFile


class FileState(Enum):
    """Where a file is on its way."""

    RECEIVING = "receiving"
    DURABLE = "durable"
    PUBLISHED = "published"
    FAILED = "failed"


ENDED = (FileState.DURABLE, FileState.PUBLISHED, FileState.FAILED)
"""States in which the flusher has written all of a file that it ever will."""


class IncomingFile:
    """One file on its way from the host cache to storage.

    The main thread adds tables and slabs, the hasher thread owns `hasher`, the writers own `partial`; what they
    share is protected by `lock`.
    """

    def __init__(self, message: OpenFile) -> None:
        """Raises ProtocolError when the slabs are not whole blocks: their paddings would overlap."""
        if not message.slab_bytes or message.slab_bytes % DIRECT_IO_BYTES:
            raise ProtocolError(f"{message.path}: slabs of {message.slab_bytes} bytes, not whole blocks")
        self.id = message.file
        self.attempt = message.attempt
        self.path = message.path
        self.nbytes = message.nbytes
        self.slab_bytes = message.slab_bytes
        self.num_slabs = -(-message.nbytes // message.slab_bytes)
        self.check_free = message.check_free
        self.was_durable = message.is_durable
        self.acknowledged: dict[int, int] = {}
        self.state = FileState.RECEIVING
        self.error: StorageError | None = None
        self.partial: PartialFile | None = None
        self.hasher: ImageHasher | None = None
        self.opened = threading.Event()
        self.lock = threading.Lock()  # protects state, error, crcs, num_written, is_finishing, num_users, is_reported
        self.crcs: list[int] = [0] * self.num_slabs
        self.num_written = message.num_acknowledged
        self.is_finishing = False
        self.num_users = 0
        self.is_reported = False
        self._seals: list[Seal] = []
        self._num_seals = message.num_seals
        self._num_acknowledged = message.num_acknowledged
        self._next_slab = 0
        self._num_received = message.num_acknowledged

    @property
    def is_described(self) -> bool:
        """Whether all tables are here."""
        return len(self._seals) == self._num_seals and len(self.acknowledged) == self._num_acknowledged

    @property
    def is_received(self) -> bool:
        """Whether all slabs are here."""
        return self.is_described and self._num_received == self.num_slabs

    def describe(self, message: SealTable | Acknowledged) -> None:
        """Take a part of a table. Raises ProtocolError when it has more rows than announced."""
        if self.is_described:
            raise ProtocolError(f"{self.path}: a {type(message).__name__} that was not announced")
        if isinstance(message, SealTable):
            self._seals.extend(message.seals)
        else:
            self.acknowledged.update(message.slabs)
            if any(index >= self.num_slabs for index in self.acknowledged):
                raise ProtocolError(f"{self.path}: an acknowledged slab beyond the {self.num_slabs} of the file")
            for index, value in message.slabs:
                self.crcs[index] = value

    def start(self) -> None:
        """All tables are here. Raises ProtocolError when a seal cannot be filled in."""
        try:
            self.hasher = ImageHasher(self._seals)
        except ValueError as error:
            raise ProtocolError(f"{self.path}: {error}") from error
        self._skip_acknowledged()

    def expect(self, slab: FlushSlab) -> None:
        """Check that a slab is the next of the file. Raises ProtocolError."""
        expected = min(self.slab_bytes, self.nbytes - slab.index * self.slab_bytes)
        if not self.is_described or slab.index != self._next_slab or slab.nbytes != expected:
            raise ProtocolError(f"{self.path}: slab {slab.index} of {slab.nbytes} bytes, expected {self._next_slab}")
        self._next_slab += 1
        self._num_received += 1
        self._skip_acknowledged()

    def record(self, name: str) -> FileRecord:
        return FileRecord(name, self.nbytes, self.slab_bytes, tuple(self.crcs))

    def _skip_acknowledged(self) -> None:
        while self._next_slab in self.acknowledged:
            self._next_slab += 1


@dataclass
class Attempt:
    """What the trainer has asked for under one attempt id.

    Attributes:
        request: None until the trainer has said that there are no further files.
        directory: of the checkpoint; empty for lone files, and where nobody has said yet.
        is_promised: this rank's manifest is written. From then on only rank 0 may decide against the checkpoint.
        deadline: when to give up on the other ranks; set when that is written, or may be.
        manifests: of the ranks that are known to be complete, with the CRC-32 of their bytes.
        num_failures: of calls that finish the commit, which is decided: they are made again some times.
    """

    name: str
    files: list[IncomingFile] = field(default_factory=list)
    request: Publish | Commit | None = None
    directory: str = ""
    lock: AttemptLock | None = None
    is_promised: bool = False
    deadline: float | None = None
    manifests: dict[int, tuple[Manifest, int]] = field(default_factory=dict)
    num_failures: int = 0
