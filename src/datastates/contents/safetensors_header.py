"""The header of a safetensors file, read and checked clause by clause.

Source: the README of huggingface/safetensors, "Format", and ``validate`` in ``safetensors/src/tensor.rs``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from datastates.contents.dtypes import SAFETENSORS_TYPES
from datastates.errors import CorruptCheckpointError
from datastates.reading import FileReader

LENGTH_BYTES = 8

#: The stock library reads no longer ones.
#: Source: ``MAX_HEADER_SIZE`` in ``safetensors/src/tensor.rs``.
MAX_HEADER_BYTES = 100_000_000

#: The one name in the header that is no tensor's.
METADATA_NAME = "__metadata__"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file: ``[begin, end)`` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the header says: the tensors in the order of the file, and the free texts."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(file: FileReader) -> Header:
    """The header of a file.

    Raises:
        CorruptCheckpointError: it is malformed, or its tensors do not fill the file exactly.
        StorageError: the file cannot be read.
    """
    prefix = file.read(0, min(LENGTH_BYTES, file.nbytes))
    length = header_length(prefix, file.nbytes, file.path)
    return parse_header(file.read(LENGTH_BYTES, length), file.nbytes, file.path)


def header_length(prefix: bytes, file_nbytes: int, path: str) -> int:
    """Length of the JSON text, from the first eight bytes.

    Raises:
        CorruptCheckpointError: the file is shorter than its header, or the length is out of bounds.
    """
    if len(prefix) < LENGTH_BYTES:
        raise _corrupt(path, "the file", f"at least {LENGTH_BYTES} bytes", f"{file_nbytes}", 0)
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise _corrupt(path, "the header's length", f"at most {MAX_HEADER_BYTES} bytes", f"{length}", 0)
    if LENGTH_BYTES + length > file_nbytes:
        expected = f"a file of at least {LENGTH_BYTES + length} bytes for a header of {length}"
        raise _corrupt(path, "the header", expected, f"{file_nbytes} bytes", 0)
    return length


def parse_header(text: bytes, file_nbytes: int, path: str) -> Header:
    """Read the JSON text and check that the tensors fill the rest of the file exactly.

    Raises:
        CorruptCheckpointError: names what is wrong, what was expected and what was found.
    """
    raw = _json(text, path)
    metadata = raw.pop(METADATA_NAME, None)
    metadata = {} if metadata is None else metadata  # the stock library reads null as none, too
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(path, METADATA_NAME, "an object of strings", type(metadata).__name__, LENGTH_BYTES)
    data_begin = LENGTH_BYTES + len(text)
    entries = [_entry(name, value, data_begin, path) for name, value in raw.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = data_begin
    for entry in entries:
        if entry.begin != position:
            raise _corrupt(path, f"tensor {entry.name!r}", f"to begin at {position}", f"{entry.begin}", entry.begin)
        position = entry.end
    if position != file_nbytes:
        what = "missing" if position > file_nbytes else "left over"
        found = f"{file_nbytes} ({abs(position - file_nbytes)} {what})"
        raise _corrupt(path, "the file", f"{position} bytes by its header", found, min(position, file_nbytes))
    return Header({entry.name: entry for entry in entries}, metadata)


def _json(text: bytes, path: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            names = [name for name, _ in pairs]
            double = next(name for name in names if names.count(name) > 1)
            raise _corrupt(path, "the header", "every name once", f"{double!r} twice", LENGTH_BYTES)
        return members

    if not text.startswith(b"{"):
        raise _corrupt(path, "the header", "JSON that begins with '{'", repr(text[:1]), LENGTH_BYTES)
    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CorruptCheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, "the header", "valid JSON in UTF-8", str(error), LENGTH_BYTES) from error
    if not isinstance(raw, dict):
        raise _corrupt(path, "the header", "a JSON object", type(raw).__name__, LENGTH_BYTES)
    return raw


def _entry(name: str, value: Any, data_begin: int, path: str) -> Entry:
    what = f"tensor {name!r}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise _corrupt(path, what, "dtype, shape and data_offsets", str(found), LENGTH_BYTES, name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_TYPES:
        raise _corrupt(path, f"the dtype of {what}", "a name of safetensors 0.8", repr(dtype), LENGTH_BYTES, name)
    if not _is_sizes(shape):
        raise _corrupt(path, f"the shape of {what}", "sizes of zero or more", repr(shape), LENGTH_BYTES, name)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _corrupt(path, f"the offsets of {what}", "[begin, end] in order", repr(offsets), LENGTH_BYTES, name)
    begin, end = offsets
    bits = math.prod(shape) * SAFETENSORS_TYPES[dtype][0]
    if bits != (end - begin) * 8:
        expected = f"{bits / 8:g} bytes for {dtype} of shape {shape}"
        raise _corrupt(path, what, expected, f"{end - begin}", data_begin + begin, name)
    return Entry(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _corrupt(
    path: str, what: str, expected: str, found: str, offset: int | None, fqn: str = ""
) -> CorruptCheckpointError:
    message = f"{path}: {what} is wrong: expected {expected}, found {found}; the file is damaged or incomplete"
    return CorruptCheckpointError(message, path, fqn, offset)
