"""Random states for property tests."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st


def _allocatable() -> list[torch.dtype]:
    found = []
    for name in sorted(vars(torch)):
        dtype = getattr(torch, name)
        if (
            isinstance(dtype, torch.dtype)
            and dtype not in found
            and not str(dtype).startswith(("torch.q", "torch.bit"))
        ):
            found.append(dtype)
    return [*found, torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2]


#: Every dtype that torch can allocate without a quantizer.
DTYPES = _allocatable()


def tensor_from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.tensor(list(data), dtype=torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    return raw.view(dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    nbytes = math.prod(shape) * dtype.itemsize
    return tensor_from_bytes(draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype, shape)


_texts = st.text(st.characters(codec=None), max_size=5)
keys = st.one_of(
    _texts, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.tuples(st.integers(0, 3), _texts)
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.complex_numbers(allow_nan=True),
    _texts,
    st.binary(max_size=5),
    st.frozensets(st.integers(), max_size=3),
    st.datetimes(),
    tensors(),
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=10,
)


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Some windows of any strides on one storage of 64 elements."""
    base = torch.arange(64).to(draw(st.sampled_from([torch.float32, torch.int16, torch.complex64])))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        dims = draw(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 2, 3, 4, 6])), max_size=3))
        reach = sum(max(size - 1, 0) * stride for size, stride in dims)
        offset = draw(st.integers(0, 63 - reach))
        view = base.as_strided([size for size, _ in dims], [stride for _, stride in dims], offset)
        if view.is_complex() and draw(st.booleans()):
            view = view.conj()
        found.append(view)
    return found
