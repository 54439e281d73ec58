"""A tier that is a directory: checkpoints are committed there as in the first one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence

from datastates.attempt_folder import AttemptLock
from datastates.commit import roll_forward
from datastates.directories import make_directories, make_names_durable
from datastates.errors import CorruptCheckpointError, StorageError
from datastates.manifest import (
    LATEST_NAME,
    CommitRecord,
    FileRecord,
    Manifest,
    manifest_path,
    read_bytes,
    read_commit,
    read_latest,
)
from datastates.partial_names import partial_path
from datastates.pins import is_pinned, pin, unpin
from datastates.recovery import clean_leftovers, remove_empty, remove_superseded
from datastates.removal import remove_checkpoint
from datastates.storage import PartialFile, create_partial, size_of, write_atomically
from datastates.system_calls import patiently, storage_errors
from datastates.tiers.first_tier import Placed, checkpoint_folders, committed_below, is_current


class FolderStore:
    """See `store.Store`. Files lie under partial names, locked, until the checkpoint is committed there."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._locks: dict[tuple[str, str], AttemptLock] = {}
        self._partials: dict[tuple[str, str], dict[str, PartialFile]] = {}

    @property
    def url(self) -> str:
        return self._root

    def begin(self, name: str, attempt: str) -> None:
        """Nothing to do: the commit withdraws an older record, and nothing has its final name before."""

    def clean(self, name: str, files: Sequence[FileRecord]) -> None:
        """Nothing to do: `send` removes what a dead process has left of a file."""

    def clean_forgotten(self, names: Sequence[str]) -> None:  # noqa: ARG002
        """Finish or remove what dead processes have left, of all checkpoints: what is sent again is sent whole."""
        for folder in sorted({os.path.dirname(path) for path in checkpoint_folders(self._root)}):
            with contextlib.suppress(CorruptCheckpointError):
                clean_leftovers(folder)

    def has_part(self, name: str, attempt: str, rank: int, manifest: Manifest, data: bytes) -> bool:
        if self.manifest(name, attempt, rank) != data:
            return False
        directory = self._join(name)
        self._hold(name, attempt)
        for file in manifest.files:
            path = os.path.join(directory, file.name)
            if file.nbytes not in (size_of(partial_path(path, attempt)), size_of(path)):
                return False
        return True

    def has(self, name: str, attempt: str, file: FileRecord, receipt: str | None) -> bool:  # noqa: ARG002
        return file.name in self._partials.get((name, attempt), {})

    def send(self, name: str, attempt: str, file: FileRecord, pieces: Iterable[memoryview]) -> str:
        directory = self._join(name)
        held = self._hold(name, attempt)
        partial = create_partial(os.path.join(directory, file.name), attempt, file.nbytes)
        try:
            offset = 0
            for piece in pieces:
                partial.write(piece, offset)
                offset += piece.nbytes
            partial.make_durable()
        except BaseException:
            partial.remove()
            raise
        held[file.name] = partial
        return ""

    def send_manifest(self, name: str, attempt: str, rank: int, data: bytes) -> None:
        held = self._hold(name, attempt)
        directory = self._join(name)
        with storage_errors("make durable", directory):
            make_names_durable([partial_path(file.path, attempt) for file in held.values()], directory)
        write_atomically(manifest_path(directory, attempt, rank), data)

    def manifest(self, name: str, attempt: str, rank: int) -> bytes | None:
        return read_bytes(manifest_path(self._join(name), attempt, rank))

    def commit(self, name: str, record: CommitRecord, manifests: Sequence[tuple[Manifest, int]]) -> None:
        directory = self._join(name)
        if not is_current(directory, record.attempt):
            roll_forward(directory, manifests, record.tag, record.committed_at)
        with storage_errors("clean", directory):
            remove_superseded(directory, record.attempt)

    def release(self, name: str, attempt: str) -> None:
        for partial in self._partials.pop((name, attempt), {}).values():
            partial.remove()
        lock = self._locks.pop((name, attempt), None)
        if lock is not None:
            lock.release()

    def discard(self, name: str, record: CommitRecord, kept: Iterable[str]) -> None:  # noqa: ARG002
        """What other ranks still hold stays; nothing of an attempt has its final name before the commit."""
        directory = self._join(name)
        if read_commit(directory) is None:
            with storage_errors("clean", directory):
                remove_superseded(directory, "")
            remove_empty(directory)

    def latest(self, folder: str) -> str | None:
        return read_latest(self._join(folder))

    def set_latest(self, folder: str, tag: str) -> None:
        write_atomically(os.path.join(self._join(folder), LATEST_NAME), tag.encode("utf-8", "surrogateescape"))

    def committed(self, folder: str | None) -> list[Placed]:
        return [
            placed for placed in committed_below(self._root) if folder is None or os.path.dirname(placed.name) == folder
        ]

    def pinned(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if is_pinned(self._join(name))}

    def set_pin(self, name: str, *, wanted: bool) -> None:
        (pin if wanted else unpin)(self._join(name))

    def remove(self, name: str) -> None:
        remove_checkpoint(self._join(name))

    def read(self, name: str, file: str) -> bytes | None:
        return read_bytes(os.path.join(self._join(name), file))

    def read_piece(self, name: str, file: str, begin: int, end: int) -> memoryview:
        path = os.path.join(self._join(name), file)
        buffer = memoryview(bytearray(end - begin))
        with storage_errors("read", path), open(path, "rb", buffering=0) as source:
            done = 0
            while done < len(buffer):
                count = patiently(os.preadv, source.fileno(), [buffer[done:]], begin + done)
                if not count:
                    raise StorageError(f"{path} ends at {begin + done}, expected {end} bytes", errno.EIO, path)
                done += count
        return buffer

    def _join(self, name: str) -> str:
        return os.path.join(self._root, name) if name else self._root

    def _hold(self, name: str, attempt: str) -> dict[str, PartialFile]:
        """Make the checkpoint's folder and take a share in the attempt, once."""
        key = (name, attempt)
        if key not in self._locks:
            with storage_errors("make", self._join(name)):
                make_directories(self._join(name))
            self._locks[key] = AttemptLock(self._join(name), attempt)
        return self._partials.setdefault(key, {})

    def close(self) -> None:
        """Let go of everything; partial files stay."""
        for partials in self._partials.values():
            for partial in partials.values():
                partial.close()
        for lock in self._locks.values():
            with contextlib.suppress(OSError):
                lock.release()
        self._partials.clear()
        self._locks.clear()
