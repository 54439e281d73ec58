"""Copies of host tensors that start no OpenMP team and make no temporary of the whole tensor.

A copy in the background must not wake ATen's thread pool: its workers spin beside the training threads and
each thread that starts a team keeps one for ever. Contiguous bytes therefore move by ``memmove`` (which
releases the GIL), strided ones in blocks that ATen copies on the calling thread alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

#: ATen runs an element-wise kernel on the calling thread up to this many elements.
#: Source: ``at::internal::GRAIN_SIZE`` in ``aten/src/ATen/TensorIterator.h``; ``parallel_for`` forks only above it.
BLOCK_ELEMENTS = 32768

#: Up to this size one interpreter call that copies into a new ``bytes`` is the cheapest way, GIL and all.
STRING_BYTES = 64 * 1024


def memory_at(address: int, nbytes: int) -> memoryview:
    """A writable view of so many bytes, more than none; whoever owns them must outlive it."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether the memory at ``data_ptr()`` holds exactly the row-major elements of the tensor."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def copy_range(tensor: torch.Tensor, begin: int, destination: int | torch.Tensor, nbytes: int) -> None:
    """Copy bytes ``[begin, begin + nbytes)`` of a host tensor's row-major elements.

    The tensor may have any strides, any dtype, lazy conjugation or negation (both are resolved). Blocks until
    the bytes are there; the GIL is released while they move. Thread safe as far as nobody changes the source.

    Args:
        tensor: strided tensor on the CPU.
        begin: offset in bytes into the elements; need not stand at the start of one.
        destination: address of, or contiguous uint8 CPU tensor with, at least ``nbytes`` writable bytes.
        nbytes: how many bytes.

    Raises:
        ValueError: the range is not within the tensor, or the destination is too small or not plain bytes.
    """
    total = tensor.numel() * tensor.itemsize
    if begin < 0 or nbytes < 0 or begin + nbytes > total:
        raise ValueError(f"bytes [{begin}, {begin + nbytes}) of a tensor of {total} bytes")
    pointer = _address(destination, nbytes)
    if nbytes == 0:
        return
    source = tensor.detach()
    if is_flat(source):
        ctypes.memmove(pointer, source.data_ptr() + begin, nbytes)
        return
    if source.itemsize == 1 and not source.is_neg():
        source = source.view(torch.uint8)  # ATen has no copy kernel for the sub-byte dtypes
    _copy_bytes(source, begin, pointer, nbytes)


def copy_to_bytes(tensor: torch.Tensor) -> bytes | bytearray:
    """The row-major elements of a host tensor as new bytes; see `copy_range`."""
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes == 0:
        return b""
    if nbytes <= STRING_BYTES and is_flat(tensor):
        return ctypes.string_at(tensor.data_ptr(), nbytes)
    copy = bytearray(nbytes)
    copy_range(tensor, 0, ctypes.addressof(ctypes.c_char.from_buffer(copy)), nbytes)
    return copy


def _address(destination: int | torch.Tensor, nbytes: int) -> int:
    if isinstance(destination, int):
        return destination
    plain = destination.dtype is torch.uint8 and destination.device.type == "cpu" and destination.is_contiguous()
    if not plain or destination.numel() < nbytes:
        raise ValueError(
            f"destination must be {nbytes} contiguous uint8 bytes on the CPU, found {destination.numel()} "
            f"elements of {destination.dtype} on {destination.device}"
        )
    return destination.data_ptr()


def _copy_bytes(source: torch.Tensor, begin: int, pointer: int, nbytes: int) -> None:
    """Cut a byte range into whole elements and at most two parts of an element."""
    itemsize, end = source.itemsize, begin + nbytes
    first, last = -(-begin // itemsize), end // itemsize
    if first > last:  # within one element
        _copy_part(source, begin, end, pointer)
        return
    if begin < first * itemsize:
        _copy_part(source, begin, first * itemsize, pointer)
    _copy_elements(source, first, last, pointer + first * itemsize - begin)
    if last * itemsize < end:
        _copy_part(source, last * itemsize, end, pointer + last * itemsize - begin)


def _copy_part(source: torch.Tensor, begin: int, end: int, pointer: int) -> None:
    index, itemsize = begin // source.itemsize, source.itemsize
    element = ctypes.create_string_buffer(itemsize)
    _copy_elements(source, index, index + 1, ctypes.addressof(element))
    ctypes.memmove(pointer, ctypes.addressof(element) + begin - index * itemsize, end - begin)


def _copy_elements(source: torch.Tensor, first: int, last: int, pointer: int) -> None:
    """Copy elements ``[first, last)`` in row-major order."""
    for block in row_blocks(source, first, last, BLOCK_ELEMENTS):
        if is_flat(block):
            ctypes.memmove(pointer, block.data_ptr(), block.nbytes)
        else:
            _copy_block(block, pointer)
        pointer += block.numel() * block.itemsize


def row_blocks(source: torch.Tensor, first: int, last: int, limit: int) -> Iterator[torch.Tensor]:
    """Views that together are the row-major elements ``[first, last)``, in order.

    Each is flat (see `is_flat`), or has at most ``limit`` elements. Works on tensors of any device; copies nothing.
    """
    if first == last:
        return
    if is_flat(source):
        yield source.as_strided((source.numel(),), (1,))[first:last]
        return
    if source.dim() == 0:
        yield source
        return
    row = source.numel() // source.shape[0]
    first_row, skipped = divmod(first, row)
    if skipped or last - first < row or row > limit:  # a part of one row, or a row that is too long, then the rest
        end = min(last, (first_row + 1) * row)
        yield from row_blocks(source[first_row], skipped, end - first_row * row, limit)
        yield from row_blocks(source, end, last, limit)
        return
    last_row = min(last // row, first_row + limit // row)
    yield source[first_row:last_row]
    yield from row_blocks(source, last_row * row, last, limit)


def _copy_block(source: torch.Tensor, pointer: int) -> None:
    raw = (ctypes.c_uint8 * (source.numel() * source.itemsize)).from_address(pointer)
    target = torch.frombuffer(raw, dtype=torch.uint8).view(source.dtype).view(source.shape)
    target.copy_(source)
