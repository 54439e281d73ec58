"""What is copied inside of ``dcp.async_save``, and what is not."""

from __future__ import annotations

import threading

import pytest
import torch

from datastates.cache_copies import CacheCopies
from datastates.captures import Captures, EagerBudget
from datastates.errors import StateError, TornSnapshotError
from datastates.host_cache import HostCache
from datastates.integrations.dcp_staging import take_snapshot
from datastates.state import EagerRule

LIMIT = 1024


@pytest.fixture
def cache():
    cache = HostCache(16384, 4096)
    yield cache
    cache.close()


@pytest.fixture
def take(cache):
    """``take(state, budget_bytes, cache_bytes)``: a snapshot in which tensors up to a KiB are copied."""

    def make(state, budget_bytes=1 << 20, cache_bytes=0):
        copies = CacheCopies(cache, EagerBudget(cache_bytes))
        return take_snapshot(state, Captures(EagerBudget(budget_bytes)), copies, EagerRule(LIMIT))

    return make


def test_small_tensors_and_objects_are_copies_and_large_tensors_are_not(take):
    large, small, tied = torch.zeros(4096), torch.zeros(4), torch.zeros(8)
    state = {"large": large, "inner": [{"small": small, "scalar": torch.tensor(0)}], "a": tied, "b": tied, "list": [1]}
    made = take(state)
    large.fill_(1)
    small.fill_(1)
    state["inner"][0]["scalar"].fill_(1)
    state["list"].append(2)
    del state["inner"][0]["small"]
    assert made.is_complete and made.state["list"] == [1]
    assert torch.all(made.state["large"] == 1) and made.state["large"] is not large
    assert torch.all(made.state["inner"][0]["small"] == 0) and made.state["inner"][0]["scalar"] == 0
    assert made.state["a"] is made.state["b"]


def test_a_parameter_that_is_bound_anew_is_saved_as_it_was(take):
    weight = torch.nn.Parameter(torch.zeros(4096))
    made = take({"w": weight})
    weight.data = torch.ones(4096)
    assert torch.all(made.state["w"] == 0) and not made.state["w"].requires_grad


def test_beyond_the_budget_they_stay_and_it_says_so(take):
    state = {str(n): torch.zeros(200) for n in range(4)}
    made = take(state, 1700)
    assert not made.is_complete
    changed = [name for name, tensor in state.items() if tensor.fill_(1) is tensor and torch.all(made.state[name] == 1)]
    assert len(changed) == 2


def test_beyond_the_budget_they_are_copied_to_the_host_cache_as_long_as_that_has_room(take, cache):
    state = {str(n): torch.full((200,), float(n)) for n in range(14)}
    made = take(state, 1700, 8192)  # two, and four in each of two slabs
    assert not made.is_complete and cache.num_free == 2
    changed = [name for name, tensor in state.items() if torch.all(tensor.fill_(99) == made.state[name])]
    assert changed == ["10", "11", "12", "13"]
    assert all(torch.all(made.state[str(n)] == n) for n in range(10))


def test_a_state_of_copies_alone_needs_no_fence(take):
    small = {"a": torch.ones(200), "b": [torch.ones(200).to_sparse()], "c": 1}
    assert take(small, 800, 4096).is_independent
    assert not take({**small, "large": torch.ones(4096)}, 800, 4096).is_independent
    assert not take(small, 0, 0).is_independent


def test_a_write_is_seen_by_name(take):
    state = {"a": {"b": torch.zeros(4096)}, "c": torch.zeros(4096)}
    made = take(state)
    made.check_versions("the save")
    state["a"]["b"].add_(1)
    with pytest.raises(TornSnapshotError, match="the save") as caught:
        made.check_versions("the save")
    assert caught.value.fqns == ("a.b",)


def test_memory_of_the_state_is_told_from_that_of_others(take):
    large = torch.zeros(64, 64)
    made = take({"w": large, "small": torch.zeros(2)})
    assert made.holds(made.state["w"]) and made.holds(large[3:]) and made.holds(large.t())
    assert not made.holds(large.bfloat16()) and made.devices == {torch.device("cpu")}


def test_sparse_tensors_are_copied_and_meta_tensors_left_to_the_plan(take):
    sparse = torch.eye(64).to_sparse()
    made = take({"sparse": sparse, "meta": torch.zeros(4096, device="meta")})
    assert made.state["sparse"] is not sparse and torch.equal(made.state["sparse"].to_dense(), torch.eye(64))
    assert made.devices == set() and made.state["meta"].device.type == "meta"


def test_what_cannot_be_copied_is_named(take):
    with pytest.raises(StateError) as caught:
        take({"a": [{"lock": threading.Lock()}]})
    assert caught.value.fqn == "a.0.lock"
