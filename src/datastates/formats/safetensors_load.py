"""From a safetensors file back to the state: ours with its tree, anybody's as a flat dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from datastates.contents.dtypes import SAFETENSORS_TYPES
from datastates.contents.parts import parts_of
from datastates.contents.safetensors_header import Entry, Header, read_header
from datastates.contents.state_tree import TREE_FAILURES, bad_tree, read_tree
from datastates.errors import CorruptCheckpointError, ForeignObjectError
from datastates.formats.dtypes import SAFETENSORS_DTYPES
from datastates.formats.request import MapLocationError, Request, guarded, is_about_devices, raise_damage, verify
from datastates.formats.storages import MAX_ALIGNMENT, Checksums, MappedStorages, Region, Storages
from datastates.formats.torch_names import dtype_named
from datastates.formats.tree_load import TreeDecoder
from datastates.reading import FileReader

RestoreLocation = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]


class SafetensorsFile:
    """An open safetensors file: its header, and the tree of the state where it is one of ours.

    Attributes:
        header: as it stands in the file, checked.
        tree: ``root`` and ``tensors`` (see `contents.state_tree`), None in files of others.
    """

    def __init__(self, file: FileReader, request: Request) -> None:
        """Read header and tree. Raises CorruptCheckpointError."""
        self._file = file
        self._request = request
        self.header = read_header(file)
        self.tree = read_tree(file, self.header)

    def load_flat(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors by name, as the stock library gives them.

        Raises:
            CorruptCheckpointError: the file is damaged, or of a dtype that this torch has not.
            StorageError: the file cannot be read.
        """
        entries = [self.header.entries[name] for name in names]
        wanted = [_Wanted(entry, SAFETENSORS_TYPES[entry.dtype][0] // 8, "cpu") for entry in entries]
        tensors = self._tensors(wanted, len(entries) == len(self.header.entries))
        try:
            state = {entry.name: tensors.foreign(entry) for entry in entries}
        except MapLocationError as error:
            raise error.__cause__ or error from None
        tensors.finish()
        return state

    def load(self, root: Any, indices: set[int] | None = None) -> Any:
        """The state that a node of the tree describes.

        Args:
            root: the node; its tensors are those of the whole tree.
            indices: of the tensors in it; None: all.

        Raises:
            CorruptCheckpointError: the file is damaged.
            ForeignObjectError: an object that is no plain data fails to load, or ``weights_only`` is set.
            StorageError: the file cannot be read.
        """
        if self.tree is None:
            raise ValueError(f"{self._file.path} has no tree")
        try:
            records = {
                index: self._record(record)
                for index, record in enumerate(self.tree["tensors"])
                if indices is None or index in indices
            }
            wanted = [_Wanted(record.entry, record.dtype.itemsize, record.device) for record in records.values()]
            tensors = self._tensors(wanted, indices is None)
            tensors.records = records
            state = TreeDecoder(tensors.ours, tensors.raw, self._request.weights_only).decode(root)
            tensors.finish()
        except (CorruptCheckpointError, ForeignObjectError, OSError):
            raise
        except MapLocationError as error:
            raise error.__cause__ or error from None
        except TREE_FAILURES as error:
            if is_about_devices(error):
                raise
            raise bad_tree(self._file.path, error) from error
        return state

    def entry_of(self, index: int) -> Entry:
        """The entry of a tensor of the tree, with dtype and shape as the tree says. Raises as `load` does."""
        try:
            record = self._record((self.tree or {})["tensors"][index])
        except TREE_FAILURES as error:
            raise bad_tree(self._file.path, error) from error
        dtype = str(record.dtype).removeprefix("torch.")
        return Entry(record.entry.name, dtype, tuple(record.shape), record.entry.begin, record.entry.end)

    def verify(self, names: Iterable[str], is_whole: bool) -> None:
        """Compare the bytes of entries with the checksums that cover nothing else; keeps nothing.

        Raises:
            CorruptCheckpointError: they differ.
            StorageError: the file cannot be read.
        """
        entries = [self.header.entries[name] for name in names]
        regions = [Region(entry.name, entry.begin, entry.end) for entry in entries]
        verify(self._file, regions, Checksums(self._request.slabs), is_whole)

    def _record(self, record: dict[str, Any]) -> _Record:
        entry, dtype = self.header.entries[record["name"]], dtype_named(record["dtype"])
        found, expected = entry.end - entry.begin, torch.Size(record["shape"]).numel() * dtype.itemsize
        if found != expected:
            raise ValueError(f"{entry.name!r} has {found} bytes, the tree expects {expected}")
        flags = bool(record.get("requires_grad")), bool(record.get("parameter"))
        return _Record(entry, dtype, record["shape"], str(record["device"]), *flags)

    def _tensors(self, wanted: list[_Wanted], is_whole: bool = False) -> _Tensors:
        return _Tensors(self._file, self.header, self._request, wanted, is_whole)


@dataclass(frozen=True, slots=True)
class _Record:
    """A tensor as the tree describes it."""

    entry: Entry
    dtype: torch.dtype
    shape: list[int]
    device: str
    requires_grad: bool
    is_parameter: bool


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An entry, of how many bytes its elements are as a tensor, and where that was when it was saved."""

    entry: Entry
    itemsize: int
    location: str


class _Tensors:
    """The tensors of one file; equal names share their memory.

    Attributes:
        records: of the tensors that the tree describes, by index.
    """

    def __init__(
        self, file: FileReader, header: Header, request: Request, wanted: list[_Wanted], is_whole: bool
    ) -> None:
        """Read the bytes of all that is wanted, to the host or to the devices where they belong."""
        self._file = file
        self._header = header
        self._checksums = Checksums(request.slabs if request.check else ())
        map_location = guarded(request.map_location)
        self._restore: RestoreLocation = torch.serialization._get_restore_location(map_location)  # type: ignore[no-untyped-call]
        self._is_meta = request.target is not None and request.target.type == "meta"
        self.records: dict[int, _Record] = {}
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._made: dict[int, torch.Tensor] = {}
        regions = _regions(wanted)
        self._source: Storages | MappedStorages
        if request.mmap:
            self._source = MappedStorages(file, regions)
            return
        places = {one.entry.name: request.device_of(one.location) for one in wanted}
        devices = {name: device for name, device in places.items() if device is not None}
        self._source = Storages(file, regions, self._checksums if self._checksums.checks else None, devices)
        if not self._is_meta:
            self._source.read(whole_file=is_whole and bool(self._checksums.checks))
            self._raise_damage()

    def finish(self) -> None:
        """All tensors are made: compare what has been read since with its checksums. Raises CorruptCheckpointError."""
        self._raise_damage()

    def ours(self, index: int) -> torch.Tensor:
        """The tensor of a record of the tree."""
        made = self._made.get(index)
        if made is None:
            record = self.records[index]
            made = _window(self._storage(record.entry, record.device), record.dtype, record.shape)
            if record.is_parameter:
                made = torch.nn.Parameter(made, requires_grad=record.requires_grad)
            elif record.requires_grad:
                made.requires_grad_(True)
            self._made[index] = made
        return made

    def foreign(self, entry: Entry) -> torch.Tensor:
        """The tensor of an entry that no tree describes."""
        dtype, shape = torch_form(entry, self._file.path)
        return _window(self._storage(entry, "cpu"), dtype, shape)

    def raw(self, name: str) -> bytearray:
        """The bytes of an entry."""
        entry = self._header.entries[name]
        return bytearray(self._file.read(entry.begin, entry.end - entry.begin))

    def _storage(self, entry: Entry, location: str) -> torch.UntypedStorage:
        storage = self._storages.get(entry.name)
        if storage is None:
            if self._is_meta:
                storage = torch.empty(entry.end - entry.begin, dtype=torch.uint8, device="meta").untyped_storage()
            else:
                storage = self._restore(self._source.take(entry.name).untyped_storage(), location)
            self._storages[entry.name] = storage
        return storage

    def _raise_damage(self) -> None:
        raise_damage(self._file, self._checksums, lambda: parts_of(self._file))


def _regions(wanted: list[_Wanted]) -> list[Region]:
    """Each entry once, at an address that suits all dtypes it is wanted as."""
    entries = {one.entry.name: one.entry for one in wanted}
    sizes = dict.fromkeys(entries, 1)
    for one in wanted:
        sizes[one.entry.name] = min(max(one.itemsize, sizes[one.entry.name]), MAX_ALIGNMENT)
    return [Region(name, entry.begin, entry.end, sizes[name]) for name, entry in entries.items()]


def torch_form(entry: Entry, path: str) -> tuple[torch.dtype, list[int]]:
    """Dtype and shape in torch of an entry.

    Raises:
        CorruptCheckpointError: this torch has no such dtype, or no such shape of it.
    """
    dtype, shape = SAFETENSORS_DTYPES[entry.dtype][1], list(entry.shape)
    what = ""
    if dtype is None:
        what = f"is {entry.dtype}, which torch {torch.__version__} cannot hold"
    elif entry.dtype == "F4" and (not shape or shape[-1] % 2):
        what = f"of F4 has shape {shape}, expected an even last dimension"
    if dtype is None or what:
        raise CorruptCheckpointError(f"{path}: tensor {entry.name!r} {what}", path, entry.name, entry.begin)
    if entry.dtype == "F4":
        shape[-1] //= 2
    return dtype, shape


def _window(storage: torch.UntypedStorage, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if torch._guards.detect_fake_mode(None) is not None:
        return torch.empty(shape, dtype=dtype, device=storage.device)  # a form, as from torch.load
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, 0, shape, torch.empty(shape, device="meta").stride())
