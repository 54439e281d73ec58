"""Copies that wait in the host cache until their file is planned."""

from __future__ import annotations

import pytest
import torch

from datastates.cache_copies import CacheCopies
from datastates.captures import EagerBudget
from datastates.errors import ClosedError
from datastates.host_cache import HostCache

SLAB = 4096


@pytest.fixture
def cache():
    cache = HostCache(4 * SLAB, SLAB)
    yield cache
    cache.close()


@pytest.fixture
def copies(cache):
    copies = CacheCopies(cache, EagerBudget(2 * SLAB))
    yield copies
    copies.release()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.complex128])
def test_a_copy_is_like_the_tensor_and_stays_as_it_is(copies, dtype):
    tensors = [torch.arange(7).to(dtype), torch.arange(6).reshape(2, 3).to(dtype), torch.ones((), dtype=dtype)]
    expected = [tensor.clone() for tensor in tensors]
    made = [copies.copy(tensor) for tensor in tensors]
    for tensor, copied, before in zip(tensors, made, expected, strict=True):
        tensor.zero_()
        assert copied.dtype is dtype and copied.shape == before.shape and copied.is_contiguous()
        assert copied.data_ptr() % 64 == 0 and torch.all(copied == before)


def test_what_is_no_plain_row_of_host_memory_is_left_to_others(copies):
    for tensor in (
        torch.ones(30, 30).t(),
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        torch.ones(4, device="meta"),
        torch.ones(0),
        torch.ones(SLAB),
    ):
        assert copies.copy(tensor) is None
    assert copies.is_empty


def test_no_more_slabs_are_taken_than_the_budget_allows_over_all_saves_nor_than_are_free(cache):
    budget = EagerBudget(2 * SLAB)
    one, other = CacheCopies(cache, budget), CacheCopies(cache, budget)
    assert one.copy(torch.ones(1000)) is not None and other.copy(torch.ones(1000)) is not None
    assert one.copy(torch.ones(1000)) is None and other.copy(torch.ones(10)) is not None  # that has room in its slab
    assert cache.num_free == 2
    one.release()
    one.release()
    assert cache.num_free == 3 and one.copy(torch.ones(1)) is None
    held = [cache.reserve(0) for _ in range(3)]
    assert other.copy(torch.ones(1000)) is None
    cache.release(held[0].offset)
    assert other.copy(torch.ones(1000)) is not None  # what it had taken from the budget it has given back


def test_copies_do_not_look_changed_when_others_are_made(cache):
    one, other = (CacheCopies(cache, EagerBudget(SLAB)) for _ in range(2))
    copied = one.copy(torch.ones(8))
    version = copied._version
    assert other.copy(torch.ones(8)) is not None
    cache.memory[-1] = 1  # the counter of the whole cache
    assert copied._version == version


def test_a_closed_cache_says_so(cache, copies):
    cache.close()
    with pytest.raises(ClosedError):
        copies.copy(torch.ones(1))
