"""Builds the bytes of a plan in memory, the slow and obvious way."""

from __future__ import annotations

import zlib

import torch

from datastates.copying import copy_to_bytes
from datastates.plan import FilePlan


def image_of(plan: FilePlan, slab_bytes: int = 1 << 20) -> bytes:
    """Fill slab after slab, then apply the seals in file order."""
    image = bytearray(plan.nbytes)
    for slab in plan.slabs(slab_bytes):
        for piece in slab.pieces:
            source = piece.segment.source
            data = copy_to_bytes(source) if isinstance(source, torch.Tensor) else source
            assert len(data) == piece.segment.nbytes, piece.segment.fqn
            begin = slab.begin + piece.slab_begin
            image[begin : begin + piece.nbytes] = data[piece.segment_begin : piece.segment_begin + piece.nbytes]
    for seal in plan.seals:
        assert seal.offset >= seal.end
        image[seal.offset : seal.offset + 4] = zlib.crc32(image[seal.begin : seal.end]).to_bytes(4, "little")
    return bytes(image)
