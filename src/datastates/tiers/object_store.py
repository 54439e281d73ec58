"""A tier in an object store: ``s3://``, ``gs://``, ``az://``.

An object appears whole or not at all, under its final name: there is no rename. So files come first, then manifests,
then the record of the commit. What is removed loses the record first; a mark says that the rest has to go, too.
"""

from __future__ import annotations

import contextlib
import errno
import posixpath
from collections.abc import Callable, Iterable, Sequence

from datastates.attempt_folder import MAX_DEPTH
from datastates.errors import CorruptCheckpointError, StorageError
from datastates.manifest import (
    COMMIT_NAME,
    LATEST_NAME,
    METADATA_NAME,
    PINNED_NAME,
    CommitRecord,
    FileRecord,
    Manifest,
)
from datastates.tiers.bucket import Bucket
from datastates.tiers.first_tier import Placed

_COMMIT = f"/{METADATA_NAME}/{COMMIT_NAME}"
_PINNED = f"/{METADATA_NAME}/{PINNED_NAME}"
_REMOVING = f"/{METADATA_NAME}/removing"
"""An object that says that a checkpoint is being removed: without a commit record beside it, all the rest goes."""


class ObjectStore:
    """See `store.Store`."""

    def __init__(self, url: str, warn: Callable[[str], None]) -> None:
        """Does not connect.

        Args:
            url: the root.
            warn: told, once each, that unfinished uploads cannot be listed or aborted, or what is old not removed.

        Raises:
            ConfigError: what the environment says of the store is wrong.
        """
        self._bucket = Bucket(url, warn)

    @property
    def url(self) -> str:
        return self._bucket.url

    def begin(self, name: str, attempt: str) -> None:
        """Withdraw the record of an older attempt, and have ``latest`` name another one before."""
        data = self._bucket.get(name + _COMMIT)
        if data is None or _attempt_of(data) == attempt:
            return
        folder = posixpath.dirname(name)
        others = [placed for placed in self.committed(folder) if placed.name != name]
        latest = self.latest(folder)
        if latest is not None and latest not in {placed.tag for placed in others}:
            if others:
                self.set_latest(folder, max(others, key=lambda placed: placed.created_at).tag)
            else:
                self._bucket.delete([posixpath.join(folder, LATEST_NAME)])
        self._bucket.delete([name + _COMMIT])

    def clean(self, name: str, files: Sequence[FileRecord]) -> None:
        keys = {f"{name}/{file.name}" for file in files}
        self._bucket.abort_uploads(f"{name}/", lambda key: key in keys)

    def clean_forgotten(self, names: Sequence[str]) -> None:
        kept = tuple(f"{name}/" for name in names)
        self._bucket.abort_uploads("", lambda key: not key.startswith(kept))
        marks = [key for key, _ in self._bucket.entries("") if key.endswith(_REMOVING)]
        for name in [key.removesuffix(_REMOVING) for key in marks]:
            if self._bucket.get(name + _COMMIT) is None:
                self._remove_rest(name)
            else:  # cut before the record was gone: it is whole
                self._bucket.delete([name + _REMOVING])

    def has_part(self, name: str, attempt: str, rank: int, manifest: Manifest, data: bytes) -> bool:
        if self.manifest(name, attempt, rank) != data:
            return False
        sizes = dict(self._bucket.entries(f"{name}/"))
        return all(sizes.get(f"{name}/{file.name}") == file.nbytes for file in manifest.files)

    def has(self, name: str, attempt: str, file: FileRecord, receipt: str | None) -> bool:  # noqa: ARG002
        return bool(receipt) and self._bucket.head(f"{name}/{file.name}") == (file.nbytes, receipt)

    def send(self, name: str, attempt: str, file: FileRecord, pieces: Iterable[memoryview]) -> str:  # noqa: ARG002
        return self._bucket.send(f"{name}/{file.name}", file.nbytes, pieces)

    def send_manifest(self, name: str, attempt: str, rank: int, data: bytes) -> None:
        self._bucket.put(_manifest_key(name, attempt, rank), data)

    def manifest(self, name: str, attempt: str, rank: int) -> bytes | None:
        return self._bucket.get(_manifest_key(name, attempt, rank))

    def commit(self, name: str, record: CommitRecord, manifests: Sequence[tuple[Manifest, int]]) -> None:  # noqa: ARG002
        """Raises StorageError where a file is not there with its size: somebody has removed or replaced it."""
        sizes = dict(self._bucket.entries(f"{name}/"))
        for file, nbytes in record.file_nbytes.items():
            found = sizes.get(f"{name}/{file}")
            if found != nbytes:
                size = "is missing" if found is None else f"has {found} bytes"
                message = f"{self.url}/{name}/{file} {size}, expected {nbytes} bytes; the checkpoint is not committed"
                raise StorageError(message, errno.EIO, file)
        stale = self._stale(name, record, list(sizes))
        self._bucket.put(name + _COMMIT, record.to_bytes())
        self._bucket.delete_old(stale)
        self._bucket.abort_uploads(f"{name}/")

    def release(self, name: str, attempt: str) -> None:
        """Nothing is held."""

    def discard(self, name: str, record: CommitRecord, kept: Iterable[str]) -> None:
        if self._bucket.get(name + _COMMIT) is not None:
            return
        wanted = {f"{name}/{file}" for file in record.file_nbytes} - {f"{name}/{file}" for file in kept}
        below = f"{name}/{METADATA_NAME}/{record.attempt}/"
        found = [key for key, _ in self._bucket.entries(f"{name}/")]
        self._bucket.delete([key for key in found if key in wanted or key.startswith(below)])

    def latest(self, folder: str) -> str | None:
        data = self._bucket.get(posixpath.join(folder, LATEST_NAME))
        return None if data is None else data.decode("utf-8", "surrogateescape").strip()

    def set_latest(self, folder: str, tag: str) -> None:
        self._bucket.put(posixpath.join(folder, LATEST_NAME), tag.encode("utf-8", "surrogateescape"))

    def committed(self, folder: str | None) -> list[Placed]:
        below = f"{folder}/" if folder else ""
        names = [key.removesuffix(_COMMIT) for key, _ in self._bucket.entries(below) if key.endswith(_COMMIT)]
        if folder is None:
            names = [name for name in names if name.count("/") < MAX_DEPTH]
        else:
            names = [name for name in names if posixpath.dirname(name) == folder]
        found = []
        for name in names:
            data = self._bucket.get(name + _COMMIT)
            with contextlib.suppress(CorruptCheckpointError):
                if data is not None:
                    found.append(Placed(name, CommitRecord.from_bytes(data, f"{self.url}/{name}{_COMMIT}")))
        return found

    def pinned(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if self._bucket.head(name + _PINNED) is not None}

    def set_pin(self, name: str, *, wanted: bool) -> None:
        if wanted:
            self._bucket.put(name + _PINNED, b"")
        else:
            self._bucket.delete([name + _PINNED])

    def remove(self, name: str) -> None:
        self._bucket.put(name + _REMOVING, b"")
        self._bucket.delete([name + _COMMIT])
        self._remove_rest(name)

    def read(self, name: str, file: str) -> bytes | None:
        return self._bucket.get(f"{name}/{file}")

    def read_piece(self, name: str, file: str, begin: int, end: int) -> memoryview:
        return self._bucket.get_range(f"{name}/{file}", begin, end)

    def _remove_rest(self, name: str) -> None:
        """What is left of a checkpoint that has no record any more; the mark that says so last."""
        mark = name + _REMOVING
        self._bucket.delete([key for key, _ in self._bucket.entries(f"{name}/") if key != mark])
        self._bucket.abort_uploads(f"{name}/")
        self._bucket.delete([mark])

    def _stale(self, name: str, record: CommitRecord, keys: list[str]) -> list[str]:
        """Keys of what older attempts have left: their manifests, and files that the new one does not have."""
        below = f"{name}/{METADATA_NAME}/"
        stale: list[str] = []
        for key in keys:
            parts = key.removeprefix(below).split("/")
            if not key.startswith(below) or len(parts) != 2 or parts[0] == record.attempt:
                continue
            stale.append(key)
            data = self._bucket.get(key)
            with contextlib.suppress(CorruptCheckpointError):
                if data is not None:
                    files = [file.name for file in Manifest.from_bytes(data, key).files]
                    stale += [f"{name}/{file}" for file in files if file not in record.file_nbytes]
        return list(dict.fromkeys(stale))


def _manifest_key(name: str, attempt: str, rank: int) -> str:
    return f"{name}/{METADATA_NAME}/{attempt}/rank-{rank:05d}.json"


def _attempt_of(data: bytes) -> str | None:
    try:
        return CommitRecord.from_bytes(data, "").attempt
    except CorruptCheckpointError:
        return None
