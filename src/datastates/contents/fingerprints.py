"""Fingerprints of the values of a file, by which two files can be compared without running anything of them.

A fingerprint covers all that a value is made of, also the elements of arrays and of tensors inside of objects, which a
listing shows in part or not at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from datastates.contents.kinds import SAFETENSORS, recognise
from datastates.contents.parts import PICKLE_NAME, STORAGE_PREFIX
from datastates.contents.safetensors_header import Entry, read_header
from datastates.contents.state_tree import TREE_FAILURES, TreeStructure, bad_tree, read_tree, tensor_index
from datastates.contents.stub_pickle import Call, Global, StorageRef, StubStructure, read_pickle
from datastates.contents.tensor_calls import storage_of, window_of
from datastates.contents.walk import leaves
from datastates.contents.zip_directory import ZipDirectory
from datastates.errors import CorruptCheckpointError
from datastates.reading import FileReader

_CHUNK_BYTES = 4 << 20
_FEW_NODES = 10_000
_NODES_PER_BYTE = 4  # more there are only where a value repeats itself again and again

#: Their elements are saved in an order that differs from process to process.
_SETS = frozenset({"__builtin__.set", "__builtin__.frozenset", "builtins.set", "builtins.frozenset"})
_SET_TAGS = frozenset({"set", "frozenset"})

_Expand = Callable[[Any], list[Any] | None]


def value_fingerprints(path: str | os.PathLike[str]) -> list[bytes]:
    """The fingerprints of a file's leaves that are no tensors, in the order of `listing.FileListing.values`.

    Equal ones mean equal values within one kind of file; different ones mean different values, or equal ones of which
    parts are shared in the one file and copied in the other. Reads the bytes of what lies outside of the structure.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: it is malformed.
        StorageError: it cannot be read.
    """
    with FileReader(os.fspath(path)) as file:
        return list(_of_tree(file) if recognise(file) == SAFETENSORS else _of_archive(file))


def _of_archive(file: FileReader) -> Iterator[bytes]:
    directory = ZipDirectory(file)
    pickled = directory.content(PICKLE_NAME)

    def storage(reference: StorageRef) -> list[Any]:
        info = storage_of(reference)
        entry = directory.entries.get(STORAGE_PREFIX + info.key)
        if entry is None:
            raise ValueError(f"a value refers to a storage {info.key!r}, which is not in the file")
        begin = directory.data_begin(entry)
        return [str(reference.pid[1]), _digest(file, begin, begin + entry.nbytes)]

    try:
        for leaf in leaves(StubStructure(), read_pickle(pickled), len(pickled)):
            if window_of(leaf.node) is None:
                yield _fingerprint(leaf.node, lambda node: _parts_of_stub(node, storage), len(pickled))
    except (pickle.UnpicklingError, ValueError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(f"{file.path} cannot be compared: {error}", file.path) from error


def _of_tree(file: FileReader) -> Iterator[bytes]:
    header = read_header(file)
    tree = read_tree(file, header)
    if tree is None:
        return

    def content(entry: Entry) -> bytes:
        return _digest(file, entry.begin, entry.end)

    def tensor(index: int) -> list[Any]:
        record = tree["tensors"][index]
        return [record["dtype"], record["shape"], content(header.entries[record["name"]])]

    def reference(found: StorageRef) -> list[Any]:
        return [*map(str, found.pid[2:]), *tensor(int(found.pid[1]))]

    def expand(node: Any) -> list[Any] | None:
        if not isinstance(node, dict):
            return node if isinstance(node, list) else None
        index = tensor_index(node)
        if index is not None:
            return tensor(index)
        if "pickle" in node:
            data = base64.b64decode(node["pickle"]["data"], validate=True)
            return [_fingerprint(read_pickle(data), lambda part: _parts_of_stub(part, reference), len(data))]
        if node.keys() == {"name"}:
            return [content(header.entries[node["name"]])]
        ((tag, parts),) = node.items()
        return [tag, sorted(parts, key=json.dumps) if tag in _SET_TAGS else parts]

    try:
        for leaf in leaves(TreeStructure(), tree["root"]):
            if tensor_index(leaf.node) is None:
                yield _fingerprint(leaf.node, expand, file.nbytes)
    except CorruptCheckpointError:
        raise
    except (*TREE_FAILURES, pickle.UnpicklingError) as error:
        raise bad_tree(file.path, error) from error


def _parts_of_stub(node: Any, storage: Callable[[StorageRef], list[Any]]) -> list[Any] | None:
    """What a node of a pickle is made of; None for plain values."""
    if isinstance(node, StorageRef):
        return storage(node)
    if isinstance(node, Call):
        args = node.args
        if node.class_name in _SETS and isinstance(args, tuple) and len(args) == 1 and isinstance(args[0], list):
            args = sorted(args[0], key=repr)
        return [node.function, args, node.kwargs, node.has_state, node.state, node.items, node.elements]
    if isinstance(node, dict):
        return [part for item in node.items() for part in item]
    if isinstance(node, (set, frozenset)):
        return sorted(node, key=repr)
    return list(node) if isinstance(node, (list, tuple)) else None


def _fingerprint(root: Any, expand: _Expand, nbytes: int) -> bytes:
    """Hash a value part by part. What contains itself, or is there twice, is referred to by its number."""
    hasher = hashlib.blake2b(digest_size=16)
    numbers: dict[int, int] = {}
    kept: list[Any] = []  # so that the ids of what is made on the way stay their own
    todo, count = [root], 0
    while todo:
        node = todo.pop()
        count += 1
        if count > _FEW_NODES + _NODES_PER_BYTE * nbytes:
            raise ValueError(f"a value has more than {count - 1} parts in {nbytes} bytes")
        if isinstance(node, (list, dict, Call)):
            number = numbers.setdefault(id(node), len(kept))
            if number < len(kept):
                hasher.update(b"again %d;" % number)
                continue
            kept.append(node)
        parts = expand(node)
        if parts is None:
            text = _text(node)
            hasher.update(b"%s %d %s;" % (type(node).__name__.encode(), len(text), text))
        else:
            hasher.update(b"%s of %d;" % (type(node).__name__.encode(), len(parts)))
            todo += reversed(parts)
    return hasher.digest()


def _text(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, int):
        return b"%x" % value  # decimal digits are limited, and slow to make
    return (str(value) if isinstance(value, (str, Global)) else repr(value)).encode("utf-8", "surrogatepass")


def _digest(file: FileReader, begin: int, end: int) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for position in range(begin, end, _CHUNK_BYTES):
        hasher.update(file.read(position, min(_CHUNK_BYTES, end - position)))
    return hasher.digest()
