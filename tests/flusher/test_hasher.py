"""Checksums computed in pieces equal those computed at once."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.flusher.hasher import ImageHasher
from datastates.plan import Seal


@st.composite
def images(draw: st.DrawFn) -> tuple[bytes, list[Seal], list[int]]:
    """An image of blocks, each data and then seals over it or over earlier data, and sizes of pieces."""
    image = b""
    seals = []
    blocks: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, 6))):
        data = draw(st.binary(max_size=40))
        blocks.append((len(image), len(image) + len(data)))
        image += data
        for block in draw(st.lists(st.sampled_from(blocks), max_size=3)):
            seals.append(Seal(len(image), *block))
            image += b"????"
    return image, seals, draw(st.lists(st.integers(1, 30), min_size=1))


@given(images())
def test_any_cut(case: tuple[bytes, list[Seal], list[int]]) -> None:
    image, seals, sizes = case
    expected = bytearray(image)
    for seal in seals:
        struct.pack_into("<I", expected, seal.offset, zlib.crc32(expected[seal.begin : seal.end]))
    hasher = ImageHasher(seals)
    found = bytearray(image)
    begin = index = 0
    while begin < len(image):
        piece = memoryview(found)[begin : begin + sizes[index % len(sizes)]]
        value = hasher.feed(piece)
        assert value == zlib.crc32(piece)
        begin += piece.nbytes
        index += 1
    assert found == expected


def test_a_seal_before_the_end_of_its_range() -> None:
    with pytest.raises(ValueError, match="does not follow"):
        ImageHasher([Seal(5, 0, 6)])
