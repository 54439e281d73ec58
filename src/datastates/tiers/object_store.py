"""A tier in an object store, through the library obstore: ``s3://``, ``gs://``, ``az://``.

An object appears whole or not at all, under its final name: there is no rename. So files come first, then manifests,
then the record of the commit. Credentials, region and endpoint are what the library finds by itself: in the
environment, or from the machine that it runs on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store, from_url

from datastates.attempt_folder import MAX_DEPTH
from datastates.errors import ConfigError, CorruptCheckpointError, DataStatesError, StorageError
from datastates.manifest import COMMIT_NAME, LATEST_NAME, METADATA_NAME, CommitRecord, FileRecord, Manifest
from datastates.tiers.first_tier import Placed
from datastates.tiers.multipart_leftovers import MultipartUploads
from datastates.tiers.parts import num_in_flight, part_nbytes
from datastates.tiers.redaction import redacted

CLIENT_OPTIONS = {"connect_timeout": "10 seconds", "timeout": "5 minutes"}
"""A part of 16 MiB may take five minutes: at 60 kB/s. The library's own limit of 30 s ends slow uploads."""

_FROM_ENVIRONMENT = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "timeout",
)
"""Options that the library takes from the environment (``AWS_ALLOW_HTTP``) unless it is given any."""

_ENVIRONMENT = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}

RETRIES = {
    "max_retries": 5,
    "retry_timeout": timedelta(minutes=2),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=10), "base": 2},
}
"""Of one request, with jitter; what fails then is tried again as a whole, later."""

_COMMIT = f"/{METADATA_NAME}/{COMMIT_NAME}"
_LIST_CHUNK = 1000
_DELETE_CHUNK = 1000


class ObjectStore:
    """See `store.Store`."""

    def __init__(self, url: str, warn: Callable[[str], None]) -> None:
        """Does not connect.

        Args:
            url: the root.
            warn: told, once, that unfinished uploads cannot be listed or aborted.

        Raises:
            ConfigError: what the environment says of the store is wrong.
        """
        self._url = url
        self._warn: Callable[[str], None] | None = warn
        self._prefix = urlsplit(url).path.strip("/")
        try:
            options = client_options(urlsplit(url).scheme)
            self._store = from_url(url, client_options=options, retry_config=RETRIES)  # type: ignore[call-overload]
            self._uploads = self._multipart_uploads()
        except (BaseError, ValueError) as error:
            raise ConfigError(f"tier {url}: {redacted(str(error))}") from None

    @property
    def url(self) -> str:
        return self._url

    def begin(self, name: str, attempt: str) -> None:
        """Withdraw the record of an older attempt, and have ``latest`` name another one before."""
        data = self.read(name, _COMMIT[1:])
        if data is None or _attempt_of(data) == attempt:
            return
        folder = posixpath.dirname(name)
        others = [placed for placed in self.committed(folder) if placed.name != name]
        latest = self.latest(folder)
        if latest is not None and latest not in {placed.tag for placed in others}:
            if others:
                self.set_latest(folder, max(others, key=lambda placed: placed.created_at).tag)
            else:
                self._delete([posixpath.join(folder, LATEST_NAME)])
        self._delete([name + _COMMIT])

    def clean(self, name: str, files: Sequence[FileRecord]) -> None:
        keys = {self._key(f"{name}/{file.name}") for file in files}
        self._abort_uploads(f"{name}/", lambda key: key in keys)

    def clean_forgotten(self, names: Sequence[str]) -> None:
        kept = tuple(self._key(f"{name}/") for name in names)
        self._abort_uploads("", lambda key: not key.startswith(kept))

    def has_part(self, name: str, attempt: str, rank: int, manifest: Manifest, data: bytes) -> bool:
        if self.manifest(name, attempt, rank) != data:
            return False
        sizes = dict(self._list(f"{name}/"))
        return all(sizes.get(f"{name}/{file.name}") == file.nbytes for file in manifest.files)

    def has(self, name: str, attempt: str, file: FileRecord, receipt: str | None) -> bool:  # noqa: ARG002
        if not receipt:
            return False
        found = self._head(f"{name}/{file.name}")
        return found == (file.nbytes, receipt)

    def send(self, name: str, attempt: str, file: FileRecord, pieces: Iterable[memoryview]) -> str:  # noqa: ARG002
        key = f"{name}/{file.name}"
        part = part_nbytes(file.nbytes)
        with _errors(f"send {file.nbytes} bytes in parts of {part} to", f"{self._url}/{key}"):
            if file.nbytes <= part:
                data = b"".join(pieces)
                return obstore.put(self._store, key, data, use_multipart=False)["e_tag"] or ""
            result = obstore.put(self._store, key, iter(pieces), chunk_size=part, max_concurrency=num_in_flight(part))
        receipt = result["e_tag"] or ""
        found = self._head(key)
        if found is None or found[0] != file.nbytes or (receipt and found[1] != receipt):
            size = "nothing is there" if found is None else f"{found[0]} bytes with ETag {found[1]} are there"
            expected = f"{file.nbytes} bytes with ETag {receipt}"
            raise StorageError(f"{self._url}/{key}: {size} after it was sent, expected {expected}", errno.EIO, key)
        return found[1] or receipt

    def send_manifest(self, name: str, attempt: str, rank: int, data: bytes) -> None:
        self._put(_manifest_key(name, attempt, rank), data)

    def manifest(self, name: str, attempt: str, rank: int) -> bytes | None:
        return self._get(_manifest_key(name, attempt, rank))

    def commit(self, name: str, record: CommitRecord, manifests: Sequence[tuple[Manifest, int]]) -> None:  # noqa: ARG002
        """Raises StorageError where a file is not there with its size: somebody has removed or replaced it."""
        sizes = dict(self._list(f"{name}/"))
        for file, nbytes in record.file_nbytes.items():
            found = sizes.get(f"{name}/{file}")
            if found != nbytes:
                size = "is missing" if found is None else f"has {found} bytes"
                message = f"{self._url}/{name}/{file} {size}, expected {nbytes} bytes; the checkpoint is not committed"
                raise StorageError(message, errno.EIO, file)
        stale = self._stale(name, record, list(sizes))
        self._put(name + _COMMIT, record.to_bytes())
        self._delete(stale)
        self._abort_uploads(f"{name}/", lambda _: True)

    def release(self, name: str, attempt: str) -> None:
        """Nothing is held."""

    def latest(self, folder: str) -> str | None:
        data = self._get(posixpath.join(folder, LATEST_NAME))
        return None if data is None else data.decode("utf-8", "surrogateescape").strip()

    def set_latest(self, folder: str, tag: str) -> None:
        self._put(posixpath.join(folder, LATEST_NAME), tag.encode("utf-8", "surrogateescape"))

    def committed(self, folder: str | None) -> list[Placed]:
        below = f"{folder}/" if folder else ""
        names = [key[: -len(_COMMIT)] for key, _ in self._list(below) if key.endswith(_COMMIT)]
        if folder is None:
            names = [name for name in names if name.count("/") < MAX_DEPTH]
        else:
            names = [name for name in names if posixpath.dirname(name) == folder]
        found = []
        for name in names:
            data = self.read(name, _COMMIT[1:])
            with contextlib.suppress(CorruptCheckpointError):
                if data is not None:
                    found.append(Placed(name, CommitRecord.from_bytes(data, f"{self._url}/{name}{_COMMIT}")))
        return found

    def remove(self, name: str) -> None:
        self._delete([name + _COMMIT])
        self._delete([key for key, _ in self._list(f"{name}/")])
        self._abort_uploads(f"{name}/", lambda _: True)

    def read(self, name: str, file: str) -> bytes | None:
        return self._get(f"{name}/{file}")

    def read_piece(self, name: str, file: str, begin: int, end: int) -> memoryview:
        key = f"{name}/{file}"
        with _errors(f"read bytes {begin} to {end} of", f"{self._url}/{key}"):
            data = memoryview(obstore.get_range(self._store, key, start=begin, end=end))
        if len(data) != end - begin:
            message = f"{self._url}/{key} ends at {begin + len(data)}, expected {end} bytes"
            raise StorageError(message, errno.EIO, key)
        return data

    def _stale(self, name: str, record: CommitRecord, keys: list[str]) -> list[str]:
        """Keys of what older attempts have left: their manifests, and files that the new one does not have."""
        below = f"{name}/{METADATA_NAME}/"
        stale: list[str] = []
        for key in keys:
            parts = key.removeprefix(below).split("/")
            if not key.startswith(below) or len(parts) != 2 or parts[0] == record.attempt:
                continue
            stale.append(key)
            data = self._get(key)
            with contextlib.suppress(CorruptCheckpointError):
                if data is not None:
                    files = [file.name for file in Manifest.from_bytes(data, key).files]
                    stale += [f"{name}/{file}" for file in files if file not in record.file_nbytes]
        return list(dict.fromkeys(stale))

    def _put(self, key: str, data: bytes) -> None:
        with _errors("write", f"{self._url}/{key}"):
            obstore.put(self._store, key, data, use_multipart=False)

    def _get(self, key: str) -> bytes | None:
        with _errors("read", f"{self._url}/{key}"):
            try:
                return bytes(obstore.get(self._store, key).bytes())
            except FileNotFoundError as error:
                if _is_missing_bucket(error):
                    raise
                return None

    def _head(self, key: str) -> tuple[int, str] | None:
        with _errors("look at", f"{self._url}/{key}"):
            try:
                found = obstore.head(self._store, key)
            except FileNotFoundError:
                return None
        return found["size"], found["e_tag"] or ""

    def _list(self, below: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes of the objects below a prefix that ends in a slash, however many pages they fill."""
        with _errors("list", f"{self._url}/{below}"):
            for chunk in obstore.list(self._store, below.rstrip("/") or None, chunk_size=_LIST_CHUNK):
                for found in chunk:
                    if found["path"].startswith(below):
                        yield found["path"], found["size"]

    def _delete(self, keys: Sequence[str]) -> None:
        with _errors("remove", f"{len(keys)} objects of {self._url}"):
            for first in range(0, len(keys), _DELETE_CHUNK):
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._store, list(keys[first : first + _DELETE_CHUNK]))

    def _abort_uploads(self, below: str, is_ours: Callable[[str], bool]) -> None:
        """Abort unfinished uploads below a prefix, of whole keys that are ours; where that is refused, say so once."""
        if self._uploads is None:
            return
        try:
            for upload in self._uploads.below(self._key(below)):
                if is_ours(upload.key):
                    self._uploads.abort(upload)
        except StorageError as error:
            warn, self._warn = self._warn, None
            if warn is not None:
                warn(f"parts of interrupted uploads may stay in {self._url}, where they cost: {error}")

    def _key(self, key: str) -> str:
        """The whole key in the bucket."""
        return f"{self._prefix}/{key}" if self._prefix else key

    def _multipart_uploads(self) -> MultipartUploads | None:
        """None where the store discards what is not completed by itself, or by a rule of the bucket (docs/tiers.md)."""
        if not isinstance(self._store, S3Store):
            return None
        bucket = urlsplit(self._url).netloc

        def make_store(endpoint: str) -> S3Store:
            return S3Store(
                bucket,
                endpoint=endpoint,
                aws_endpoint_url_s3=endpoint,
                virtual_hosted_style_request=True,
                client_options=client_options("s3"),  # type: ignore[arg-type]
            )

        return MultipartUploads(self._store, make_store)


def client_options(scheme: str) -> dict[str, Any]:
    """`CLIENT_OPTIONS`, and what the environment says of the client. An endpoint ``http://`` there means plain HTTP."""
    prefix = _ENVIRONMENT[scheme]
    options: dict[str, Any] = dict(CLIENT_OPTIONS)
    for name, value in os.environ.items():
        key = name.removeprefix(prefix).lower()
        if not name.startswith(prefix):
            continue
        if key in _FROM_ENVIRONMENT:
            options[key] = value
        elif "endpoint" in key and value.startswith("http://"):
            options.setdefault("allow_http", True)
    return options


def _manifest_key(name: str, attempt: str, rank: int) -> str:
    return f"{name}/{METADATA_NAME}/{attempt}/rank-{rank:05d}.json"


def _attempt_of(data: bytes) -> str | None:
    try:
        return CommitRecord.from_bytes(data, "").attempt
    except CorruptCheckpointError:
        return None


def _is_missing_bucket(error: FileNotFoundError) -> bool:
    return "NoSuchBucket" in str(error)


@contextlib.contextmanager
def _errors(action: str, what: str) -> Iterator[None]:
    """Turn the library's errors into a `StorageError` that says what was done to what, and holds no secret."""
    try:
        yield
    except BaseError as error:
        raise StorageError(f"cannot {action} {what}: {redacted(str(error))}", None, what) from None
    except FileNotFoundError as error:
        if isinstance(error, DataStatesError) or error.errno is not None:
            raise  # not the library's
        raise StorageError(f"cannot {action} {what}: {redacted(str(error))}", errno.ENOENT, what) from None
