"""Which bytes of a file belong to which tensor, so that damage has a name."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass

from datastates.contents.distributed_metadata import METADATA_NAME, SUFFIX, read_distributed
from datastates.contents.file_window import FileWindow
from datastates.contents.kinds import SAFETENSORS, ZIP, recognise
from datastates.contents.safetensors_header import LENGTH_BYTES, read_header
from datastates.contents.state_tree import PAD_NAME, TREE_NAME
from datastates.contents.stub_pickle import StubStructure, read_pickle
from datastates.contents.tensor_calls import storages_in
from datastates.contents.walk import leaves
from datastates.contents.zip_directory import ZipDirectory
from datastates.errors import CorruptCheckpointError
from datastates.reading import FileReader

HEADER = "header"
"""Name of all bytes that say where something is: headers, directories, padding."""
OBJECTS = "objects"
"""Name of the bytes of all that is no tensor: the pickle, or the tree of the state."""

PICKLE_NAME = "data.pkl"
STORAGE_PREFIX = "data/"


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file.

    Attributes:
        name: fqn of the (first) tensor whose bytes these are, or `HEADER` or `OBJECTS`.
        is_tensor: the name is an fqn.
        crc32: what the file itself says of these bytes, None where it says nothing.
    """

    begin: int
    end: int
    name: str
    is_tensor: bool
    crc32: int | None = None


def parts_of(file: FileReader) -> list[Part]:
    """The parts of a file that its directory or header tells apart, in order. What lies between is `HEADER`.

    Raises:
        CorruptCheckpointError: the directory or header is damaged.
        StorageError: the file cannot be read.
    """
    beside = os.path.join(os.path.dirname(file.path), METADATA_NAME)
    if file.path.endswith(SUFFIX) and os.path.isfile(beside):
        return _distributed_parts(file, beside)
    kind = recognise(file)
    if kind == ZIP:
        return _zip_parts(file)
    return _safetensors_parts(file) if kind == SAFETENSORS else [Part(0, file.nbytes, OBJECTS, False)]


def names_within(parts: Iterable[Part], begin: int, end: int) -> list[str]:
    """Names of the parts that reach into a range, tensors first; `HEADER` where there is none."""
    found = [part for part in parts if part.begin < end and part.end > begin]
    found.sort(key=lambda part: not part.is_tensor)
    return [part.name for part in found] or [HEADER]


def storage_names(data: bytes) -> dict[str, str]:
    """The fqn of the first tensor of each storage, by its key, from the pickle of a torch file.

    Empty where the pickle cannot be read: then nothing has a name.
    """
    names: dict[str, str] = {}
    try:
        for leaf in leaves(StubStructure(), read_pickle(data), len(data)):
            for storage in storages_in(leaf.node):
                names.setdefault(storage.key, leaf.fqn)
    except (pickle.UnpicklingError, ValueError):
        return names
    return names


def _zip_parts(file: FileReader) -> list[Part]:
    directory = ZipDirectory(file)
    try:
        fqns = storage_names(directory.content(PICKLE_NAME))
    except CorruptCheckpointError:
        fqns = {}  # the entries are still known by number
    parts = []
    for name, entry in directory.entries.items():
        crc = entry.crc32 if entry.is_checkable else None
        try:
            begin = directory.data_begin(entry)
        except CorruptCheckpointError:
            continue  # a damaged local header: these bytes are of the header
        end = begin + entry.stored_nbytes
        if name.startswith(STORAGE_PREFIX):
            key = name.removeprefix(STORAGE_PREFIX)
            parts.append(Part(begin, end, fqns.get(key, name), True, crc))
        else:
            parts.append(Part(begin, end, OBJECTS if name == PICKLE_NAME else HEADER, False, crc))
    return parts


def _distributed_parts(file: FileReader, beside: str) -> list[Part]:
    """What lies in one file of a distributed checkpoint: archive behind archive, as the metadata beside it say."""
    with FileReader(beside) as metadata:
        found = read_distributed(metadata)
    name = os.path.basename(file.path)
    places = sorted((place for place in found.places if place.file == name), key=lambda place: place.begin)
    parts = []
    for place in places:
        kind = found.kinds.get(place.fqn)
        is_tensor = kind is not None and kind.dtype is not None
        try:
            inner = _zip_parts(FileWindow(file, place.begin, place.end - place.begin))
        except CorruptCheckpointError:  # a value in another form, or its directory is damaged
            parts.append(Part(place.begin, place.end, place.fqn, is_tensor))
            continue
        for part in inner:
            ends = place.begin + part.begin, place.begin + part.end
            parts.append(Part(*ends, place.fqn, is_tensor and part.is_tensor, part.crc32))
    return parts


def _safetensors_parts(file: FileReader) -> list[Part]:
    header = read_header(file)
    begin = min((entry.begin for entry in header.entries.values()), default=file.nbytes)
    parts = [Part(0, max(begin, LENGTH_BYTES), HEADER, False)]
    for entry in header.entries.values():
        if entry.name in (TREE_NAME, PAD_NAME):
            parts.append(Part(entry.begin, entry.end, OBJECTS if entry.name == TREE_NAME else HEADER, False))
        else:
            parts.append(Part(entry.begin, entry.end, entry.name, True))
    return parts
