"""Names of files that are not complete yet: the final name, and the attempt that makes the file."""

from __future__ import annotations

import os
import re
import zlib

_PARTIAL_SUFFIX = ".datastates.partial"
_NAME_BYTES = 255 - len("..") - 64 - len(_PARTIAL_SUFFIX)  # a name has 255 bytes, an attempt at most 64
_PARTIAL_NAME = re.compile(r"\.(?P<name>.+)\.(?P<attempt>[A-Za-z0-9_-]+)\.datastates\.partial", re.DOTALL)
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")


def is_attempt(text: str) -> bool:
    """Whether the text can be an attempt's id: letters, digits, ``_`` and ``-``, at most 64."""
    return _ATTEMPT.fullmatch(text) is not None


def partial_path(path: str, attempt: str) -> str:
    """Where the file is made: a dot-name beside it, so that no pattern for final names finds it."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{_shortened(name)}.{attempt}{_PARTIAL_SUFFIX}")


def _shortened(name: str) -> str:
    """The name, or where a partial name would get too long its beginning and its CRC-32."""
    data = os.fsencode(name)
    if len(data) <= _NAME_BYTES:
        return name
    end = f"~{zlib.crc32(data):08x}"
    return data[: _NAME_BYTES - len(end)].decode("utf-8", "ignore") + end


def partial_attempt(name: str) -> str | None:
    """The attempt in the base name of a partial file, None for any other name."""
    match = _PARTIAL_NAME.fullmatch(name)
    return match["attempt"] if match else None
