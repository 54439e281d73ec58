"""Loads files: ours, and those that ``torch.save`` and safetensors made."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError
from datastates.formats.safetensors_load import load_safetensors

MapLocation: TypeAlias = (
    str | torch.device | dict[str, str] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | None
)

_ZIP_MAGIC = b"PK\3\4"
_EOCD = struct.Struct("<4s4H2IH")
_EOCD_MAGIC = b"PK\5\6"
_EOCD64_AND_LOCATOR_BYTES = 76
_LONGEST_COMMENT_BYTES = 65535
#: The first object of a ``torch.save`` file that is no zip is this number.
#: Source: ``torch.serialization.MAGIC_NUMBER``.
_LEGACY_MAGIC = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
_TAR_MAGIC_OFFSET, _TAR_MAGIC = 257, b"ustar"
_BROKEN_LEGACY = (EOFError, pickle.UnpicklingError, RuntimeError, ValueError)


def load(path: str | os.PathLike[str], map_location: MapLocation = None, *, weights_only: bool = True) -> Any:
    """Load the state of one file, whatever its name, by what is in it.

    Blocks until all bytes are in new memory. Tensors are writable and own their memory; those that shared it
    when they were saved share it again (in safetensors: those with equal windows).

    Args:
        path: a file of this package, of ``torch.save`` (zip or older) or of safetensors. A safetensors file of
            somebody else gives a flat dictionary from name to tensor.
        map_location: as for ``torch.load``: a device, a dictionary from saved to new location, or a function of
            a storage and its saved location.
        weights_only: load plain data only; anything that would run code of the file is an error. False runs it: only
            for files that you trust.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the file is none of these, or its structure or its size is wrong.
        pickle.UnpicklingError: with ``weights_only``, the file holds more than plain data
            (`ForeignObjectError` where it is safetensors).
    """
    path = os.fspath(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {path}") from error
    try:
        kind = _recognise(descriptor, path)
        if kind == "safetensors":
            restore = torch.serialization._get_restore_location(map_location)  # type: ignore[no-untyped-call]
            return load_safetensors(descriptor, path, restore, weights_only)
        if kind == "zip":
            _check_zip_end(descriptor, path)
    finally:
        os.close(descriptor)
    return _load_torch(path, kind, map_location, weights_only)


def _recognise(descriptor: int, path: str) -> str:
    """``"zip"``, ``"legacy"`` or ``"safetensors"``."""
    nbytes = os.fstat(descriptor).st_size
    head = os.pread(descriptor, 512, 0)
    if head.startswith(_ZIP_MAGIC):
        return "zip"
    if head.startswith(_LEGACY_MAGIC[:-1]) or head[_TAR_MAGIC_OFFSET:].startswith(_TAR_MAGIC):
        return "legacy"
    if path.endswith(".safetensors") or head[8:9] == b"{":
        return "safetensors"
    raise CorruptCheckpointError(
        f"{path}: {nbytes} bytes that begin with {head[:8]!r} are neither a torch.save file nor safetensors; "
        "the file is damaged or something else",
        path,
        offset=0,
    )


def _check_zip_end(descriptor: int, path: str) -> None:
    """A zip archive must end with its end record, which must point at the directory right before it.

    torch itself looks for the record anywhere near the end and may read a cut or prolonged file.
    Source: PKWARE APPNOTE, 4.3.16; ``torch.save`` writes no comment.
    """
    nbytes = os.fstat(descriptor).st_size
    begin = max(nbytes - _EOCD.size - _LONGEST_COMMENT_BYTES, 0)
    tail = os.pread(descriptor, nbytes - begin, begin)
    found = tail.rfind(_EOCD_MAGIC)
    if found < 0 or found + _EOCD.size > len(tail):
        raise _truncated(path, nbytes)
    end = begin + found + _EOCD.size
    if end != nbytes:
        raise CorruptCheckpointError(
            f"{path}: the archive ends at byte {end}, the file has {nbytes}: {nbytes - end} bytes too many",
            path,
            "",
            end,
        )
    record = _EOCD.unpack_from(tail, found)
    directory_nbytes, directory_begin = record[5], record[6]
    directory_end = directory_begin + directory_nbytes
    is_zip64 = max(record[5:7]) == 0xFFFFFFFF or record[4] == 0xFFFF
    position = begin + found
    if not is_zip64 and directory_end not in (position, position - _EOCD64_AND_LOCATOR_BYTES):
        raise CorruptCheckpointError(
            f"{path}: the directory should end at byte {position}, its record says {directory_end}; bytes are "
            f"missing from or were added to the {nbytes} of the file",
            path,
            offset=position,
        )


def _truncated(path: str, nbytes: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: the archive has no end record within its {nbytes} bytes; the file is incomplete", path, "", nbytes
    )


def _load_torch(path: str, kind: str, map_location: Any, weights_only: bool) -> Any:
    try:
        if not path.endswith(".safetensors"):
            return torch.load(path, map_location=map_location, weights_only=weights_only)
        with open(path, "rb") as file:  # torch.load would hand a path of this name to safetensors
            return torch.load(file, map_location=map_location, weights_only=weights_only)
    except (EOFError, OSError, LookupError, RuntimeError, ValueError, TypeError, pickle.UnpicklingError) as error:
        fault = _fault_of_zip(path) if kind == "zip" else _fault_of_legacy(error, weights_only)
        if fault is None:
            raise
        nbytes = os.path.getsize(path)
        raise CorruptCheckpointError(f"{path} ({nbytes} bytes) cannot be loaded: {fault}", path) from error


def _fault_of_zip(path: str) -> str | None:
    """What is wrong with the archive after a failed load, None where the archive is sound."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
            if not names & {"data.pkl", "constants.pkl"}:
                return "the archive has no entry data.pkl"
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, ValueError, zlib.error) as error:
        return str(error)
    return None if damaged is None else f"the checksum of its entry {damaged!r} does not match"


def _fault_of_legacy(error: Exception, weights_only: bool) -> str | None:
    """An older file has no structure to check: what its reader said, unless it may mean the content."""
    if isinstance(error, pickle.UnpicklingError) and weights_only:
        return None
    text = str(error)
    is_device = "deserialize object on" in text
    return text or type(error).__name__ if isinstance(error, _BROKEN_LEGACY) and not is_device else None
