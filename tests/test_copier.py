from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates import copier
from datastates.copier import HostCopier, copier_for, device_blocks
from datastates.copying import is_flat, row_blocks
from datastates.plan import Piece, Segment


@st.composite
def strided(draw):
    """A tensor of random shape and strides, and a range of its elements."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    tensor = torch.arange(max(torch.Size(shape).numel(), 1) * 3, dtype=torch.int32)[: torch.Size(shape).numel()]
    tensor = tensor.reshape(shape)
    if len(shape) > 1:
        tensor = tensor.permute(*draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[::2]
    if shape and draw(st.booleans()):
        tensor = tensor.unsqueeze(1).expand(tensor.shape[0], 2, *tensor.shape[1:])
    first = draw(st.integers(0, tensor.numel()))
    return tensor, first, draw(st.integers(first, tensor.numel()))


@given(strided(), st.integers(1, 40))
@settings(deadline=None)
def test_row_blocks_are_the_elements_in_order_and_small(case, limit):
    tensor, first, last = case
    blocks = list(row_blocks(tensor, first, last, limit))
    assert all(is_flat(block) or 0 < block.numel() <= limit for block in blocks)
    found = torch.cat([block.reshape(-1) for block in blocks]) if blocks else torch.empty(0, dtype=torch.int32)
    assert torch.equal(found, tensor.reshape(-1)[first:last])


@given(strided())
@settings(deadline=None)
def test_device_blocks_are_the_bytes_in_order(case):
    tensor, first, last = case
    blocks = list(device_blocks(tensor, first * 4, (last - first) * 4))
    expected = torch.tensor(tensor.reshape(-1)[first:last].tolist(), dtype=torch.int32).view(torch.uint8)
    assert torch.equal(torch.cat(blocks) if blocks else expected[:0], expected)


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, lambda t: t.conj().imag])
def test_device_blocks_resolve_conjugation_and_negation(lazy):
    tensor = lazy(torch.randn(6, 7, dtype=torch.complex64))
    expected = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(torch.cat(list(device_blocks(tensor, 0, expected.numel()))), expected)


def test_a_non_contiguous_tensor_is_gathered_in_bounded_blocks(monkeypatch):
    monkeypatch.setattr(copier, "DEVICE_BLOCK_BYTES", 64)
    tensor = torch.arange(1000.0).reshape(50, 20).t()
    blocks = list(device_blocks(tensor, 0, 4000))
    assert max(block.numel() for block in blocks) <= 64
    assert torch.equal(torch.cat(blocks).view(torch.float32), tensor.reshape(-1))


def test_where_memory_is_short_blocks_are_halved(monkeypatch):
    contiguous, refused = torch.Tensor.contiguous, []

    def limited(tensor):
        if tensor.numel() * tensor.element_size() > 500:
            refused.append(tensor.numel())
            raise torch.OutOfMemoryError("no more than 500 bytes")
        return contiguous(tensor)

    monkeypatch.setattr(copier, "MIN_DEVICE_BLOCK_BYTES", 64)
    monkeypatch.setattr(torch.Tensor, "contiguous", limited)
    tensor = torch.arange(1000.0).reshape(50, 20).t()
    blocks = list(device_blocks(tensor, 0, 4000))
    assert refused == [1000, 500, 250, 250, 500, 250, 250]
    assert torch.equal(torch.cat(blocks).view(torch.float32), torch.arange(1000.0).reshape(50, 20).t().reshape(-1))
    monkeypatch.setattr(copier, "MIN_DEVICE_BLOCK_BYTES", 1000)
    with pytest.raises(torch.OutOfMemoryError):
        list(device_blocks(tensor, 0, 4000))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool])
def test_blocks_are_the_bytes_of_any_dtype(dtype):
    raw = torch.randint(0, 2, (6 * 8 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(6, 8)
    assert torch.equal(torch.cat(list(device_blocks(tensor, 0, raw.numel()))), raw)
    turned = torch.cat(list(device_blocks(tensor.t(), 0, raw.numel())))
    expected = raw.view(6, 8, dtype.itemsize).transpose(0, 1).reshape(-1)
    assert torch.equal(turned, expected)


def test_a_device_without_streams_is_copied_by_the_call(monkeypatch):
    tensor = torch.randn(30, 40)
    assert type(copier_for(torch.device("cpu"))) is HostCopier
    monkeypatch.setattr(copier, "runtime_of", lambda device: None)
    plain = copier_for(torch.device("mps"))
    assert plain.ready() is None and plain.mark() is None
    for source in (tensor, tensor.t()):
        target = torch.zeros(4800, dtype=torch.uint8)
        plain.copy(Piece(Segment(0, 4800, source, "t"), 400, 0, 4000), target, None)
        assert torch.equal(target[:4000], source.reshape(-1).view(torch.uint8)[400:4400])
        assert not target[4000:].any()
