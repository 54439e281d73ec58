"""The objects below one prefix of an object store, by the library obstore: single requests, and their errors.

Credentials, region and endpoint are what the library finds by itself: in the environment, or from the machine that it
runs on. A failed request is made again a few times; what fails then raises a `StorageError` without a secret in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store, from_url

from datastates.errors import ConfigError, DataStatesError, StorageError
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

_LIST_CHUNK = 1000
_DELETE_CHUNK = 1000


class Bucket:
    """Keys are relative to the prefix. An object appears whole or not at all. Raises StorageError; not thread safe."""

    def __init__(self, url: str, warn: Callable[[str], None]) -> None:
        """Does not connect.

        Args:
            url: the store, bucket and prefix.
            warn: told, once each, that unfinished uploads cannot be listed or aborted, or what is old not removed.

        Raises:
            ConfigError: what the environment says of the store is wrong.
        """
        self.url = url
        self._warn = warn
        self._is_told: set[str] = set()
        try:
            options = client_options(urlsplit(url).scheme)
            self._store = from_url(url, client_options=options, retry_config=RETRIES)  # type: ignore[call-overload]
            self._prefix = self._store.prefix or ""
            self._uploads = self._multipart_uploads()
        except (BaseError, ValueError) as error:
            raise ConfigError(f"tier {url}: {redacted(str(error))}") from None

    def put(self, key: str, data: bytes) -> None:
        """Write a small object."""
        with _errors("write", f"{self.url}/{key}"):
            obstore.put(self._store, key, data, use_multipart=False)

    def send(self, key: str, nbytes: int, pieces: Iterable[memoryview]) -> str:
        """Write an object of any size, in parts; what the pieces raise passes through, and nothing is left then.

        Returns:
            Its ETag, after a look at what is there now.
        """
        part = part_nbytes(nbytes)
        with _errors(f"send {nbytes} bytes in parts of {part} to", f"{self.url}/{key}"):
            if nbytes <= part:
                data = b"".join(pieces)
                return obstore.put(self._store, key, data, use_multipart=False)["e_tag"] or ""
            result = obstore.put(self._store, key, iter(pieces), chunk_size=part, max_concurrency=num_in_flight(part))
        receipt = result["e_tag"] or ""
        found = self.head(key)
        if found is None or found[0] != nbytes or (receipt and found[1] != receipt):
            size = "nothing is there" if found is None else f"{found[0]} bytes with ETag {found[1]} are there"
            expected = f"{nbytes} bytes with ETag {receipt}"
            raise StorageError(f"{self.url}/{key}: {size} after it was sent, expected {expected}", errno.EIO, key)
        return found[1] or receipt

    def get(self, key: str) -> bytes | None:
        """All of a small object, None where there is none; a bucket that is not there is an error."""
        with _errors("read", f"{self.url}/{key}"):
            try:
                return bytes(obstore.get(self._store, key).bytes())
            except FileNotFoundError as error:
                if _is_missing_bucket(error):
                    raise
                return None

    def get_range(self, key: str, begin: int, end: int) -> memoryview:
        """A part of an object. Several threads may call it at once."""
        with _errors(f"read bytes {begin} to {end} of", f"{self.url}/{key}"):
            data = memoryview(obstore.get_range(self._store, key, start=begin, end=end))
        if len(data) != end - begin:
            message = f"{self.url}/{key} ends at {begin + len(data)}, expected {end} bytes"
            raise StorageError(message, errno.EIO, key)
        return data

    def head(self, key: str) -> tuple[int, str] | None:
        """Size and ETag of an object, None where there is none."""
        with _errors("look at", f"{self.url}/{key}"):
            try:
                found = obstore.head(self._store, key)
            except FileNotFoundError:
                return None
        return found["size"], found["e_tag"] or ""

    def entries(self, below: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes of the objects below a prefix that ends in a slash, however many pages they fill."""
        with _errors("list", f"{self.url}/{below}"):
            for chunk in obstore.list(self._store, below.rstrip("/") or None, chunk_size=_LIST_CHUNK):
                for found in chunk:
                    if found["path"].startswith(below):
                        yield found["path"], found["size"]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, in this order where they are many; those that are not there are none."""
        for first in range(0, len(keys), _DELETE_CHUNK):
            chunk = list(keys[first : first + _DELETE_CHUNK])
            more = f" and {len(chunk) - 1} more" if len(chunk) > 1 else ""
            with _errors("remove", f"{self.url}/{chunk[0]}{more}"), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, chunk)

    def delete_old(self, keys: Sequence[str]) -> None:
        """`delete` of what is in nobody's way; where that is refused, say so once."""
        try:
            self.delete(keys)
        except StorageError as error:
            self._tell_once(f"what was replaced may stay in {self.url}, where it costs", error)

    def abort_uploads(self, below: str, is_ours: Callable[[str], bool] = lambda _: True) -> None:
        """Abort unfinished uploads of keys below a prefix that are ours; where that is refused, say so once."""
        if self._uploads is None:
            return
        root = self._whole("")
        try:
            for upload in self._uploads.below(self._whole(below)):
                if is_ours(upload.key.removeprefix(root)):
                    self._uploads.abort(upload)
        except StorageError as error:
            self._tell_once(f"parts of interrupted uploads may stay in {self.url}, where they cost", error)

    def _tell_once(self, what: str, error: StorageError) -> None:
        if what not in self._is_told:
            self._warn(f"{what}: {error}")
        self._is_told.add(what)

    def _whole(self, key: str) -> str:
        """The whole key in the bucket."""
        return f"{self._prefix}/{key}" if self._prefix else key

    def _multipart_uploads(self) -> MultipartUploads | None:
        """None where the store discards what is not completed by itself, or by a rule of the bucket (docs/tiers.md)."""
        if not isinstance(self._store, S3Store):
            return None
        bucket = urlsplit(self.url).netloc

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


def _is_missing_bucket(error: FileNotFoundError) -> bool:
    return "NoSuchBucket" in str(error)


@contextlib.contextmanager
def _errors(action: str, what: str) -> Iterator[None]:
    """Turn the library's errors into a `StorageError` that says what was done to what, and holds no secret."""
    try:
        yield
    except BaseError as error:
        raise StorageError(f"cannot {action} {what}: {redacted(str(error))}", None, what) from None
    except UnicodeEncodeError:
        raise StorageError(f"cannot {action} {what!r}: the name of an object is UTF-8", errno.EINVAL, what) from None
    except FileNotFoundError as error:
        if isinstance(error, DataStatesError) or error.errno is not None:
            raise  # not the library's
        raise StorageError(f"cannot {action} {what}: {redacted(str(error))}", errno.ENOENT, what) from None
