from __future__ import annotations

import os
import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from datastates import host_cache
from datastates.errors import ClosedError, HostCacheError, WaitTimeoutError
from datastates.host_cache import HostCache, available_memory_bytes

PAGE = 4096


def test_slabs_are_disjoint_and_cover_the_cache():
    cache = HostCache(10 * PAGE + 5, 2 * PAGE)
    try:
        slabs = [cache.reserve() for _ in range(cache.num_slabs)]
        assert sorted(slab.offset for slab in slabs) == [0, 2 * PAGE, 4 * PAGE, 6 * PAGE, 8 * PAGE]
        for number, slab in enumerate(slabs):
            slab.memory.fill_(number + 1)
        for number, slab in enumerate(slabs):
            assert bool((slab.memory == number + 1).all())
            assert slab.memory.numel() == 2 * PAGE
        assert cache.try_reserve() is None
        del slabs, slab
    finally:
        cache.close()


def test_another_mapping_of_the_descriptor_sees_the_bytes():
    cache = HostCache(4 * PAGE, PAGE)
    try:
        slab = cache.reserve()
        slab.memory.copy_(torch.arange(PAGE, dtype=torch.int64).to(torch.uint8))
        assert os.pread(cache.descriptor, 8, slab.offset) == bytes(range(8))
        del slab
    finally:
        cache.close()


def test_reserve_blocks_until_another_thread_releases():
    cache = HostCache(4 * PAGE, PAGE)
    slabs = [cache.reserve() for _ in range(4)]
    reserved = []
    waiter = threading.Thread(target=lambda: reserved.append(cache.reserve(timeout=30).offset))
    waiter.start()
    assert reserved == []
    cache.release(slabs[2].offset)
    waiter.join(30)
    assert reserved == [slabs[2].offset]
    del slabs
    cache.close()


def test_reserve_times_out_and_says_what_is_taken():
    cache = HostCache(4 * PAGE, PAGE)
    slabs = [cache.reserve() for _ in range(4)]
    with pytest.raises(WaitTimeoutError, match="0 free"):
        cache.reserve(timeout=0.01)
    del slabs
    cache.close()


def test_close_wakes_who_waits_and_is_idempotent():
    cache = HostCache(4 * PAGE, PAGE)
    slabs = [cache.reserve() for _ in range(4)]
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            cache.reserve()
        except ClosedError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    del slabs
    cache.close()
    cache.close()
    waiter.join(30)
    assert len(errors) == 1
    with pytest.raises(ClosedError):
        cache.try_reserve()


def test_a_slab_outlives_the_cache_without_a_crash():
    cache = HostCache(4 * PAGE, PAGE)
    slab = cache.reserve()
    cache.close()
    slab.memory.fill_(3)
    assert int(slab.memory.sum()) == 3 * PAGE


@pytest.mark.parametrize("offset", [-PAGE, 1, 4 * PAGE])
def test_release_of_no_slab_is_refused(offset):
    cache = HostCache(4 * PAGE, PAGE)
    with pytest.raises(ValueError, match="no reserved slab"):
        cache.release(offset)
    cache.close()


def test_double_release_is_refused():
    cache = HostCache(4 * PAGE, PAGE)
    offset = cache.reserve().offset
    cache.release(offset)
    with pytest.raises(ValueError, match="no reserved slab"):
        cache.release(offset)
    cache.close()


def test_a_cache_beyond_the_memory_is_refused_with_the_largest_that_fits():
    with pytest.raises(HostCacheError, match="set host_cache_size to at most"):
        HostCache(available_memory_bytes() + (1 << 30), 1 << 20)


class HostCacheMachine(RuleBasedStateMachine):
    """The cache against a set: no slab is handed out twice, none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = HostCache(5 * PAGE, PAGE)
        self.taken: set[int] = set()

    @rule()
    def reserve(self) -> None:
        slab = self.cache.try_reserve()
        assert (slab is None) == (len(self.taken) == 5)
        if slab is not None:
            assert slab.offset not in self.taken
            self.taken.add(slab.offset)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.taken.remove(offset)
        self.cache.release(offset)

    @invariant()
    def counts_agree(self) -> None:
        assert self.cache.num_free + len(self.taken) == 5

    def teardown(self) -> None:
        self.cache.close()


TestHostCacheMachine = HostCacheMachine.TestCase
TestHostCacheMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_a_cgroup_with_less_memory_than_the_machine_is_the_limit(tmp_path, monkeypatch):
    """The kernel would kill the process there, without an error that anybody could read."""
    (tmp_path / "memory.max").write_text(str(300 << 20))
    (tmp_path / "memory.current").write_text(str(250 << 20))
    (tmp_path / "memory.stat").write_text(f"anon 1\nactive_file {20 << 20}\ninactive_file {30 << 20}\n")
    monkeypatch.setattr(host_cache, "_cgroup_directories", lambda: [str(tmp_path), str(tmp_path / "parent")])
    assert available_memory_bytes() == 100 << 20
    with pytest.raises(HostCacheError, match=r"only 0\.10 GiB"):
        HostCache(64 << 20, 1 << 20)
    HostCache(32 << 20, 1 << 20).close()
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes() > 300 << 20
