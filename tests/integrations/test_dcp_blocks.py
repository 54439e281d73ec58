"""Which ranges a part of a chunk is read by."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates.integrations import dcp_blocks
from datastates.integrations.dcp_blocks import GAP_BYTES, blocks_of, strides_of

MIB = 1 << 20


@st.composite
def parts(draw):
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    lengths = [draw(st.integers(0, size - begin)) for size, begin in zip(shape, offsets, strict=True)]
    return shape, offsets, lengths


@settings(deadline=None, max_examples=300)
@given(parts(), st.sampled_from([4, 16, 40, 4096]), st.sampled_from([1, 8, 64]))
def test_the_blocks_make_up_the_part_and_are_short(part, limit, gap):
    shape, offsets, lengths = part
    chunk = torch.arange(math.prod(shape)).reshape(shape)
    slices = tuple(slice(begin, begin + length) for begin, length in zip(offsets, lengths, strict=True))
    found = torch.full(lengths, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_blocks, "GAP_BYTES", gap)
        blocks = list(blocks_of(shape, offsets, lengths, 4, limit))
    for block in blocks:
        assert 4 * (block.end - block.begin) <= limit
        data = chunk.reshape(-1)[block.begin : block.end].as_strided(block.lengths, strides_of(shape))
        inner = tuple(slice(begin, begin + length) for begin, length in zip(block.offsets, block.lengths, strict=True))
        found[inner] = data
    assert torch.equal(found, chunk[slices])
    assert [block.begin for block in blocks] == sorted(block.begin for block in blocks)


@pytest.mark.parametrize(
    ("offsets", "lengths", "nbytes"),
    [
        pytest.param((512, 0), (256, 65536), 64 * MIB, id="rows: as much as is wanted"),
        pytest.param((0, 16384), (1024, 16384), 64 * MIB, id="columns with large gaps: as much as is wanted"),
        pytest.param((0, 0), (1024, 65536), 256 * MIB, id="all"),
    ],
)
def test_no_more_is_read_than_is_wanted_where_gaps_are_large(offsets, lengths, nbytes):
    blocks = list(blocks_of((1024, 65536), offsets, lengths, 4))
    assert sum(4 * (block.end - block.begin) for block in blocks) == nbytes


def test_small_gaps_are_read_along():
    columns = GAP_BYTES // 4
    blocks = list(blocks_of((64, columns), (0, 0), (64, columns // 2), 4))
    assert len(blocks) == 1
