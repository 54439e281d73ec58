"""What a file holds, as a list: its tensors with dtype, shape and place, and everything else by its kind.

Nothing of the file is run or imported, so this works without torch, and where classes in the file do not exist.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from datastates.contents.dtypes import ITEMSIZES, SAFETENSORS_TYPES
from datastates.contents.kinds import LEGACY, SAFETENSORS, recognise
from datastates.contents.parts import PICKLE_NAME, STORAGE_PREFIX
from datastates.contents.safetensors_header import Header, read_header
from datastates.contents.state_tree import TREE_FAILURES, TreeStructure, bad_tree, read_tree, tensor_index
from datastates.contents.stub_pickle import Call, Global, StorageRef, StubStructure, read_pickle
from datastates.contents.tensor_calls import window_of
from datastates.contents.walk import Leaf, leaves
from datastates.contents.zip_directory import ZipDirectory
from datastates.errors import CorruptCheckpointError
from datastates.reading import FileReader

_TEXT_LENGTH = 80
_RECONSTRUCTORS = frozenset({"copyreg._reconstructor", "copy_reg._reconstructor"})


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor of a file.

    Attributes:
        fqn: its dotted name; tied tensors are listed under each of theirs.
        dtype: as torch calls it (``"float32"``), as safetensors does where torch has no such dtype.
        shape: its sizes.
        nbytes: of its elements.
        offset: of its first element, in bytes from the start of the file.
        storage: name of the storage in the file; tensors with the same one share bytes.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    storage: str


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """A leaf that is no (plain) tensor: its class by name, and what it is as far as that can be shown in a line."""

    fqn: str
    class_name: str
    text: str


@dataclass(frozen=True, slots=True)
class FileListing:
    """The leaves of a file's state.

    Attributes:
        path: the file.
        kind: ``"zip"`` (of torch) or ``"safetensors"``.
        nbytes: size of the file.
        tensors: in the order of the state.
        values: all other leaves, in the order of the state.
    """

    path: str
    kind: str
    nbytes: int
    tensors: tuple[TensorRecord, ...]
    values: tuple[ValueRecord, ...]


def list_file(path: str | os.PathLike[str]) -> FileListing:
    """List a file's state. Reads its header or directory, no tensor.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: it is malformed.
        pickle.UnpicklingError: it has torch's older form, which has no directory, or is compressed.
        StorageError: it cannot be read.
    """
    with FileReader(os.fspath(path)) as file:
        kind = recognise(file)
        if kind == LEGACY:
            message = f"{file.path} has the form of torch before 1.6, which cannot be listed: save it again"
            raise pickle.UnpicklingError(message)
        records = list(_safetensors(file) if kind == SAFETENSORS else _archive(file))
        tensors = tuple(record for record in records if isinstance(record, TensorRecord))
        values = tuple(record for record in records if isinstance(record, ValueRecord))
        return FileListing(file.path, kind, file.nbytes, tensors, values)


def _archive(file: FileReader) -> Iterator[TensorRecord | ValueRecord]:
    directory = ZipDirectory(file)
    entry = directory.entries.get(PICKLE_NAME)
    if entry is not None and not entry.is_stored:
        raise pickle.UnpicklingError(f"{file.path} is a compressed archive, which cannot be listed: save it again")
    pickled = directory.content(PICKLE_NAME)
    try:
        for leaf in leaves(StubStructure(), read_pickle(pickled), len(pickled)):
            window = window_of(leaf.node)
            if window is None:
                yield ValueRecord(leaf.fqn, *_described(leaf.node))
                continue
            entry = directory.entries.get(STORAGE_PREFIX + window.storage.key)
            if entry is None:
                raise ValueError(f"{leaf.fqn} refers to a storage {window.storage.key!r}, which is not in the file")
            offset = directory.data_begin(entry) + window.begin
            yield TensorRecord(leaf.fqn, window.dtype, window.shape, window.nbytes, offset, window.storage.key)
    except (pickle.UnpicklingError, ValueError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(f"{file.path} cannot be listed: {error}", file.path) from error


def _safetensors(file: FileReader) -> Iterator[TensorRecord | ValueRecord]:
    header = read_header(file)
    tree = read_tree(file, header)
    if tree is None:
        for entry in header.entries.values():
            dtype = SAFETENSORS_TYPES[entry.dtype][1] or entry.dtype
            yield TensorRecord(entry.name, dtype, entry.shape, entry.end - entry.begin, entry.begin, entry.name)
        return
    try:
        for leaf in leaves(TreeStructure(), tree["root"]):
            yield _tree_leaf(leaf, tree["tensors"], header)
    except CorruptCheckpointError:
        raise
    except TREE_FAILURES as error:
        raise bad_tree(file.path, error) from error


def _tree_leaf(leaf: Leaf, records: list[Any], header: Header) -> TensorRecord | ValueRecord:
    index = tensor_index(leaf.node)
    if index is None:
        return ValueRecord(leaf.fqn, *_described_node(leaf.node))
    record = records[index]
    entry = header.entries[record["name"]]
    shape = tuple(map(int, record["shape"]))
    nbytes = entry.end - entry.begin
    if record["dtype"] not in ITEMSIZES:
        raise ValueError(f"{leaf.fqn} has dtype {record['dtype']!r}")
    return TensorRecord(leaf.fqn, record["dtype"], shape, nbytes, entry.begin, entry.name)


def _described(node: Any) -> tuple[str, str]:
    """Class and text of what a pickle makes."""
    if isinstance(node, Global):
        return str(node), ""
    if isinstance(node, StorageRef):
        return "storage", ""
    if isinstance(node, Call):
        made_by = node.args[0] if node.class_name in _RECONSTRUCTORS and node.args else node.function
        return str(made_by) if isinstance(made_by, Global) else node.class_name, ""
    try:
        return type(node).__name__, _cut(repr(node))
    except ValueError:  # Python's limit on the digits of an int that is made a text
        return type(node).__name__, "(too many digits to be shown)"


def _described_node(node: Any) -> tuple[str, str]:
    """Class and text of a node of a tree."""
    if not isinstance(node, dict) or not node:
        return type(node).__name__, _cut(repr(node))
    tag, content = next(iter(node.items()))
    if tag == "pickle":
        return str(content["class"]), ""
    if tag == "array":
        return "numpy.ndarray", _cut(f"{content[0]} {content[1]}")
    return tag, "" if tag in ("bytes", "bytearray", "sparse") else _cut(str(content))


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 1] + "…"
