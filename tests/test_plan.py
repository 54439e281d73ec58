"""The byte image: segments, seals, and the slabs it is cut into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.plan import FilePlan, Segment


@st.composite
def plans(draw: st.DrawFn) -> tuple[FilePlan, bytes]:
    """A plan of literal segments with gaps, and the bytes it stands for."""
    parts = draw(st.lists(st.tuples(st.integers(0, 20), st.binary(min_size=1, max_size=40)), max_size=8))
    image = b""
    segments = []
    for gap, data in parts:
        image += bytes(gap)
        segments.append(Segment(len(image), len(data), data))
        image += data
    image += bytes(draw(st.integers(0, 20)))
    return FilePlan("torch", len(image), tuple(segments)), image


@given(made=plans(), slab_bytes=st.integers(1, 64))
def test_slabs_make_up_the_image(made: tuple[FilePlan, bytes], slab_bytes: int) -> None:
    plan, image = made
    found = bytearray()
    for index, slab in enumerate(plan.slabs(slab_bytes)):
        assert (slab.index, slab.begin) == (index, len(found))
        assert 0 < slab.nbytes <= slab_bytes
        content = bytearray(slab.nbytes)
        end = 0
        for piece in slab.pieces:
            assert piece.slab_begin >= end
            end = piece.slab_begin + piece.nbytes
            assert end <= slab.nbytes
            data = piece.segment.source[piece.segment_begin : piece.segment_begin + piece.nbytes]
            content[piece.slab_begin : end] = data
        found += content
    assert found == image
    assert plan.num_slabs(slab_bytes) == -(-len(image) // slab_bytes)


def test_a_segment_may_span_many_slabs() -> None:
    plan = FilePlan("torch", 100, (Segment(10, 80, bytes(range(80))),))
    assert [len(slab.pieces) for slab in plan.slabs(16)] == [1, 1, 1, 1, 1, 1, 0]
    assert plan.slab(1, 16).pieces[0].segment_begin == 6


@pytest.mark.parametrize("index", [-1, 2])
def test_there_is_no_slab_outside_the_file(index: int) -> None:
    with pytest.raises(IndexError, match="of 2 slabs"):
        FilePlan("torch", 20, ()).slab(index, 16)


@pytest.mark.parametrize(
    ("nbytes", "segments", "eager_end"),
    [
        (10, (Segment(0, 5, b"12345"), Segment(4, 2, b"12")), 0),
        (10, (Segment(0, 0, b""),), 0),
        (10, (Segment(8, 5, b"12345"),), 0),
        (10, (), 11),
    ],
    ids=["overlap", "empty", "beyond-the-end", "eager-end-beyond-the-end"],
)
def test_impossible_plans_are_refused(nbytes: int, segments: tuple[Segment, ...], eager_end: int) -> None:
    with pytest.raises(ValueError, match="segment"):
        FilePlan("torch", nbytes, segments, (), eager_end)
