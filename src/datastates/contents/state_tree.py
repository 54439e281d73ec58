"""The tree of a state in our safetensors files, as nodes of JSON: its leaves and their names.

What nodes are there is said in `formats.tree`, which writes them.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from datastates.contents.safetensors_header import Header
from datastates.contents.stub_pickle import StorageRef, objects_in, read_pickle
from datastates.errors import CorruptCheckpointError
from datastates.reading import FileReader

METADATA_KEY = "datastates"
TREE_VERSION = 1

#: Names that mean something in our files; a tensor of the user never gets one.
TREE_NAME = "__datastates__.tree"
PAD_NAME = "__datastates__.pad"

Node = Any

#: What a tree raises while it is decoded, if it is not one of ours or was changed.
TREE_FAILURES = (
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)

_MAPPINGS = frozenset({"dict", "OrderedDict", "Counter"})


def read_tree(file: FileReader, header: Header) -> dict[str, Any] | None:
    """The tree of the state, from the metadata or from the tensor that they name; None in files of others.

    Its members are ``root``, a node, and ``tensors``, a list of records.

    Raises:
        CorruptCheckpointError: it is malformed, or of another version.
    """
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        return None
    try:
        tree = json.loads(text)
        _check_version(tree, file.path)
        if "tensor" in tree:
            entry = header.entries[tree["tensor"]]
            tree = json.loads(file.read(entry.begin, entry.end - entry.begin))
            _check_version(tree, file.path)
        if not isinstance(tree["tensors"], list):
            raise TypeError("the table of tensors is no list")
        tree["root"]
    except CorruptCheckpointError:
        raise
    except TREE_FAILURES as error:
        raise bad_tree(file.path, error) from error
    return tree  # type: ignore[no-any-return]


def bad_tree(path: str, error: Exception) -> CorruptCheckpointError:
    """The error for a tree that raised ``error`` while it was decoded."""
    return CorruptCheckpointError(
        f"{path}: the tree of the state is malformed ({error!s:.200}); the file is damaged", path
    )


def tensor_index(node: Node) -> int | None:
    """The index of the record of a tensor, None where a leaf is something else."""
    if not isinstance(node, dict):
        return None
    if "buffer" in node:
        return int(node["buffer"][0])
    return int(node["tensor"]) if "tensor" in node else None


def tensor_indices(node: Node) -> Iterator[int]:
    """The indices of all tensors that a node refers to, also from within a pickle.

    Raises:
        ValueError: a pickle is malformed (`pickle.UnpicklingError` is turned into it).
    """
    todo = [node]
    while todo:
        current = todo.pop()
        if isinstance(current, list):
            todo += current
            continue
        index = tensor_index(current)
        if index is not None:
            yield index
        elif isinstance(current, dict) and "pickle" in current:
            yield from _indices_in_pickle(base64.b64decode(current["pickle"]["data"], validate=True))
        elif isinstance(current, dict):
            todo += current.values()


def _indices_in_pickle(data: bytes) -> Iterator[int]:
    try:
        found = read_pickle(data)
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from error
    for reference in objects_in(found):
        if isinstance(reference, StorageRef):
            yield int(reference.pid[1])


class TreeStructure:
    """How the nodes of a tree hang together (`walk.Structure`). Malformed ones raise what `TREE_FAILURES` names."""

    def children(self, node: Node) -> Sequence[tuple[object, Node]] | None:
        if isinstance(node, list):
            return list(enumerate(node))
        if not isinstance(node, dict):
            return None
        tag, content = _tagged(node)
        if tag in _MAPPINGS:
            return [(_key(key), value) for key, value in content]
        if tag == "defaultdict":
            return [(_key(key), value) for key, value in content[1]]
        return list(enumerate(content)) if tag == "tuple" else None

    def is_sequence(self, node: Node) -> bool:
        return isinstance(node, list) or "tuple" in node

    def rebuilt(self, node: Node, kept: Mapping[int, Node]) -> Node:
        if isinstance(node, list):
            return [kept.get(position) for position in range(len(node))]
        tag, content = _tagged(node)
        if tag == "tuple":
            return {tag: [kept.get(position) for position in range(len(content))]}
        pairs = content[1] if tag == "defaultdict" else content
        pairs = [[pairs[position][0], child] for position, child in kept.items()]
        return {tag: [content[0], pairs] if tag == "defaultdict" else pairs}


def _tagged(node: dict[str, Any]) -> tuple[str, Any]:
    if len(node) != 1:
        raise ValueError(f"a node of the tree has {len(node)} members, expected 1")
    return next(iter(node.items()))


def _key(node: Node) -> object:
    """A key as the names of the leaves show it."""
    if not isinstance(node, dict):
        return node
    tag, content = _tagged(node)
    if tag == "int":
        return int(content, 16)
    if tag == "tuple":
        return tuple(map(_key, content))
    return json.dumps(node)


def _check_version(tree: Any, path: str) -> None:
    if tree["version"] != TREE_VERSION:
        raise CorruptCheckpointError(
            f"{path}: the tree has version {tree['version']!r}, this datastates reads {TREE_VERSION}; "
            "load it with the version that wrote it",
            path,
        )
