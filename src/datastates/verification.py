"""A debugging aid: were the tensors really at rest from ``save()`` until the fence closed?"""

from __future__ import annotations

import torch

from datastates.checksum import crc32
from datastates.copier import device_blocks
from datastates.copying import copy_range, memory_at
from datastates.plan import FilePlan, Piece, Segment

_BLOCK_BYTES = 1 << 20


class SourceCheck:
    """Checksums of one file's tensors at the moment of ``save()``, for its copies and the tensors to be held against.

    `note` is called by the staging thread alone, `changed` by any one thread once all pieces are noted.
    """

    def __init__(self, plan: FilePlan) -> None:
        """Read all lazy tensors of the plan, and side files; blocks for that, for devices, too."""
        self._segments = [segment for segment in plan.segments if not segment.is_literal]
        self._expected = {segment.begin: _crc_of(segment) for segment in self._segments}
        self._copied: dict[int, int] = {}

    def note(self, piece: Piece, memory: torch.Tensor) -> None:
        """Take a copied piece into account; the pieces of a segment come in ascending order.

        Args:
            piece: what was copied; literal bytes are left out, since they belong to the save.
            memory: the slab that holds the copy.
        """
        if piece.segment.is_literal:
            return
        begin = piece.segment.begin
        copied = _view(memory[piece.slab_begin : piece.slab_begin + piece.nbytes])
        self._copied[begin] = crc32(copied, self._copied.get(begin, 0))

    def changed(self) -> tuple[str, ...]:
        """The fqns of the tensors that were not at rest: what was copied, or what is there now, is not what was saved.

        Reads all of them again; blocks for that.
        """
        return tuple(
            segment.fqn
            for segment in self._segments
            if not self._expected[segment.begin] == self._copied[segment.begin] == _crc_of(segment)
        )


def _crc_of(segment: Segment) -> int:
    source = segment.source
    if isinstance(source, (bytes, bytearray, memoryview)):
        raise TypeError(f"{segment.fqn}: a literal has no source to read again")
    scratch = torch.empty(min(_BLOCK_BYTES, segment.nbytes), dtype=torch.uint8)
    value = 0
    for begin in range(0, segment.nbytes, _BLOCK_BYTES):
        nbytes = min(_BLOCK_BYTES, segment.nbytes - begin)
        if not isinstance(source, torch.Tensor):
            source.read_into(begin, _view(scratch[:nbytes]))
        elif source.device.type == "cpu":
            copy_range(source, begin, scratch, nbytes)
        else:
            torch.cat([block.cpu() for block in device_blocks(source, begin, nbytes)], out=scratch[:nbytes])
        value = crc32(_view(scratch[:nbytes]), value)
    return value


def _view(memory: torch.Tensor) -> memoryview:
    return memory_at(memory.data_ptr(), memory.numel())
