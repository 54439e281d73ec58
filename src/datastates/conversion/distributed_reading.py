"""A directory of ``torch.distributed.checkpoint`` read by torch's own reader, one tensor at a time.

Its ``.metadata`` is a pickle; the unpickler that reads it imports nothing but the classes that torch writes there.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from datastates.contents.distributed_metadata import METADATA_NAME
from datastates.errors import CorruptCheckpointError, ForeignObjectError, StateError
from datastates.fqns import join

_MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
)
_BLOCK_BYTES = 1 << 20
_INDICES = range(1 << 20)  # of lists with tensors in them; others are values

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
"""What the metadata of torch 2.13 and earlier refers to. Source: torch/distributed/checkpoint/metadata.py."""


class DistributedCheckpoint:
    """The state in such a directory.

    Attributes:
        state: nested as it was saved, which is: dictionaries by strings, and lists. Tensors are forms, whose memory
            nobody has filled; other values are loaded.
        joined: by fqn, what gives the elements of each form when it is asked for.
    """

    def __init__(self, path: str, *, weights_only: bool) -> None:
        """Read the metadata and all values that are no tensors.

        Raises:
            CorruptCheckpointError: a file is missing or malformed.
            ForeignObjectError: with ``weights_only``, a value is more than plain data.
            StateError: the format holds kinds of things that are not read here.
        """
        self._path = path
        self._weights_only = weights_only
        self._reader = _Reader(path, weights_only)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        check_places(self._metadata, path)
        flat: dict[str, Any] = {}
        self.joined: dict[str, _Elements] = {}
        paths = self._metadata.planner_data or {name: (name,) for name in self._metadata.state_dict_metadata}
        self._check_paths(paths)
        for name, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                flat[name] = self._form(name, entry)
                self.joined[_fqn(paths[name])] = _Elements(self, name, flat[name])
            elif isinstance(entry, BytesStorageMetadata):
                flat[name] = self._read(name, None)
            else:
                raise StateError(f"{path}: {name} is a {type(entry).__name__}, which is not read here", name)
        try:
            self.state = unflatten_state_dict(flat, paths)
        except _MALFORMED as error:
            raise CorruptCheckpointError(
                f"{path}: the tree of its metadata is malformed: {error!s:.200}", path
            ) from error

    def read(self, name: str, form: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape and dtype, filled from all chunks. Blocks."""
        target = torch.empty_like(form)
        self._read(name, target)
        return target

    def _read(self, name: str, target: torch.Tensor | None) -> Any:
        """Fill a tensor, or load a value."""
        wanted: dict[str, Any] = {name: target}
        planner = _Planner(self._weights_only)
        try:
            planner.set_up_planner(wanted, self._metadata, True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            if target is not None and sum(item.lengths.numel() for item in plan.items) != target.numel():
                raise CorruptCheckpointError(f"{self._path}: the chunks of {name} do not cover it", self._path, name)
            self._reader.read_data(plan, planner).wait()
        except CorruptCheckpointError:
            raise
        except pickle.UnpicklingError as error:
            if not self._weights_only:
                raise CorruptCheckpointError(f"{self._path}: {name} cannot be read: {error!s:.200}") from error
            text = (
                f"{self._path}: {name} is more than plain data: pass trust=True (--trust) if you trust whoever made it"
            )
            raise ForeignObjectError(text, name) from error
        except _MALFORMED as error:
            raise CorruptCheckpointError(
                f"{self._path}: {name} cannot be read: {str(error) or type(error).__name__:.200}", self._path, name
            ) from error
        return planner.state_dict[name]

    def _form(self, name: str, entry: TensorStorageMetadata) -> torch.Tensor:
        """A tensor of this shape and dtype whose memory nobody touches."""
        try:
            return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        except _MALFORMED as error:
            message = f"{self._path}: {name} cannot have shape {tuple(entry.size)}: {error!s:.200}"
            raise CorruptCheckpointError(message, self._path, name) from error

    def _check_paths(self, paths: dict[str, tuple[str | int, ...]]) -> None:
        """Lists are made as long as their largest index says."""
        wrong = [name for name, path in paths.items() if any(key not in _INDICES for key in path if type(key) is int)]
        if wrong:
            raise CorruptCheckpointError(f"{self._path}: {wrong[0]} has no place in a list", self._path, wrong[0])


class _Elements:
    """The elements of a tensor; read anew each time they are asked for."""

    def __init__(self, checkpoint: DistributedCheckpoint, name: str, form: torch.Tensor) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._form = form

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield self._checkpoint.read(self._name, self._form).reshape(-1)


class _Planner(DefaultLoadPlanner):
    """Loads names as they stand in the metadata; values that are no tensors only as plain data, unless told else."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, "cpu", weights_only=self._weights_only)


class _Reader(FileSystemReader):
    """Torch's reader, which would execute whatever the metadata says."""

    def __init__(self, path: str, weights_only: bool) -> None:
        super().__init__(path)
        self._directory = path
        self._weights_only = weights_only

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """One entry of a file, after its bytes were compared with the checksums in it: torch does not look at them."""
        if not sinfo.transform_descriptors:
            with io.BufferedReader(_Window(file, sinfo.offset, sinfo.length)) as view:
                check_archive(view)
        sliced: IO[bytes] = super()._slice_file(file, sinfo)
        return sliced

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return load_metadata(os.path.join(self._directory, METADATA_NAME), trust=not self._weights_only)


def load_metadata(path: str, *, trust: bool = False) -> Metadata:
    """What a file of metadata says: names, shapes, and where each chunk lies.

    Args:
        path: the file.
        trust: run whatever the pickle says, instead of refusing all but the classes that torch writes there.

    Raises:
        CorruptCheckpointError: it is missing, malformed, or something else.
        ForeignObjectError: it refers to another class, and ``trust`` is not set.
    """
    try:
        with open(path, "rb") as file:
            found = pickle.load(file) if trust else _MetadataUnpickler(file).load()
        names = set(found.state_dict_metadata)
        if not isinstance(found, Metadata) or not set(found.planner_data or names) >= names:
            raise ValueError(f"it is a {type(found).__name__}, or names differ in it")
        found.storage_data.values()
    except ForeignObjectError as error:
        raise ForeignObjectError(f"{path}: {error}", error.fqn, error.class_name) from error
    except (*_MALFORMED, pickle.UnpicklingError) as error:
        text = str(error) or type(error).__name__
        raise CorruptCheckpointError(f"{path} cannot be read: {text:.200}", path) from error
    return found


def check_places(metadata: Metadata, directory: str) -> None:
    """Raise CorruptCheckpointError if the metadata names a file outside of the folder."""
    for info in metadata.storage_data.values():
        if os.path.basename(info.relative_path) != info.relative_path:
            message = f"{directory}: its metadata names {info.relative_path!r}, no file in the folder"
            raise CorruptCheckpointError(message, directory)


class _Window(io.RawIOBase):
    """A range of bytes of an open file as a file, which torch's own view of it is not at its end."""

    def __init__(self, file: IO[bytes], begin: int, nbytes: int) -> None:
        self._file = file
        self._begin = begin
        self._nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, memory: Any) -> int:
        self._file.seek(self._begin + self._position)
        data = self._file.read(max(0, min(len(memory), self._nbytes - self._position)))
        memory[: len(data)] = data
        self._position += len(data)
        return len(data)


def check_archive(file: IO[bytes]) -> None:
    """Compare the entries of an archive of a value with their checksums. Raises zipfile.BadZipFile."""
    if not zipfile.is_zipfile(file):
        return  # a value in another form; torch says so if it cannot read it
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.CRC:  # 0: whoever wrote it has not computed it
                with archive.open(info) as entry:
                    while entry.read(_BLOCK_BYTES):
                        pass


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise ForeignObjectError(
                f"it refers to {module}.{name}, which is no part of a checkpoint's metadata: pass trust=True (--trust)"
                " if you trust whoever made it",
                class_name=f"{module}.{name}",
            )
        return super().find_class(module, name)


def _fqn(path: tuple[str | int, ...]) -> str:
    fqn = ""
    for key in path:
        fqn = join(fqn, key)
    return fqn
