"""Uploads to S3 that a crash has cut: their parts lie in the bucket, invisible and paid for, until they are aborted.

The library for object stores neither lists nor aborts uploads that it has not begun itself, so both requests are made
here; it signs them, with the credentials that it uses for all else. What is signed is a URL whose query is part of the
store's endpoint; the library puts a ``/`` behind it, which goes into the last parameter. S3 ignores parameters that
begin with ``x-``.

Source: Amazon S3 API Reference, ListMultipartUploads and AbortMultipartUpload; Amazon S3 User Guide, "Amazon S3 server
access log format", on parameters that begin with ``x-``.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import quote, urlencode, urlsplit, urlunsplit
from xml.etree import ElementTree

import obstore
from obstore.store import S3Store

from datastates.errors import StorageError
from datastates.tiers.redaction import redacted

_EXPIRES = timedelta(minutes=5)
_TIMEOUT_SECONDS = 30.0
_MAX_ANSWER_BYTES = 64 << 20
_PROBE = "x"


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that is neither complete nor aborted: the whole key of its object, and its id."""

    key: str
    id: str


class MultipartUploads:
    """The unfinished uploads of one bucket."""

    def __init__(self, store: S3Store, make_store: Callable[[str], S3Store]) -> None:
        """Args:
        store: of the bucket, with or without a prefix.
        make_store: gives a store of the same bucket, settings and credentials, without a prefix, whose endpoint is
            this, bucket included.
        """
        signed = urlsplit(obstore.sign(store, "GET", _PROBE, _EXPIRES))
        below = f"/{store.prefix}/{_PROBE}" if store.prefix else f"/{_PROBE}"
        path = signed.path[: -len(quote(below))]
        self._base = urlunsplit((signed.scheme, signed.netloc, path, "", ""))
        self._make_store = make_store

    def below(self, prefix: str) -> list[Upload]:
        """The unfinished uploads of objects whose keys begin with a prefix. Raises StorageError."""
        found: list[Upload] = []
        marks: dict[str, str] = {}
        while True:
            answer = self._request("GET", "", {"uploads": "", "prefix": prefix, **marks})
            tree = _parsed(answer, prefix)
            for element in tree.iterfind("{*}Upload"):
                key, upload_id = element.findtext("{*}Key") or "", element.findtext("{*}UploadId") or ""
                if key.startswith(prefix) and upload_id:
                    found.append(Upload(key, upload_id))
            if tree.findtext("{*}IsTruncated") != "true":
                return found
            marks = {
                "key-marker": tree.findtext("{*}NextKeyMarker") or "",
                "upload-id-marker": tree.findtext("{*}NextUploadIdMarker") or "",
            }

    def abort(self, upload: Upload) -> None:
        """Give up an upload; one that is gone already is none. Raises StorageError."""
        self._request("DELETE", "/" + quote(upload.key), {"uploadId": upload.id}, missing_ok=True)

    def _request(self, method: str, path: str, query: dict[str, str], *, missing_ok: bool = False) -> bytes:
        url = f"{self._base}{path}?{urlencode(query, quote_via=quote)}&x-datastates="
        what = redacted(f"{method} {self._base}{path}")
        signed = obstore.sign(self._make_store(url), method, "", _EXPIRES)  # type: ignore[call-overload]
        request = urllib.request.Request(signed, method=method)  # noqa: S310 - http(s), as the library has made it
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
                data: bytes = answer.read(_MAX_ANSWER_BYTES)
                return data
        except urllib.error.HTTPError as error:
            with error:
                if missing_ok and error.code == 404:
                    return b""
                body = error.read(4096).decode("utf-8", "replace")
            raise StorageError(f"{what}: HTTP {error.code}: {redacted(body)}") from None
        except OSError as error:  # URLError among them; its own message may repeat the signed URL
            raise StorageError(f"{what}: {redacted(str(error))}") from None


def _parsed(answer: bytes, prefix: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(answer)  # noqa: S314 - of the store that the checkpoints are trusted to
    except ElementTree.ParseError as error:
        raise StorageError(f"the list of uploads below {prefix!r} is no XML: {error}") from error
