"""Loads files: ours, and those that ``torch.save`` and safetensors made."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed

from datastates.contents.kinds import SAFETENSORS, ZIP, recognise
from datastates.contents.parts import STORAGE_PREFIX
from datastates.contents.zip_directory import ZipDirectory
from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, DataStatesError
from datastates.formats.harmless import check_foreign
from datastates.formats.request import MapLocation, MapLocationError, Request, guarded, is_about_devices, verify_whole
from datastates.formats.safetensors_load import SafetensorsFile
from datastates.formats.selectable import ArchiveState, FlatState, LoadedState, Selectable, TreeState
from datastates.formats.storages import Check
from datastates.formats.torch_load import TorchArchive, is_plain_archive, is_torchscript
from datastates.integrity import RACES, record_of, record_stamp
from datastates.loading import Filled, load_chosen, load_into
from datastates.manifest import FileRecord
from datastates.reading import FileReader

__all__ = ["Filled", "MapLocation", "format_of", "is_mappable", "load", "verify"]

_BROKEN = (EOFError, LookupError, MemoryError, pickle.UnpicklingError, RuntimeError, TypeError, ValueError)
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Where launchers say how many ranks run on this machine: torchrun and Accelerate, DeepSpeed, Open MPI, MPICH."""

_TRUE = frozenset({"1", "y", "yes", "true"})


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    *,
    weights_only: bool = True,
    into: Any = None,
    keys: str | Iterable[str] | None = None,
    strict: bool = True,
    check: bool = True,
    mmap: bool = False,
) -> Any:
    """Load the state of one file, or a part of it, by what is in the file, whatever its name.

    Blocks until all bytes are in memory. Tensors are writable; those that shared memory when they were saved share it
    again (in safetensors: those with equal windows). Beside the state it takes 64 MiB at most; what goes to another
    device passes through slabs of locked host memory within these, but where ``map_location`` is a function, all goes
    to the host first. Files that are not read here but by ``torch.load`` take what that takes: torch's older format,
    compressed archives and TorchScript. While other ranks of this machine read the same file, the disk reads it once.
    A checkpoint that is saved again under its tag meanwhile is read again, not called damaged.

    Args:
        path: a file of this package, of ``torch.save`` (zip or older) or of safetensors. A safetensors file of
            somebody else gives a flat dictionary from name to tensor.
        map_location: as for ``torch.load``: a device, a dictionary from saved to new location, or a function of
            a storage and its saved location.
        weights_only: load plain data only; anything that would run code of the file is an error. False runs it: only
            for files that you trust.
        into: tensors to be filled in place, in nested containers or in a flat dictionary by fqn: each from the tensor
            of its name. They stay the objects, dtypes and devices that they are. Gives a `Filled`.
        keys: names of what to load; nothing else is read. A name is the fqn of a leaf or the beginning of one up to
            a dot (``"model"`` is all below it, as is ``"model.*"``). The rest is left out of the state; in lists and
            tuples None stands for it.
        strict: with ``into``: raise where a target is missing in the file, or a tensor of the file has no target.
            False: `Filled` names both.
        check: compare all that is read with the checksums of the file (zip entries, where whoever wrote the file has
            computed them) and of the checkpoint that it belongs to. With ``into`` the bytes are read twice, so that a
            damaged file changes nothing.
        mmap: tensors lie in the mapped file and are read where they are touched, unchecked; what is written to them
            stays this process's. Not for ``into``, nor for files of torch's older, unzipped format.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the file is none of these, its structure or its size is wrong, or a checksum; names
            tensor and offset.
        ForeignObjectError: with ``weights_only``, the file holds more than plain data; names the object. It is a
            `pickle.UnpicklingError`, which other kinds of such files raise.
        MismatchError: a name of ``keys`` selects nothing; no name of ``into`` is in the file, names differ and
            ``strict`` is set, or shapes differ. No target was changed.
        StateError: a target cannot be filled in place. No target was changed.
        StorageError: the device or the file system fails; names path and offset.
        IsADirectoryError: it is a folder: `latest.load_latest` loads those.
    """
    if into is not None and (map_location is not None or mmap):
        raise ValueError("with into= the targets say where the tensors go: leave out map_location and mmap")
    path = os.fspath(path)
    if os.path.isdir(path):
        what = "a folder, expected a file; datastates.load_latest loads the files of the newest checkpoint in it"
        raise IsADirectoryError(errno.EISDIR, what, path)
    if not check or mmap:
        return _load(path, Request(map_location, weights_only or _is_forced(), check, mmap=mmap), into, keys, strict)
    request = Request(map_location, weights_only or _is_forced())
    return _of_one_save(path, lambda: _load(path, request, into, keys, strict))


def _of_one_save(path: str, read: Callable[[], Any]) -> Any:
    """What a function makes of a file and its record, called again where they were of different saves."""
    for _ in range(RACES):
        stamp = record_stamp(path)
        try:
            return read()
        except (CorruptCheckpointError, CheckpointNotFoundError):
            if record_stamp(path) == stamp:
                raise  # else the checkpoint was committed again meanwhile
    return read()


def _load(path: str, request: Request, into: Any, keys: str | Iterable[str] | None, strict: bool) -> Any:
    _ = request.target  # no such device: say so before anything is read
    with FileReader(path, num_local_ranks=_num_local_ranks()) as file:
        kind = recognise(file)
        if request.check and not request.mmap:
            request = dataclasses.replace(request, slabs=_slabs(file, record_of(path)))
        if kind == SAFETENSORS:
            return _load_safetensors(file, request, into, keys, strict)
        if kind == ZIP:
            directory = ZipDirectory(file)
            if is_plain_archive(directory):
                return _load_archive(file, TorchArchive(file, directory, request), request, into, keys, strict)
        verify_whole(file, request.slabs)
        if request.weights_only and not (kind == ZIP and is_torchscript(directory)):  # torch refuses to run those
            check_foreign(file, kind)
        state = _load_by_torch(file, request)
        if into is None and keys is None:
            return state
        return _load_part(file, LoadedState(state, file), request, into, keys, strict)


def format_of(path: str | os.PathLike[str]) -> str:
    """What kind of file it is: ``"zip"`` (of torch), ``"legacy"`` (of torch, no zip) or ``"safetensors"``.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: it is none of these.
    """
    with FileReader(os.fspath(path)) as file:
        return recognise(file)


def is_mappable(path: str | os.PathLike[str]) -> bool:
    """Whether the tensors lie in the file as they lie in memory: `load` can map them.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: it is none that `load` reads.
    """
    with FileReader(os.fspath(path)) as file:
        kind = recognise(file)
        if kind != ZIP:
            return kind == SAFETENSORS
        directory = ZipDirectory(file)
        return is_plain_archive(directory) and TorchArchive(file, directory, Request(None, True)).is_native


def verify(path: str | os.PathLike[str]) -> None:
    """Compare all of a file with the checksums in it, and those of the checkpoint that it belongs to. Blocks.

    A file that has none (stock safetensors, the older and the compressed forms of torch, outside of a checkpoint) is
    only checked for its structure. Takes 64 MiB of memory at most.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: bytes differ, or the structure is wrong; names tensor and offset.
        StorageError: the file cannot be read.
    """
    path = os.fspath(path)
    _of_one_save(path, lambda: _verify(path))


def _verify(path: str) -> None:
    with FileReader(path) as file:
        kind = recognise(file)
        slabs = _slabs(file, record_of(path))
        request = Request(None, True, True, slabs)
        if kind == SAFETENSORS:
            opened = SafetensorsFile(file, request)
            opened.verify(opened.header.entries, bool(slabs))
        elif kind == ZIP and is_plain_archive(directory := ZipDirectory(file)):
            archive = TorchArchive(file, directory, request)
            keys = {region.name.removeprefix(STORAGE_PREFIX) for region in archive.regions()}
            archive.verify(keys, bool(slabs))
        else:
            verify_whole(file, slabs)


def _num_local_ranks() -> int:
    """So many ranks of the job run on this machine, as far as its launcher tells; all of them where it does not."""
    for name in _LOCAL_SIZES:
        value = os.getenv(name, "")
        if value.isascii() and value.isdigit():
            return int(value)
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _is_forced() -> bool:
    """An administrator's switch of torch, which holds for all that loads its files."""
    return os.getenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE


def _slabs(file: FileReader, record: FileRecord | None) -> tuple[Check, ...]:
    if record is None:
        return ()
    if record.nbytes != file.nbytes:
        raise CorruptCheckpointError(
            f"{file.path}: {file.nbytes} bytes found, {record.nbytes} expected by its manifest",
            file.path,
            offset=min(file.nbytes, record.nbytes),
        )
    begins = range(0, record.nbytes, record.slab_nbytes)
    return tuple(
        Check(begin, min(begin + record.slab_nbytes, record.nbytes), expected)
        for begin, expected in zip(begins, record.crc32, strict=True)
    )


def _load_safetensors(file: FileReader, request: Request, into: Any, keys: Any, strict: bool) -> Any:
    opened = SafetensorsFile(file, request)
    if opened.tree is None:
        if into is None and keys is None:
            return opened.load_flat(opened.header.entries)
        return _load_part(file, FlatState(opened, file.path), request, into, keys, strict)
    if into is None and keys is None:
        return opened.load(opened.tree["root"])
    return _load_part(file, TreeState(opened, opened.tree, file.path), request, into, keys, strict)


def _load_archive(file: FileReader, archive: TorchArchive, request: Request, into: Any, keys: Any, strict: bool) -> Any:
    if into is None and keys is None:
        return archive.load()
    return _load_part(file, ArchiveState(archive, file.path), request, into, keys, strict)


def _load_part(file: FileReader, state: Selectable, request: Request, into: Any, keys: Any, strict: bool) -> Any:
    if into is None:
        return load_chosen(state, keys, file.path)
    return load_into(file, state, into, keys, strict=strict, check=request.check, is_covered=bool(request.slabs))


def _load_by_torch(file: FileReader, request: Request) -> Any:
    """Files that only torch reads."""
    path = file.path
    map_location: Any = guarded(request.map_location)
    try:
        if request.mmap:
            return torch.load(path, map_location, weights_only=request.weights_only, mmap=True)
        with open(path, "rb") as stream:  # by its path a file named *.safetensors would be taken for one
            return torch.load(stream, map_location, weights_only=request.weights_only)
    except DataStatesError:
        raise
    except MapLocationError as error:
        raise error.__cause__ or error from None
    except _BROKEN as error:
        if not _is_damage(error, request.weights_only):
            raise
        text = str(error) or type(error).__name__
        raise CorruptCheckpointError(f"{path} ({file.nbytes} bytes) cannot be loaded: {text}", path) from error


def _is_damage(error: Exception, weights_only: bool) -> bool:
    """Such a file has no structure to check: what its reader said, unless it may mean the content."""
    if "TorchScript" in str(error) or (isinstance(error, pickle.UnpicklingError) and weights_only):
        return False
    return isinstance(error, _BROKEN) and not is_about_devices(error)
