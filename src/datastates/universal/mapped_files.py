"""Files loaded without their tensors' bytes, and those bytes read in blocks where they are asked for.

Tensors are mapped, so that a state of any size weighs nothing; but what is copied from file to file is read with
positional reads into one small buffer, not through the mapping: memory stays bounded, and a file that is cut short
meanwhile is an error instead of a signal.
"""

from __future__ import annotations

import bisect
import ctypes
import json
import os
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

from datastates import reader
from datastates.copying import row_blocks
from datastates.errors import CorruptCheckpointError
from datastates.same_save import SameSave
from datastates.system_calls import patiently, storage_errors

BLOCK_BYTES = 1 << 20
"""So much is read, hashed and written at once: it stays in the processor's cache."""

_GATHERED_ELEMENTS = 4 << 20
"""So many elements of a tensor with other strides are brought in order at once: 64 MiB of the largest dtype."""

_Area = tuple[int, int, int, int]  # first address, end, offset of the first byte in the file, descriptor


class MappedFiles:
    """Loads files and finds the place of a tensor in them. Thread safe once all files are loaded.

    Attributes:
        weights_only: only plain data is loaded; else what is pickled in the files is executed.
    """

    def __init__(self, *sources: str, weights_only: bool = False, whole: bool = False) -> None:
        """Begin with no file.

        Args:
            sources: checkpoints, or files of them, that must stay what they are (see `check_unchanged`).
            weights_only: refuse what is more than plain data, instead of executing it.
            whole: load files that cannot be mapped (of torch before 1.6, compressed) into memory, instead of refusing
                those of torch before 1.6.
        """
        self.weights_only = weights_only
        self._whole = whole
        self._same_save = SameSave(sources)
        self._states: dict[str, Any] = {}
        self._descriptors: dict[str, int] = {}
        self._paths: dict[int, str] = {}  # by descriptor
        self._areas: list[_Area] = []
        self._buffers = threading.local()

    def load(self, path: str) -> Any:
        """The state of a file, its tensors mapped; the same object for the same path.

        Executes what is pickled in it unless `weights_only`.

        Raises:
            ForeignObjectError: with `weights_only`, it holds more than plain data.
            CorruptCheckpointError: the file is damaged, cannot be mapped, or needs a package that is not here.
            CheckpointNotFoundError: there is no such file.
        """
        if path not in self._states:
            is_mapped = not self._whole or reader.is_mappable(path)
            if is_mapped and reader.format_of(path) == "legacy":
                message = f"{path} has the form of torch before 1.6, whose tensors cannot be mapped: save it again"
                raise CorruptCheckpointError(message, path)
            try:
                state = reader.load(path, "cpu", weights_only=self.weights_only, mmap=is_mapped)
            except ModuleNotFoundError as error:
                message = f"{path} holds objects of {error.name}, which is not installed here: install it first"
                raise CorruptCheckpointError(message, path) from error
            self._states[path] = state
            with storage_errors("open", path):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors[path], self._paths[descriptor] = descriptor, path
            self._areas.clear()
        return self._states[path]

    def blocks(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The row-major elements as bytes, each block valid until the next one."""
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            for part in row_blocks(tensor, 0, tensor.numel(), _GATHERED_ELEMENTS):
                yield from self._blocks(part.resolve_conj().resolve_neg().contiguous())
        else:
            yield from self._blocks(tensor)

    def _blocks(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        nbytes = tensor.numel() * tensor.itemsize
        place = self._place(tensor.data_ptr(), nbytes)
        if place is None:  # made in memory while the pickle was loaded
            raw = memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else b""
            for begin in range(0, nbytes, BLOCK_BYTES):
                yield memoryview(raw)[begin : begin + BLOCK_BYTES]
            return
        descriptor, offset = place
        buffer = self._buffer()
        for begin in range(0, nbytes, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, nbytes - begin)]
            self._fill(block, descriptor, offset + begin)
            yield block

    def close(self) -> None:
        """Let go of files and states; idempotent. Tensors that somebody holds stay mapped."""
        self._states.clear()
        self._areas.clear()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._paths.clear()

    def __enter__(self) -> MappedFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._same_save.__exit__(kind, error, trace)

    def check_unchanged(self) -> None:
        """Call it when all has been read, before that is published.

        Raises:
            StorageError: a source was saved again or removed meanwhile: the files may be of different saves.
        """
        self._same_save.check()

    def fingerprint(self, others: Iterable[str] = ()) -> str:
        """Names, sizes and times of the files, and of others that are read beside them, so that a change is seen."""
        statuses = {path: os.stat(path) for path in others}
        statuses |= {path: os.fstat(descriptor) for path, descriptor in self._descriptors.items()}
        return json.dumps([(path, one.st_size, one.st_mtime_ns) for path, one in sorted(statuses.items())])

    def locate(self) -> None:
        """Look up where the files are mapped; to be called after the last `load`, before threads read."""
        inodes = {
            (os.fstat(descriptor).st_ino, os.path.basename(path)): descriptor
            for path, descriptor in self._descriptors.items()
        }
        self._areas = sorted(_areas(inodes))

    def _place(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Descriptor and offset of the bytes at an address, None where they are not in a mapped file."""
        position = bisect.bisect_right(self._areas, (address, float("inf"), 0, 0)) - 1
        if position < 0 or not nbytes:
            return None
        begin, end, offset, descriptor = self._areas[position]
        return (descriptor, offset + address - begin) if address + nbytes <= end else None

    def _fill(self, block: memoryview, descriptor: int, offset: int) -> None:
        done, path = 0, self._paths[descriptor]
        while done < len(block):
            with storage_errors("read", path):
                count = patiently(os.preadv, descriptor, [block[done:]], offset + done)
            if count == 0:
                raise CorruptCheckpointError(
                    f"{path} was cut short to {offset + done} bytes", path, offset=offset + done
                )
            done += count

    def _buffer(self) -> memoryview:
        found = getattr(self._buffers, "view", None)
        if found is None:
            found = self._buffers.view = memoryview(bytearray(BLOCK_BYTES))
        return found


def _areas(inodes: dict[tuple[int, str], int]) -> Iterator[_Area]:
    """Where the files with these inodes and names are mapped. Source: proc_pid_maps(5)."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) < 6:
                continue
            descriptor = inodes.get((int(fields[4]), os.path.basename(fields[5])))
            if descriptor is not None:
                begin, end = (int(number, 16) for number in fields[0].split("-"))
                yield begin, end, int(fields[2], 16), descriptor
