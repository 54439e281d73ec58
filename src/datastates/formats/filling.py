"""Fills tensors that exist already from tensors that lie in a file, a few buffers at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from datastates.copying import memory_at
from datastates.formats.selectable import FileTensor
from datastates.reading import (
    TILE_BYTES,
    FileReader,
    Sink,
    Tile,
    address_of,
    copy_bytes,
    fresh_memory,
    merged,
    page_ceil,
    page_floor,
)
from datastates.state import alias, has_its_bytes, has_own_storage
from datastates.uploads import Upload, link_to, settle, upload

_SMALL_BYTES = 1 << 20


def why_not(target: torch.Tensor) -> str:
    """Why a tensor cannot be filled in place; empty when it can."""
    if target.device.type == "meta":
        return "the target is on the meta device and has no memory: give it some, for example by to_empty()"
    if not has_own_storage(target):
        return f"the target is a {type(target).__name__}, which is no plain strided tensor"
    if any(stride == 0 and size > 1 for size, stride in zip(target.shape, target.stride(), strict=True)):
        return "the target is expanded: several of its elements are the same memory"
    if _may_overlap(target):
        return "the target is a view whose elements overlap: several of them are the same memory"
    if not has_its_bytes(target):
        return "the target has no memory: somebody has freed or shrunk its storage"
    return ""


def fill(file: FileReader, pairs: Iterable[tuple[FileTensor, torch.Tensor]]) -> None:
    """Read tensors of the file into targets of the same shape; their dtype, device and memory stay.

    Blocks until all are filled; a failure leaves some filled. Takes a buffer of `TILE_BYTES` for each reading thread,
    or the slabs of an `upload`, and for tensors whose strides differ, which have to be turned, their size once more.

    Raises:
        CorruptCheckpointError: the file ends before.
        StorageError: the device or file system fails.
    """
    tiles: list[Tile] = []
    turned: list[tuple[FileTensor, torch.Tensor]] = []
    uploads: dict[torch.device, list[Upload]] = {}
    targets: list[torch.Tensor] = []
    converted: list[torch.Tensor] = []
    for source, target in pairs:
        targets.append(target)
        if source.begin == source.end:
            continue
        if _is_same_memory(source, target):
            tiles.append(_plain_tile(source, _memory_of(target)))
        elif _is_sendable(source, target):
            flat = alias(target).as_strided((target.numel(),), (1,), target.storage_offset()).view(torch.uint8)
            uploads.setdefault(target.device, []).append(Upload(source.begin, source.end, flat))
        elif _is_contiguous(source) and target.is_contiguous():
            tiles += _converting_tiles(source, alias(target).view(-1))
            converted.append(target)
        else:
            turned.append((source, target))
    for device in {target.device for target in converted if target.device.type != "cpu"}:
        settle(device)
    file.run(merged(tiles))
    for device, sent in uploads.items():
        upload(file, sent, link_to(device))
    for source, target in turned:
        _turn(file, source, target)
    bump = [target for target in targets if not target.is_inference()]
    if bump:
        torch.autograd.graph.increment_version(bump)  # memory was written behind the back of autograd


def copy_over(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a loaded tensor into a target."""
    with torch.inference_mode(target.is_inference()):  # what was made in that mode changes in no other
        alias(target).copy_(source.detach())


def _is_same_memory(source: FileTensor, target: torch.Tensor) -> bool:
    """Whether the bytes of the file are those of the target, one after the other."""
    is_equal = source.dtype is target.dtype and not target.is_conj() and not target.is_neg()
    return is_equal and target.device.type == "cpu" and _is_dense(source) and _strides(source) == _strides_of(target)


def _is_sendable(source: FileTensor, target: torch.Tensor) -> bool:
    """Whether the bytes of the file are those of a target on a device, one after the other."""
    is_flat = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    return is_flat and target.device.type != "cpu" and source.dtype is target.dtype and _is_contiguous(source)


def _may_overlap(target: torch.Tensor) -> bool:
    """Whether not each dimension steps over all that those of smaller strides reach."""
    reach = 0
    for stride, size in sorted(zip(target.stride(), target.shape, strict=True)):
        if size > 1 and stride <= reach:
            return target.numel() > 0
        reach += (size - 1) * stride
    return False


def _is_dense(source: FileTensor) -> bool:
    if source.end - source.begin != math.prod(source.shape) * source.dtype.itemsize:
        return False
    reach = 1
    for size, stride in sorted(zip(source.shape, source.stride, strict=True), key=lambda dim: dim[1]):
        if size > 1 and stride != reach:
            return False
        reach *= size
    return True


def _strides(source: FileTensor) -> list[int]:
    """Strides of the dimensions that have more than one element: the others' mean nothing."""
    return [stride for size, stride in zip(source.shape, source.stride, strict=True) if size > 1]


def _strides_of(target: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(target.shape, target.stride(), strict=True) if size > 1]


def _is_contiguous(source: FileTensor) -> bool:
    return torch.empty(source.shape, device="meta").stride() == source.stride or (
        _is_dense(source) and _strides(source) == _strides_of(torch.empty(source.shape, device="meta"))
    )


def _memory_of(target: torch.Tensor) -> memoryview:
    return memory_at(target.data_ptr(), target.numel() * target.itemsize)


def _plain_tile(source: FileTensor, memory: memoryview) -> Tile:
    """A tile that reads into the target itself, where that is large; small ones may share a read."""
    if len(memory) >= _SMALL_BYTES:
        return Tile(source.begin, source.end, target=memory)
    sink = (source.begin, source.end, lambda data: copy_bytes(memory, data))
    return Tile(source.begin, source.end, sinks=(sink,))


def _converting_tiles(source: FileTensor, flat: torch.Tensor) -> list[Tile]:
    """Tiles that convert dtype, or copy to a device; ``flat`` is the target in one dimension."""
    tiles, itemsize = [], source.dtype.itemsize
    step = TILE_BYTES // itemsize
    for first in range(0, flat.numel(), step):
        part = flat[first : first + step]
        begin = source.begin + first * itemsize
        end = begin + part.numel() * itemsize
        tiles.append(Tile(begin, end, sinks=((begin, end, _converter(part, source.dtype)),)))
    return tiles


def _converter(part: torch.Tensor, dtype: torch.dtype) -> Sink:
    def convert(data: memoryview) -> None:
        if address_of(data) % dtype.itemsize:
            aligned = memoryview(fresh_memory(len(data)))[: len(data)]
            copy_bytes(aligned, data)
            data = aligned
        with torch.inference_mode(part.is_inference()):
            part.copy_(torch.frombuffer(data, dtype=dtype))

    return convert


def _turn(file: FileReader, source: FileTensor, target: torch.Tensor) -> None:
    """Read a tensor as it lies in the file, and let torch copy it."""
    cover = page_floor(source.begin)
    memory = fresh_memory(page_ceil(source.end) - cover)
    file.run([Tile(source.begin, source.end, memoryview(memory))])
    raw = torch.frombuffer(memory, dtype=torch.uint8, offset=source.begin - cover, count=source.end - source.begin)
    aligned = raw if source.begin % 16 == 0 else raw.clone()
    window = torch.empty(0, dtype=source.dtype, device="cpu")
    copy_over(window.set_(aligned.untyped_storage(), 0, source.shape, source.stride), target)
