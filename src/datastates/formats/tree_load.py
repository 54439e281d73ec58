"""The way back from the JSON tree of `formats.tree` to a state."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch

from datastates.errors import ForeignObjectError
from datastates.formats.foreign import ForeignUnpickler
from datastates.formats.leaves import FACTORIES, LEAF_DECODERS, from_base64, string_of
from datastates.formats.pickling import PICKLE_FAILURES
from datastates.formats.torch_names import torch_named

try:
    import numpy
except ImportError:  # needed only where the file holds arrays
    numpy = None  # type: ignore[assignment]

Node = Any

_layout_named = torch_named(torch.layout)


class TreeDecoder:
    """Turns nodes into values.

    Malformed nodes raise `TypeError`, `ValueError`, `LookupError` or `AttributeError`; the caller, who knows the file,
    makes an error of the project of them.
    """

    def __init__(
        self, tensor: Callable[[int], torch.Tensor], array_bytes: Callable[[str], bytearray], weights_only: bool
    ) -> None:
        """Args:
        tensor: gives the tensor of an index in the table; the same object for the same index.
        array_bytes: gives the bytes of a stored tensor by name.
        weights_only: refuse objects that are no plain data.
        """
        self._tensor = tensor
        self._array_bytes = array_bytes
        self._weights_only = weights_only

    def decode(self, node: Node) -> Any:
        """The value of a node.

        Raises:
            ForeignObjectError: the node is a pickled object, and it fails to load or ``weights_only`` is set.
        """
        if not isinstance(node, (dict, list)):
            return node
        if isinstance(node, list):
            return [self.decode(child) for child in node]
        if len(node) != 1:
            raise ValueError(f"a node of the tree has {len(node)} members, expected 1")
        ((tag, content),) = node.items()
        leaf = LEAF_DECODERS.get(tag)
        return leaf(content) if leaf is not None else _DECODERS[tag](self, content)

    def _pairs(self, content: Node) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in content]

    def _counter(self, content: Node) -> collections.Counter[Any]:
        counter: collections.Counter[Any] = collections.Counter()
        for key, count in self._pairs(content):
            dict.__setitem__(counter, key, count)
        return counter

    def _defaultdict(self, content: Node) -> Any:
        name, pairs = content
        return collections.defaultdict(None if name is None else FACTORIES[name], self._pairs(pairs))

    def _buffer(self, content: Node) -> torch.Tensor:
        index, is_persistent = content
        return torch.nn.Buffer(self._tensor(index), persistent=is_persistent)

    def _sparse(self, content: Node) -> torch.Tensor:
        """Checks the indices: those of a changed file could lead outside of memory."""
        name, *nodes = content
        layout, parts = _layout_named(name), [self.decode(node) for node in nodes]
        has_data = not parts[0].is_meta
        if layout is torch.sparse_coo:
            indices, values, size, is_coalesced = parts
            return torch.sparse_coo_tensor(indices, values, size, check_invariants=has_data, is_coalesced=is_coalesced)
        compressed, plain, values, size = parts
        make = torch.sparse_compressed_tensor
        return make(compressed, plain, values, size, layout=layout, check_invariants=has_data)

    def _array(self, content: Node) -> Any:
        description, shape, source = content
        data = bytearray(from_base64(source)) if isinstance(source, str) else self._array_bytes(source["name"])
        dtype = _numpy().dtype(description)
        if not data:
            return _numpy().empty(shape, dtype)
        return _numpy().frombuffer(data, dtype).reshape(shape)

    def _scalar(self, content: Node) -> Any:
        description, data = content
        raw = from_base64(data)
        dtype = _numpy().dtype(description)
        return _numpy().frombuffer(raw, dtype)[0] if raw else _numpy().zeros((), dtype)[()]

    def _foreign(self, content: Node) -> Any:
        fqn = string_of(content["fqn"])
        if self._weights_only:
            raise ForeignObjectError(
                f"{fqn or 'the state'} is an object of class {content['class']}, which loads only by running code; "
                "pass weights_only=False if you trust the file",
                fqn,
                content["class"],
            )
        try:
            return ForeignUnpickler(from_base64(content["data"]), self._tensor).load()
        except PICKLE_FAILURES as error:
            raise ForeignObjectError(
                f"{fqn or 'the state'}, an object of class {content['class']}, fails to load: {error}",
                fqn,
                content["class"],
            ) from error
        finally:
            torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]  # else torch keeps them


def _numpy() -> Any:
    if numpy is None:
        raise ModuleNotFoundError("the state holds numpy arrays: install numpy to load it", name="numpy")
    return numpy


_DECODERS: dict[str, Callable[[TreeDecoder, Node], Any]] = {
    "tuple": lambda self, content: tuple(map(self.decode, content)),
    "set": lambda self, content: set(map(self.decode, content)),
    "frozenset": lambda self, content: frozenset(map(self.decode, content)),
    "deque": lambda self, content: collections.deque(map(self.decode, content[1]), content[0]),
    "slice": lambda self, content: slice(*map(self.decode, content)),
    "dict": lambda self, content: dict(self._pairs(content)),
    "OrderedDict": lambda self, content: collections.OrderedDict(self._pairs(content)),
    "Counter": TreeDecoder._counter,
    "defaultdict": TreeDecoder._defaultdict,
    "tensor": lambda self, content: self._tensor(content),
    "buffer": TreeDecoder._buffer,
    "sparse": TreeDecoder._sparse,
    "array": TreeDecoder._array,
    "scalar": TreeDecoder._scalar,
    "pickle": TreeDecoder._foreign,
}
