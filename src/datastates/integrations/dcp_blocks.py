"""Which bytes of a stored chunk a part of it is made of, as few ranges as that needs and none much longer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from datastates.reading import TILE_BYTES

GAP_BYTES = 64 << 10
"""What lies between two wanted ranges is read along with them if it is shorter: a read of its own takes longer."""


@dataclass(frozen=True, slots=True)
class Block:
    """A box of elements of a row-major chunk, and the range of elements that it lies in.

    Attributes:
        begin: its first element, counted in the chunk.
        end: behind its last one.
        offsets: of the box within the part that was asked for.
        lengths: of the box.
    """

    begin: int
    end: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def blocks_of(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int, limit_bytes: int = TILE_BYTES
) -> Iterator[Block]:
    """Cut a part of a chunk into boxes whose ranges are at most ``limit_bytes`` long, in order.

    Args:
        shape: of the chunk.
        offsets: where the part begins in it.
        lengths: of the part, within the chunk.
        itemsize: of an element, in bytes.
        limit_bytes: at least ``itemsize``.
    """
    if math.prod(lengths):
        first = _dot(offsets, strides_of(shape))
        yield from _cut(strides_of(shape), first, (0,) * len(lengths), tuple(lengths), itemsize, limit_bytes)


def _cut(
    strides: tuple[int, ...], first: int, offsets: tuple[int, ...], lengths: tuple[int, ...], itemsize: int, limit: int
) -> Iterator[Block]:
    begin = first + _dot(offsets, strides)
    span = _span(strides, lengths)
    dim = next((dim for dim, length in enumerate(lengths) if length > 1), None)
    if dim is None:
        yield Block(begin, begin + span, offsets, lengths)
        return
    single = (*lengths[:dim], 1, *lengths[dim + 1 :])
    step = strides[dim] * itemsize
    has_gaps = step - _span(strides, single) * itemsize >= GAP_BYTES
    if span * itemsize <= limit and not has_gaps:
        yield Block(begin, begin + span, offsets, lengths)
        return
    count = 1 if has_gaps else max(limit // step, 1)
    for start in range(0, lengths[dim], count):
        inner_offsets = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        inner_lengths = (*lengths[:dim], min(count, lengths[dim] - start), *lengths[dim + 1 :])
        yield from _cut(strides, first, inner_offsets, inner_lengths, itemsize, limit)


def _span(strides: Sequence[int], lengths: Sequence[int]) -> int:
    return 1 + _dot([length - 1 for length in lengths], strides)


def _dot(numbers: Sequence[int], others: Sequence[int]) -> int:
    return sum(one * other for one, other in zip(numbers, others, strict=True))
