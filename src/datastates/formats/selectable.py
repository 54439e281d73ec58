"""The states of files as something of which parts can be loaded: leaves with names, and what each of them is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from datastates.contents.state_tree import TREE_FAILURES, TreeStructure, bad_tree, tensor_index, tensor_indices
from datastates.contents.stub_pickle import StubStructure, read_pickle
from datastates.contents.subset_pickle import write_pickle
from datastates.contents.tensor_calls import Window, storages_in, window_of
from datastates.contents.walk import Leaf, Path, leaves, pruned
from datastates.errors import CorruptCheckpointError
from datastates.formats.safetensors_load import SafetensorsFile, torch_form
from datastates.formats.torch_load import TorchArchive
from datastates.formats.torch_names import dtype_named
from datastates.reading import FileReader


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A strided tensor as it lies in the file.

    Attributes:
        begin: offset of its first element in the file.
        end: end of its last element in the file.
        stride: in elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    end: int


class Selectable(Protocol):
    """The state of one open file."""

    leaves: list[Leaf]

    def tensor(self, leaf: Leaf, /) -> FileTensor | None:
        """The tensor that a leaf is, None where more than its bytes is needed to make it."""

    def is_tensor(self, leaf: Leaf, /) -> bool:
        """Whether a leaf is a strided tensor."""

    def load_part(self, kept: set[Path], blank: set[Path]) -> tuple[Any, dict[Path, Path]]:
        """Load some leaves; of others only the places stay (see `walk.pruned`)."""

    def verify(self, found: Sequence[Leaf], is_whole: bool) -> None:
        """Compare the bytes of tensors with their checksums, or those of the whole file. Keeps nothing."""


class ArchiveState:
    """The state of an archive of ``torch.save``."""

    def __init__(self, archive: TorchArchive, path: str) -> None:
        """Read the structure. Raises CorruptCheckpointError."""
        self._archive = archive
        self._path = path
        try:
            self._root = read_pickle(archive.pickled)
            self.leaves = list(leaves(StubStructure(), self._root, len(archive.pickled)))
        except (pickle.UnpicklingError, ValueError) as error:
            raise CorruptCheckpointError(f"{path} cannot be loaded: {error}", path) from error

    def tensor(self, leaf: Leaf) -> FileTensor | None:
        window = self._window(leaf)
        if window is None or not window.is_raw or not self._archive.is_native:
            return None
        region = self._archive.region(window.storage.key)
        ends = region.begin + window.begin, region.begin + window.end
        if ends[1] > region.end:
            raise CorruptCheckpointError(f"{self._path}: {leaf.fqn} reaches beyond its storage", self._path, leaf.fqn)
        return FileTensor(dtype_named(window.dtype), window.shape, window.stride, *ends)

    def is_tensor(self, leaf: Leaf) -> bool:
        return self._window(leaf) is not None

    def load_part(self, kept: set[Path], blank: set[Path]) -> tuple[Any, dict[Path, Path]]:
        root, places = pruned(StubStructure(), self._root, kept, blank)
        try:
            pickled = write_pickle(root)
            keys = {storage.key for storage in storages_in(root)}
        except (pickle.PicklingError, ValueError) as error:
            raise CorruptCheckpointError(f"{self._path} cannot be loaded in parts: {error}", self._path) from error
        return self._archive.load(pickled, keys), places

    def verify(self, found: Sequence[Leaf], is_whole: bool) -> None:
        keys = {storage.key for leaf in found for storage in storages_in(leaf.node)}
        self._archive.verify(keys, is_whole)

    def _window(self, leaf: Leaf) -> Window | None:
        try:
            return window_of(leaf.node)
        except ValueError as error:
            raise CorruptCheckpointError(f"{self._path}: {leaf.fqn}: {error}", self._path, leaf.fqn) from error


class TreeState:
    """The state of a safetensors file of ours."""

    def __init__(self, file: SafetensorsFile, tree: Mapping[str, Any], path: str) -> None:
        """Take over the structure. Raises CorruptCheckpointError."""
        self._file = file
        self._path = path
        self._root = tree["root"]
        try:
            self.leaves = list(leaves(TreeStructure(), self._root))
        except TREE_FAILURES as error:
            raise bad_tree(path, error) from error

    def tensor(self, leaf: Leaf) -> FileTensor | None:
        index = self._index(leaf)
        if index is None:
            return None
        entry = self._file.entry_of(index)
        stride = torch.empty(entry.shape, device="meta").stride()
        return FileTensor(dtype_named(entry.dtype), entry.shape, stride, entry.begin, entry.end)

    def is_tensor(self, leaf: Leaf) -> bool:
        return self._index(leaf) is not None

    def load_part(self, kept: set[Path], blank: set[Path]) -> tuple[Any, dict[Path, Path]]:
        root, places = pruned(TreeStructure(), self._root, kept, blank)
        try:
            indices = set(tensor_indices(root))
        except TREE_FAILURES as error:
            raise bad_tree(self._path, error) from error
        return self._file.load(root, indices), places

    def verify(self, found: Sequence[Leaf], is_whole: bool) -> None:
        indices = [index for leaf in found if (index := self._index(leaf)) is not None]
        self._file.verify({self._file.entry_of(index).name for index in indices}, is_whole)

    def _index(self, leaf: Leaf) -> int | None:
        try:
            return tensor_index(leaf.node)
        except TREE_FAILURES as error:
            raise bad_tree(self._path, error) from error


class FlatState:
    """The tensors of a safetensors file of somebody else, by name."""

    def __init__(self, file: SafetensorsFile, path: str) -> None:
        self._file = file
        self._path = path
        self._entries = list(file.header.entries.values())
        self.leaves = [Leaf(entry.name, (position,), entry) for position, entry in enumerate(self._entries)]

    def tensor(self, leaf: Leaf) -> FileTensor | None:
        dtype, shape = torch_form(leaf.node, self._path)
        stride = torch.empty(shape, device="meta").stride()
        return FileTensor(dtype, tuple(shape), stride, leaf.node.begin, leaf.node.end)

    def is_tensor(self, _leaf: Leaf) -> bool:
        return True

    def load_part(self, kept: set[Path], blank: set[Path]) -> tuple[Any, dict[Path, Path]]:
        loaded = self._file.load_flat(leaf.fqn for leaf in self.leaves if leaf.path in kept)
        state: dict[str, torch.Tensor | None] = {}
        places: dict[Path, Path] = {}
        for leaf in self.leaves:
            if leaf.path in blank or leaf.path in kept:
                places[leaf.path] = (len(state),)
                state[leaf.fqn] = loaded.get(leaf.fqn)
        return state, places

    def verify(self, found: Sequence[Leaf], is_whole: bool) -> None:
        self._file.verify([leaf.fqn for leaf in found], is_whole)


class ObjectStructure:
    """How a state in memory hangs together (`walk.Structure`)."""

    def children(self, node: Any) -> Sequence[tuple[object, Any]] | None:
        if isinstance(node, dict):
            return list(node.items())
        return list(enumerate(node)) if type(node) in (list, tuple) else None

    def is_sequence(self, node: Any) -> bool:
        return not isinstance(node, dict)

    def rebuilt(self, node: Any, kept: Mapping[int, Any]) -> Any:
        if not isinstance(node, dict):
            return type(node)(kept.get(position) for position in range(len(node)))
        keys = list(node)
        chosen = {keys[position]: child for position, child in kept.items()}
        made = copy.copy(node)  # a subclass may need more than its members
        made.clear()
        made.update(chosen)
        return made


class LoadedState:
    """A state that had to be loaded as a whole: of a file of torch's older format, or compressed."""

    def __init__(self, state: Any, file: FileReader) -> None:
        """Take over the state. Raises CorruptCheckpointError where it has no end."""
        self._root = state
        try:
            self.leaves = list(leaves(ObjectStructure(), state, file.nbytes))
        except ValueError as error:
            raise CorruptCheckpointError(f"{file.path} cannot be loaded in parts: {error}", file.path) from error

    def tensor(self, _leaf: Leaf) -> FileTensor | None:
        return None

    def is_tensor(self, leaf: Leaf) -> bool:
        return isinstance(leaf.node, torch.Tensor)

    def load_part(self, kept: set[Path], blank: set[Path]) -> tuple[Any, dict[Path, Path]]:
        return pruned(ObjectStructure(), self._root, kept, blank)

    def verify(self, found: Sequence[Leaf], is_whole: bool) -> None:
        """What has been loaded was checked then, as far as it can be."""
