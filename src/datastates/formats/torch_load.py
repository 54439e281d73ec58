"""From an archive of ``torch.save`` back to the state: torch's own unpickler over storages that this package reads.

Source: ``torch.serialization._load`` of torch 2.13, which is handed a reader of the archive and does the rest: dtypes,
byte order, ``map_location``, the restricted unpickler.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import _weights_only_unpickler as restricted
from torch._utils import IMPORT_MAPPING, NAME_MAPPING

from datastates.contents.parts import PICKLE_NAME, STORAGE_PREFIX, parts_of
from datastates.contents.stub_pickle import Global, StubPickle, StubStructure, objects_in, read_pickle
from datastates.contents.tensor_calls import storages_in
from datastates.contents.walk import leaves
from datastates.contents.zip_directory import ZipDirectory
from datastates.errors import CorruptCheckpointError, DataStatesError, ForeignObjectError
from datastates.formats import plain_pickle
from datastates.formats.harmless import check_tensors, harmless
from datastates.formats.plain_types import PLAIN_TYPES, plain_types_allowed
from datastates.formats.request import (
    MapLocationError,
    Request,
    guarded,
    is_about_devices,
    no_such_tensor,
    raise_damage,
    verify,
)
from datastates.formats.storages import Check, Checksums, MappedStorages, Region, Storages
from datastates.reading import FileReader

_TORCHSCRIPT_NAME = "constants.pkl"
_BYTE_ORDER_NAME = "byteorder"

#: What a pickle raises that is none, or not of torch.
_MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


def is_plain_archive(directory: ZipDirectory) -> bool:
    """Whether this module can load the archive: uncompressed, of ``torch.save``, and no TorchScript."""
    return not is_torchscript(directory) and all(entry.is_stored for entry in directory.entries.values())


def is_torchscript(directory: ZipDirectory) -> bool:
    """Whether the archive is a program of TorchScript."""
    return _TORCHSCRIPT_NAME in directory.entries


class TorchArchive:
    """An open archive of ``torch.save``: its pickle, and its storages by key.

    Attributes:
        pickled: the pickle of the whole state, compared with its checksum.
    """

    def __init__(self, file: FileReader, directory: ZipDirectory, request: Request) -> None:
        """Read the pickle. Raises CorruptCheckpointError."""
        self._file = file
        self._directory = directory
        self._request = request
        self.pickled = directory.content(PICKLE_NAME)
        self._byte_order = self.content(_BYTE_ORDER_NAME)
        self.is_native = self._byte_order in (None, sys.byteorder.encode())
        self._known: dict[str, Region] = {}

    def region(self, key: str) -> Region:
        """Where a storage lies. Raises CorruptCheckpointError where there is none of that key."""
        name = STORAGE_PREFIX + key
        known = self._known.get(name)
        if known is not None:
            return known
        entry = self._directory.entries.get(name)
        if entry is None:
            raise no_such_tensor(self._file.path, f"a storage {key!r}")
        begin = self._directory.data_begin(entry)
        self._known[name] = Region(name, begin, begin + entry.nbytes)
        return self._known[name]

    def checks(self, regions: list[Region]) -> Iterator[Check]:
        """What the archive itself says of these storages."""
        for region in regions:
            entry = self._directory.entries[region.name]
            if entry.is_checkable and entry.nbytes:
                yield Check(region.begin, region.end, entry.crc32, is_exact=True)

    def regions(self) -> list[Region]:
        """All storages."""
        keys = [name for name in self._directory.entries if name.startswith(STORAGE_PREFIX)]
        return [self.region(key.removeprefix(STORAGE_PREFIX)) for key in keys]

    def load(self, pickled: bytes | None = None, keys: set[str] | None = None) -> Any:
        """The state, or a part of it.

        Args:
            pickled: the pickle of the part; None: of the whole.
            keys: of the storages that it refers to.

        Raises:
            CorruptCheckpointError: the file is damaged.
            ForeignObjectError: with ``weights_only`` the state holds what is no plain data.
            StorageError: the file cannot be read.
        """
        request = self._request
        regions = self.regions() if keys is None else [self.region(key) for key in sorted(keys)]
        is_whole = keys is None and bool(request.slabs) and request.check
        checks = [*self.checks(regions), *(request.slabs if is_whole else ())] if request.check else []
        checksums = Checksums(checks)
        storages: Storages | MappedStorages
        if request.mmap:
            storages = MappedStorages(self._file, regions)
        else:
            devices = self._devices(regions, self.pickled if pickled is None else pickled)
            storages = Storages(self._file, regions, checksums if checks else None, devices)
            if request.target is None or request.target.type != "meta":
                storages.read(whole_file=is_whole)
                self._raise_damage(checksums)
        reader = _ArchiveReader(self, storages, self.pickled if pickled is None else pickled)
        with plain_pickle.garbage_kept():
            state = self._unpickle(reader)
        self._raise_damage(checksums)
        return state

    def verify(self, keys: set[str], is_whole: bool) -> None:
        """Compare the bytes of storages with their checksums; keeps nothing.

        Raises:
            CorruptCheckpointError: they differ.
            StorageError: the file cannot be read.
        """
        regions = [self.region(key) for key in sorted(keys)]
        slabs = self._request.slabs if is_whole else ()
        verify(self._file, regions, Checksums([*self.checks(regions), *slabs]), is_whole)

    def content(self, name: str) -> bytes | None:
        """A small entry, None where there is none. Raises CorruptCheckpointError."""
        return self._directory.content(name) if name in self._directory.entries else None

    def _devices(self, regions: list[Region], pickled: bytes) -> dict[str, torch.device]:
        """The storages that go to a device straight from the file; others are brought there by torch."""
        request, found = self._request, {}
        if not self.is_native:  # torch turns the bytes around, on the host
            return {}
        if request.target is not None:
            device = request.device_of("cpu")
            return {} if device is None else {region.name: device for region in regions}
        if not torch.accelerator.is_available():
            return {}
        try:
            for storage in storages_in(read_pickle(pickled)):
                device = request.device_of(storage.location)
                if device is not None:
                    found[STORAGE_PREFIX + storage.key] = device
        except (pickle.UnpicklingError, ValueError):  # torch's unpickler will say it, if it is one for that as well
            return {}
        return found

    def _raise_damage(self, checksums: Checksums) -> None:
        raise_damage(self._file, checksums, lambda: parts_of(self._file))

    def _unpickle(self, reader: _ArchiveReader) -> Any:
        request = self._request
        stubs = harmless(reader.pickled, self._file.path) if request.weights_only else None
        try:
            if stubs is not None and self._is_ours_to_load and plain_pickle.is_plain(stubs):
                restore = torch.serialization._get_restore_location(guarded(request.map_location))  # type: ignore[no-untyped-call]
                return plain_pickle.load(reader.pickled, reader.storage, restore)
            if stubs is not None:
                check_tensors(stubs, self._file.path)
            module = pickle if stubs is None else restricted
            with plain_types_allowed() if request.weights_only else contextlib.nullcontext():
                return torch.serialization._load(  # type: ignore[no-untyped-call]
                    reader, guarded(request.map_location), module, encoding="utf-8"
                )
        except DataStatesError:
            raise
        except MapLocationError as error:
            raise error.__cause__ or error from None
        except pickle.UnpicklingError as error:
            raise self._unpickling_error(stubs, len(reader.pickled), error) from error
        except _MALFORMED as error:
            if is_about_devices(error) or not (request.weights_only or self._is_unchecked()):
                raise
            raise CorruptCheckpointError(
                f"{self._file.path} cannot be loaded: its pickle is malformed: {error!s:.200}", self._file.path
            ) from error
        finally:
            torch._utils._sparse_tensors_to_validate.clear()  # else the next load would trip over those of a failed one

    @property
    def _is_ours_to_load(self) -> bool:
        """Whether the storages are as they lie in the file: neither turned around, nor without memory."""
        target = self._request.target
        return self._byte_order == sys.byteorder.encode() and (target is None or target.type != "meta")

    def _is_unchecked(self) -> bool:
        return not self._directory.entries[PICKLE_NAME].is_checkable

    def _unpickling_error(self, stubs: StubPickle | None, nbytes: int, error: Exception) -> Exception:
        """A better error: the object that is no plain data, by its name."""
        if stubs is not None:
            for fqn, name in foreign_objects(stubs.root, nbytes):
                return ForeignObjectError(
                    f"{self._file.path}: {fqn or 'the state'} holds {name}, which loads only by running code; pass "
                    "weights_only=False if you trust the file, name it to torch.serialization.add_safe_globals, or "
                    "load other parts with keys=",
                    fqn,
                    name,
                )
        return pickle.UnpicklingError(f"{self._file.path}: {error}")


class _ArchiveReader:
    """What ``torch.serialization._load`` asks of ``torch._C.PyTorchFileReader``."""

    def __init__(self, archive: TorchArchive, storages: Storages | MappedStorages, pickled: bytes) -> None:
        self._archive = archive
        self._storages = storages
        self.pickled = pickled

    def has_record(self, name: str) -> bool:
        """Only what torch needs to know; without ``.format_version`` it asks for offsets instead of computing them."""
        return name == _BYTE_ORDER_NAME and self._archive.content(name) is not None

    def get_record(self, name: str) -> bytes:
        return self.pickled if name == PICKLE_NAME else self._archive.content(name) or b""

    def get_record_offset(self, name: str) -> int:
        return self._archive.region(name.removeprefix(STORAGE_PREFIX)).begin

    def storage(self, key: str, nbytes: int) -> torch.UntypedStorage:
        return self.get_storage_from_record(STORAGE_PREFIX + key, nbytes, None).untyped_storage()

    def get_storage_from_record(self, name: str, nbytes: int, _kind: object) -> torch.Tensor:
        region = self._archive.region(name.removeprefix(STORAGE_PREFIX))
        if nbytes > region.end - region.begin:
            found = f"a storage {name!r} of {nbytes} bytes, of which {region.end - region.begin} are"
            raise no_such_tensor(self._archive._file.path, found)
        data = self._storages.take(region.name)
        if nbytes == data.numel():
            return data
        cut = torch.empty(0, dtype=torch.uint8, device=data.device)
        return cut.set_(data.untyped_storage()[:nbytes], 0, (nbytes,), (1,))

    def serialization_id(self) -> str:
        return ""


def foreign_objects(root: Any, nbytes: int) -> Iterator[tuple[str, str]]:
    """Fqn and name of what the restricted unpickler would not import; nothing where the structure is malformed."""
    allowed = {**restricted._get_allowed_globals(), **restricted._get_user_allowed_globals()}  # type: ignore[no-untyped-call]
    allowed.update((name, kind) for kind, name in PLAIN_TYPES)
    try:
        for leaf in leaves(StubStructure(), root, nbytes):
            for found in objects_in(leaf.node):
                if isinstance(found, Global) and str(_of_today(found)) not in allowed:
                    yield leaf.fqn, str(found)
    except ValueError:
        return


def _of_today(found: Global) -> Global:
    """A name of Python 2, as pickles of protocol 2 have them, in Python 3. Source: ``_compat_pickle``."""
    module, name = NAME_MAPPING.get((found.module, found.name), (found.module, found.name))
    return Global(IMPORT_MAPPING.get(module, module), name)
