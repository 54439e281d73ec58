"""Files written straight from other files' bytes: no tensor is made, every byte is hashed."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from datastates import formats
from datastates.checksum import crc32, crc32_combine
from datastates.formats.safetensors import plan_flat
from datastates.plan import SEAL_NBYTES, FilePlan, Seal, Segment
from datastates.state import capture_host
from datastates.storage import read_chunks
from datastates.system_calls import storage_errors, write_all
from datastates.universal.mapped_files import BLOCK_BYTES, MappedFiles

FLAT = "flat"
"""Besides the names of `formats`: a safetensors file as others write it, of a flat dictionary of tensors."""

Advance = Callable[[int], None]
"""Told how many bytes more are written."""


@dataclass(frozen=True)
class OutFile:
    """A file to be written.

    Attributes:
        name: relative to the result's folder.
        state: what it holds. Tensors are read from where they are mapped.
        joined: by fqn of a tensor in ``state``, the one-dimensional views of which its elements consist, in order;
            they are cast where their dtype differs. The tensor itself is only a form: its memory is not read.
        format: ``"torch"``, ``"safetensors"`` or `FLAT`.
        copy_of: a file to copy byte by byte instead.
        data: the bytes of the file instead.
        nbytes: about how much it is to write.
    """

    name: str
    state: Any = None
    joined: Mapping[str, Iterable[torch.Tensor]] = field(default_factory=dict)
    format: str = "torch"
    copy_of: str | None = None
    data: bytes | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class Written:
    """A file that was written: its name in the result, its size, and the CRC-32 of all of it."""

    name: str
    nbytes: int
    crc32: int


def write(file: OutFile, folder: str, files: MappedFiles, advance: Advance) -> Written:
    """Write a file anew. Does not wait for the disk.

    Raises:
        StorageError: it cannot be written, or a source not read.
        CorruptCheckpointError: a source is shorter than its structure says.
    """
    path = os.path.join(folder, file.name)
    with storage_errors("write", path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            sink = _Sink(descriptor, advance)
            if file.copy_of is not None:
                _copy(file.copy_of, sink)
            elif file.data is not None:
                sink.append(file.data)
            else:
                _write_plan(_plan(file), file.joined, files, sink)
        finally:
            os.close(descriptor)
    return Written(file.name, sink.nbytes, sink.crc32)


def _plan(file: OutFile) -> FilePlan:
    if file.format == FLAT:
        return plan_flat(file.state)
    return formats.plan(file.state, file.format, capture_host, lambda _fqn, _tensor: False)


class _Sink:
    """Appends to a file and hashes what it appends."""

    def __init__(self, descriptor: int, advance: Advance) -> None:
        self.nbytes = 0
        self.crc32 = 0
        self._descriptor = descriptor
        self._advance = advance

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes that were not hashed yet."""
        self._append(data)
        self.crc32 = crc32(data, self.crc32)

    def append_blocks(self, blocks: Iterator[memoryview]) -> int:
        """Append blocks; returns the CRC-32 of them alone."""
        begin, value = self.nbytes, 0
        for block in blocks:
            value = crc32(block, value)
            self._append(block)
        self.crc32 = crc32_combine(self.crc32, value, self.nbytes - begin)
        return value

    def _append(self, data: bytes | memoryview) -> None:
        write_all(self._descriptor, data, self.nbytes)
        self.nbytes += len(data)
        self._advance(len(data))


def _write_plan(plan: FilePlan, joined: Mapping[str, Iterable[torch.Tensor]], files: MappedFiles, sink: _Sink) -> None:
    values: dict[tuple[int, int], int] = {}
    seals = sorted(plan.seals, key=_offset)
    for segment in plan.segments:
        if segment.begin > sink.nbytes:
            sink.append(bytes(segment.begin - sink.nbytes))
        if isinstance(segment.source, torch.Tensor):
            blocks = _blocks(segment, segment.source, joined, files)
            values[segment.begin, segment.end] = sink.append_blocks(blocks)
            if sink.nbytes != segment.end:
                raise ValueError(f"{segment.fqn}: {sink.nbytes - segment.begin} bytes, planned {segment.nbytes}")
        elif isinstance(segment.source, (bytes, bytearray, memoryview)):
            sink.append(_sealed(seals, segment, segment.source, values))
        else:
            raise TypeError(f"{segment.fqn}: a plan of a state has no source of another file")


def _sealed(
    seals: Sequence[Seal],
    segment: Segment,
    data: bytes | bytearray | memoryview,
    values: Mapping[tuple[int, int], int],
) -> bytes:
    """The literal bytes of a segment, with the checksums in it filled in. ``seals`` are in the order of offsets."""
    filled = bytearray(data)
    first, last = (bisect.bisect_left(seals, offset, key=_offset) for offset in (segment.begin, segment.end))
    for seal in seals[first:last]:
        position = seal.offset - segment.begin
        filled[position : position + SEAL_NBYTES] = values[seal.begin, seal.end].to_bytes(SEAL_NBYTES, "little")
    return bytes(filled)


def _offset(seal: Seal) -> int:
    return seal.offset


def _blocks(
    segment: Segment, source: torch.Tensor, joined: Mapping[str, Iterable[torch.Tensor]], files: MappedFiles
) -> Iterator[memoryview]:
    views = joined.get(segment.fqn)
    if views is None:
        yield from files.blocks(source)
        return
    for view in views:
        if view.dtype is source.dtype:
            yield from files.blocks(view)
            continue
        for block in files.blocks(view):
            yield from files.blocks(torch.frombuffer(block, dtype=torch.uint8).view(view.dtype).to(source.dtype))


def _copy(path: str, sink: _Sink) -> None:
    for chunk in read_chunks(path, 0, os.path.getsize(path), BLOCK_BYTES):
        sink.append(chunk)
