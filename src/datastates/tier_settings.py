"""What a config says of tiers: where checkpoints are carried to, one place after the other, and how many stay in each.

::

    tiers = ["/local/nvme/run7", {"path": "s3://bucket/run7", "keep_last": 3, "keep_every": 1000}]

The first one is where checkpoints are saved, a directory; what is committed there is carried to all others, to the same
place relative to their root.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from datastates.errors import ConfigError

OBJECT_STORES = ("s3", "gs", "az")
"""Schemes of URLs that are object stores."""

_GIB = 2**30
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True)
class TierSettings:
    """One tier. Immutable, and checked when it is made.

    Raises:
        ConfigError: a value is wrong. A URL with anything that may be a secret is refused, and not repeated.
    """

    path: str
    """A directory, or the URL of a place in an object store (``s3://bucket/prefix``, ``gs://``, ``az://``)."""

    keep_last: int | None = None
    """The newest so many stay in this tier, of each folder of checkpoints. None with `keep_every`: one."""

    keep_every: int | None = None
    """Those whose step is a multiple of this stay, too. None for both: all stay."""

    limit_gb: float | None = None
    """Gigabytes of 2**30 bytes that the committed checkpoints of this tier may take; the newest always stays."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise ConfigError(f"a tier is {self.path!r}, expected a directory or a URL such as s3://bucket/prefix")
        object.__setattr__(self, "path", _checked_path(os.fspath(self.path)))
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"tier {self.path}: {name} is {value!r}, expected a number from 1, or nothing")
        limit = self.limit_gb
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if limit is not None and not (is_number and math.isfinite(limit) and limit > 0):
            raise ConfigError(f"tier {self.path}: limit_gb is {limit!r}, expected gigabytes (2**30 bytes) > 0")

    @property
    def is_object_store(self) -> bool:
        return is_url(self.path)

    @property
    def limit_bytes(self) -> int | None:
        return None if self.limit_gb is None else int(self.limit_gb * _GIB)

    @property
    def has_retention(self) -> bool:
        return self.keep_last is not None or self.keep_every is not None or self.limit_gb is not None

    @property
    def key(self) -> str:
        """Names the tier in the records of a checkpoint that was carried to it."""
        return f"{zlib.crc32(self.path.encode('utf-8', 'surrogateescape')):08x}"

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)


TierLike: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | TierSettings"


def is_url(path: str) -> bool:
    return _SCHEME.match(path) is not None


def read_tiers(entries: Sequence[TierLike]) -> tuple[TierSettings, ...]:
    """The tiers of a config: each a path, a URL, or a mapping of the fields of `TierSettings`.

    Raises:
        ConfigError: an entry is wrong, the first one is no directory, or two are the same place.
    """
    if isinstance(entries, (str, bytes, Mapping)) or not isinstance(entries, Sequence):
        raise ConfigError(f"tiers is a {type(entries).__name__}, expected a list of tiers")
    tiers = tuple(_read_tier(entry) for entry in entries)
    if tiers and tiers[0].is_object_store:
        message = f"the first tier is {tiers[0].path}, expected a directory: checkpoints are saved there and carried on"
        raise ConfigError(message)
    for index, tier in enumerate(tiers):
        for other in tiers[:index]:
            places = _place_of(tier), _place_of(other)
            if _holds(*places) or _holds(*reversed(places)):
                raise ConfigError(f"tiers {other.path} and {tier.path} lie in each other, expected separate places")
    return tiers


def _read_tier(entry: TierLike) -> TierSettings:
    if isinstance(entry, TierSettings):
        return entry
    if not isinstance(entry, Mapping):
        return TierSettings(entry)  # type: ignore[arg-type]  # checked there
    known = [field.name for field in fields(TierSettings)]
    for name in entry:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"a tier has the unknown key {name!r}; did you mean {nearest!r}? Known: {known}")
    if "path" not in entry:
        raise ConfigError('a tier has no "path": expected a directory or a URL such as s3://bucket/prefix')
    return TierSettings(**entry)


def _checked_path(path: str) -> str:
    found = _SCHEME.match(path)
    if found is None:
        return os.path.abspath(path)
    scheme = found[1].lower()
    try:
        parts = urlsplit(path)
    except ValueError as error:
        raise ConfigError(f"a tier's {scheme}:// URL cannot be read") from error
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"a tier's {scheme}:// URL holds more than bucket and prefix (it is not shown, since it may hold a secret):"
            " credentials are taken from the environment"
        )
    if scheme == "file" and not parts.netloc:
        return os.path.abspath(parts.path)
    if scheme not in OBJECT_STORES or not parts.netloc:
        expected = ", ".join(f"{known}://bucket/prefix" for known in OBJECT_STORES)
        raise ConfigError(f"tier {path}: expected a directory or one of {expected}")
    if any(part in ("", ".", "..") for part in parts.path.strip("/").split("/")) and parts.path.strip("/"):
        raise ConfigError(f"tier {path}: expected a prefix without empty parts, '.' and '..'")
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _place_of(tier: TierSettings) -> str:
    """Where it is: links are followed, or a tier could be the first one by another name, and delete from it."""
    return tier.path if tier.is_object_store else os.path.realpath(tier.path)


def _holds(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")
