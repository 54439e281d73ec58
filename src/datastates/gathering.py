"""Many pieces of host memory, copied behind one another by few calls that do not hold the GIL.

Where training is busy with Python, a background thread gets the GIL only after a while, and slows training down each
time that it takes it: not once per piece, then. A vectored write to a file in memory copies a thousand pieces at once.
The kernel copies long ones half as fast as ``memmove`` does, so it is for small pieces only.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import le

import torch

from datastates.plan import Columns, Segment, SlabPlan

#: Pieces of more bytes are left to ``memmove``.
PIECE_BYTES = 256 * 1024

#: With fewer pieces one by one is as good.
MIN_PIECES = 16

#: Parts of one vectored call. Source: ``UIO_MAXIOV`` of Linux, ``IOV_MAX`` of readv(2).
_MAX_PARTS = 1024

_libc = ctypes.CDLL(None)
_pwritev = _libc.pwritev
_pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long)
_pwritev.restype = ctypes.c_ssize_t


def gather_into(descriptor: int, offset: int, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Copy pieces of this process's memory behind one another into a file in memory, from ``offset`` on.

    Blocks until they are there; the GIL is released while they move. Whoever owns the pieces keeps them alive and
    unchanged meanwhile.

    Args:
        descriptor: of a memfd, open for writing. Its size does not shrink; it grows where the pieces reach beyond it.
        offset: where the first piece goes, in bytes.
        addresses: where each piece is.
        sizes: how many bytes it has.

    Returns:
        Whether all pieces were copied. Where not (no memory left for the file, a piece that is not there), nothing
        is known of any byte of the range.

    Source: readv(2); the layout of ``struct iovec`` in POSIX <sys/uio.h>.
    """
    vector = array("Q", bytes(16 * len(addresses)))
    vector[0::2], vector[1::2] = array("Q", addresses), array("Q", sizes)
    return gather_vector(descriptor, offset, vector)


def gather_vector(descriptor: int, offset: int, vector: array[int]) -> bool:
    """As `gather_into`; ``vector`` has the address and the size of each piece in turns."""
    address, num_parts = vector.buffer_info()[0], len(vector) // 2
    for first in range(0, num_parts, _MAX_PARTS):
        last = min(first + _MAX_PARTS, num_parts)
        nbytes = sum(vector[2 * first + 1 : 2 * last : 2])
        if _pwritev(descriptor, address + 16 * first, last - first, offset) != nbytes:
            return False
        offset += nbytes
    return True


def gathered(addresses: Sequence[int], sizes: Sequence[int]) -> list[bytes] | None:
    """Copies of pieces of this process's memory, see `gather_into`; None where they cannot be copied that way."""
    ends = [0, *accumulate(sizes)]
    try:
        descriptor = os.memfd_create("datastates-capture", os.MFD_CLOEXEC)
    except OSError:  # no descriptor left: the caller has another way
        return None
    try:
        if not gather_into(descriptor, 0, addresses, sizes):
            return None
        data = os.pread(descriptor, ends[-1], 0)
    finally:
        os.close(descriptor)
    if len(data) != ends[-1]:
        return None
    return [data[begin:end] for begin, end in pairwise(ends)]


def runs_of(plan: SlabPlan) -> Iterator[Sequence[Segment]]:
    """The segments of a slab in order; those together that are small and adjoin each other."""
    segments = plan.segments
    if isinstance(segments, Columns):
        begins, lengths = segments.begins, segments.lengths
    else:
        begins, lengths = [one.begin for one in segments], [one.nbytes for one in segments]
    first, end = 0, -1  # of the run so far; a large segment ends none that could go on
    for position, (begin, nbytes) in enumerate(zip(begins, lengths, strict=True)):
        is_small = nbytes <= PIECE_BYTES
        if position > first and not (is_small and end == begin):
            yield segments[first:position]
            first = position
        end = begin + nbytes if is_small else -1
    if segments:
        yield segments[first:]


def place_of(run: Sequence[Segment]) -> tuple[int, int]:
    """Begin and end in the file of segments that adjoin each other, at least one."""
    if isinstance(run, Columns):
        return run.begins[0], run.begins[-1] + run.lengths[-1]
    return run[0].begin, run[-1].end


def gather_segments(descriptor: int, offset: int, plan: SlabPlan, segments: Sequence[Segment]) -> bool:
    """Copy segments of host memory into their slab, which lies in a file in memory, see `gather_into`.

    Args:
        descriptor: of the memfd.
        offset: where the slab lies in it.
        plan: the slab.
        segments: some of its segments, which adjoin each other; their parts outside of the slab are left out.

    Returns:
        Whether they were copied. Not where one of them is neither literal bytes nor a tensor whose memory holds just
        its elements.
    """
    sources = [segment.source for segment in segments]
    tensors = [source for source in sources if type(source) is torch.Tensor]
    if not _are_flat(tensors) or sum(type(source) is bytes for source in sources) + len(tensors) < len(sources):
        return False
    addresses = map(torch.Tensor.data_ptr, tensors)
    parts: list[bytes | memoryview | ctypes.Array[ctypes.c_char]] = [
        source if type(source) is bytes else _array_type(segment.nbytes).from_address(next(addresses))
        for source, segment in zip(sources, segments, strict=True)
    ]
    for index in {0, len(segments) - 1}:  # these may reach out of the slab
        piece = plan.piece(segments[index])
        parts[index] = memoryview(parts[index])[piece.segment_begin : piece.segment_begin + piece.nbytes]
    begin, end = max(segments[0].begin, plan.begin), min(segments[-1].end, plan.end)
    position = offset + begin - plan.begin
    try:
        for first in range(0, len(parts), _MAX_PARTS):
            position += os.pwritev(descriptor, parts[first : first + _MAX_PARTS], position)
    except OSError:  # the caller has another way, which says what is wrong
        return False
    return position == offset + end - plan.begin


def _are_flat(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are host tensors whose memory holds row by row what they are, and is as long as they need."""
    kind = torch.Tensor
    if not all(map(kind.is_contiguous, tensors)) or any(map(kind.is_neg, tensors)) or any(map(kind.is_conj, tensors)):
        return False
    lengths = map(torch.UntypedStorage.nbytes, map(kind.untyped_storage, tensors))
    ends = [tensor.storage_offset() * tensor.itemsize + tensor.nbytes for tensor in tensors if tensor.is_cpu]
    return len(ends) == len(tensors) and all(map(le, ends, lengths))


@lru_cache(4096)
def _array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes
