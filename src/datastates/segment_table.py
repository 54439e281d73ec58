"""Large tensors of the host and the literal bytes between them, column by column.

A file of ten thousand such tensors has twenty thousand segments. One object for each would cost ``save()`` more than
all the rest, and the staging thread would hold the GIL to look at each: here both touch whole columns by native calls,
and the bytes of a slab are copied by one.
"""

from __future__ import annotations

import bisect
import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import add, attrgetter, ne
from typing import overload

import torch

from datastates.errors import TornSnapshotError
from datastates.gathering import MIN_PIECES, gather_vector
from datastates.host_cache import Slab
from datastates.plan import Columns, Segment, SlabPlan

_version = attrgetter("_version")
with torch.inference_mode(False):
    _AT_REST = torch.empty(0, device="cpu")  # whatever is the default where this is imported

#: So many bytes are copied sooner than a thread gets the GIL back that it has let go of.
_QUICK_BYTES = 64 * 1024

_quick_memmove = ctypes.PyDLL(None).memmove
_quick_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_quick_memmove.restype = ctypes.c_void_p


def versions_of(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], list[int]]:
    """What to ask for the versions of tensors later, and what it says now."""
    try:
        return tensors, list(map(_version, tensors))
    except RuntimeError:  # inference tensors have none
        tensors = [_AT_REST if tensor.is_inference() else tensor for tensor in tensors]
        return tensors, list(map(_version, tensors))


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Where contiguous tensors of the host lay at the moment of ``save()``, one value per tensor and column.

    Their memory is kept alive by the storages: no rebinding of ``.data`` reaches them, and no change of the tensors'
    own shape. The tensors are only asked for their versions.

    Attributes:
        names: fqns.
        storages: what they are windows on.
        offsets: first byte of each in its storage.
        lengths: bytes of each.
        addresses: of that byte.
        storage_nbytes: length of each storage.
        watched: the tensors; another one that never changes in the place of one without a version.
        versions: of these.
    """

    names: Sequence[str]
    storages: Sequence[torch.UntypedStorage]
    offsets: Sequence[int]
    lengths: Sequence[int]
    addresses: Sequence[int]
    storage_nbytes: Sequence[int]
    watched: Sequence[torch.Tensor]
    versions: Sequence[int]

    def changed(self, first: int, last: int) -> tuple[str, ...]:
        """Names of those of ``[first, last)`` that were changed in place since, as far as version counters tell."""
        rows = slice(first, last)
        versions = list(map(_version, self.watched[rows]))
        if versions == self.versions[rows]:
            return ()
        return tuple(compress(self.names[rows], map(ne, versions, self.versions[rows])))

    def are_in_place(self, first: int, last: int) -> bool:
        """Whether no storage of ``[first, last)`` was resized since: then each byte is where it was."""
        storages = self.storages[first:last]
        if list(map(torch.UntypedStorage.nbytes, storages)) != self.storage_nbytes[first:last]:
            return False
        begins = map(torch.UntypedStorage.data_ptr, storages)
        return list(map(add, begins, self.offsets[first:last])) == self.addresses[first:last]

    def tensor(self, position: int) -> torch.Tensor:
        """The bytes of one of them, as a flat uint8 tensor on the memory that it had.

        Raises:
            TornSnapshotError: the storage is too short for it by now.
        """
        storage, offset, nbytes = self.storages[position], self.offsets[position], self.lengths[position]
        if storage.nbytes() < offset + nbytes:
            name = self.names[position]
            message = f"{name}: its storage was freed or shrunk between save() and its copy; call wait() before that"
            raise TornSnapshotError(message, (name,))
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, offset, (nbytes,), (1,))


@dataclass(frozen=True, slots=True, eq=False)
class Literals:
    """The bytes before, between and behind the tensors: those between are the same in each save.

    Attributes:
        between: all of them behind one another.
        ends: where each ends in it.
    """

    first: bytes
    between: bytes
    ends: Sequence[int]
    last: bytes

    def __getitem__(self, index: int) -> bytes | memoryview:
        if index == 0:
            return self.first
        if index > len(self.ends):
            return self.last
        return memoryview(self.between)[self.ends[index - 2] if index > 1 else 0 : self.ends[index - 1]]


class SegmentTable(Columns):
    """Literal bytes and tensors in turns, beginning and ending with literal bytes, without gaps."""

    def __init__(
        self,
        begins: Sequence[int],
        lengths: Sequence[int],
        literals: Literals,
        windows: Windows,
        vector: array[int],
        first: int = 0,
    ) -> None:
        """Args:
        begins: offset of each segment.
        lengths: bytes of each.
        literals: the even ones of the whole file.
        windows: the odd ones of the whole file.
        vector: address and length of each segment.
        first: how many segments of the file are before these.
        """
        self.begins = begins
        self.lengths = lengths
        self.windows = windows
        self._literals = literals
        self._vector = vector
        self._first = first

    @property
    def literal_nbytes(self) -> int:
        return sum(self.lengths[self._first % 2 :: 2])

    @overload
    def __getitem__(self, index: int) -> Segment: ...

    @overload
    def __getitem__(self, index: slice) -> SegmentTable: ...

    def __getitem__(self, index: int | slice) -> Segment | SegmentTable:
        if isinstance(index, slice):
            return self._part(*index.indices(len(self)))
        index = range(len(self))[index]
        begin, nbytes = self.begins[index], self.lengths[index]
        number, is_tensor = divmod(self._first + index, 2)
        if is_tensor:
            return Segment(begin, nbytes, self.windows.tensor(number), self.windows.names[number])
        return Segment(begin, nbytes, self._literals[number])

    def changed(self, begin: int, end: int) -> tuple[str, ...]:
        """Names of tensors that begin in ``[begin, end)`` of the file and were changed in place since ``save()``."""
        first, last = (self._first + bisect.bisect_left(self.begins, offset) for offset in (begin, end))
        return self.windows.changed(first // 2, last // 2)

    def copy_into(self, descriptor: int, slab: Slab, plan: SlabPlan) -> bool:
        """Copy the segments to their places in a slab; their parts outside of it are left out.

        Blocks until they are there; the GIL is released while many bytes move.

        Args:
            descriptor: of the memfd that the slab is in.
            slab: where to.
            plan: of the slab.

        Returns:
            Whether they were copied. Not where the memory of a tensor has moved, or the memfd takes no more.
        """
        first, last = self._first, self._first + len(self)
        if not self.windows.are_in_place(first // 2, last // 2):
            return False
        vector, begin, end = self._vector[:], self.begins[0], self.begins[-1] + self.lengths[-1]
        cut = max(plan.begin - begin, 0)
        vector[0] += cut
        vector[1] -= cut
        vector[-1] -= max(end - plan.end, 0)
        position = begin + cut - plan.begin
        if len(self) >= MIN_PIECES:
            return gather_vector(descriptor, slab.offset + position, vector)
        pointer = slab.memory.data_ptr() + position
        for address, nbytes in zip(vector[0::2], vector[1::2], strict=True):
            (ctypes.memmove if nbytes > _QUICK_BYTES else _quick_memmove)(pointer, address, nbytes)
            pointer += nbytes
        return True

    def _part(self, first: int, last: int, step: int) -> SegmentTable:
        if step != 1:
            raise ValueError("a part of a table is some of its segments, in order and without gaps")
        rows = slice(first, max(first, last))
        vector = self._vector[2 * rows.start : 2 * rows.stop]
        return SegmentTable(
            self.begins[rows], self.lengths[rows], self._literals, self.windows, vector, self._first + first
        )


def address_of(data: bytes) -> int:
    """Where the bytes of an object are, as long as it lives."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
