"""A save in the fence before its bytes are known."""

from __future__ import annotations

import threading

import pytest
import torch

from datastates.cache_copies import CacheCopies
from datastates.captures import Captures, EagerBudget
from datastates.errors import WaitTimeoutError
from datastates.events import EventLog
from datastates.fence import Fence
from datastates.host_cache import HostCache
from datastates.plan import FilePlan
from datastates.promised_job import PromisedJob
from datastates.staging_job import StagingJob


class Mark:
    """A point in the queue of a device that is passed already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Copier:
    """Notes which marks hold a stream back."""

    def __init__(self) -> None:
        self.made = Mark()
        self.held: list[object] = []

    def ready(self) -> Mark:
        return self.made

    def hold_current_stream(self, mark: object) -> None:
        self.held.append(mark)


@pytest.fixture
def copier():
    return Copier()


@pytest.fixture
def cache():
    cache = HostCache(8192, 4096)
    yield cache
    cache.close()


@pytest.fixture
def make(copier, cache):
    """``make(limit_seconds)``: a promise that has taken 10 of 16 bytes, and no slab of two."""

    def build(limit_seconds=60.0, budget=None):
        captures = Captures(budget or EagerBudget(16))
        assert captures.take(10)
        copies = CacheCopies(cache, EagerBudget(cache.nbytes))
        return PromisedJob("the save", lambda _: copier, captures, copies, limit_seconds)

    return build


@pytest.fixture
def job():
    return StagingJob(FilePlan("raw", 0, ()), None, "file")


@pytest.fixture
def fence(copier):
    events = EventLog(0, None, None)
    fence = Fence(lambda _: copier, events)
    yield fence
    fence.remove()
    events.close()


def test_the_fence_waits_for_the_job_and_then_as_the_job_does(make, fence, job, copier):
    promise = make()
    fence.add(promise)
    with pytest.raises(WaitTimeoutError, match="the save"):
        fence.close(0)
    promise.keep(job)
    with pytest.raises(WaitTimeoutError, match="file"):
        fence.close(0)
    mark = Mark()
    job.marks[torch.device("cpu")] = mark
    job.issued.set()
    fence.close(0)
    assert copier.held == [mark] and not fence.is_open and not promise.staged.done()


def test_the_copies_wait_for_the_streams_as_they_were_at_the_save(make, job, copier):
    promise = make()
    promise.mark_ready([torch.device("cpu")])
    copier.made = Mark()
    promise.keep(job)
    assert job.ready == promise.ready and copier.made not in job.ready.values()


@pytest.mark.parametrize("error", [None, KeyError("lost")])
def test_it_ends_with_the_job_and_gives_its_copies_back_once(make, job, error):
    budget = EagerBudget(16)
    promise = make(budget=budget)
    promise.keep(job)
    assert not budget.take(10)
    job.finish(error)
    promise.finish(RuntimeError("too late"))
    assert promise.staged.exception() is error is promise.error
    assert budget.take(16) and not budget.take(1)


def test_slabs_that_hold_copies_are_given_back_with_it(make, cache):
    promise = make()
    assert promise.copies.copy(torch.ones(1000)) is not None and cache.num_free == 1
    promise.fail(KeyError("lost"))
    assert cache.num_free == 2 and promise.copies.copy(torch.ones(1000)) is None


def test_one_that_reads_copies_alone_holds_nobody_before_it_is_planned_nor_after(make, fence, job, copier):
    promise = make()
    fence.add(promise)
    promise.let_go()
    fence.close(0)
    fence.add(promise)
    promise.keep(job)
    job.marks[torch.device("cpu")] = Mark()
    fence.close(0)
    assert not copier.held and not promise.staged.done()
    job.finish(None)
    assert promise.staged.done()


def test_a_promise_without_a_job_holds_nobody(make, fence):
    promise = make()
    fence.add(promise)
    promise.fail(KeyError("no plan"))
    fence.close(0)
    assert isinstance(promise.error, KeyError)


def test_it_is_given_up_at_the_limit_and_the_job_is_refused_then(make, fence, job):
    promise = make(0.01)
    fence.add(promise)
    fence.close()
    assert isinstance(promise.error, WaitTimeoutError)
    with pytest.raises(WaitTimeoutError, match="given up"):
        promise.keep(job)
    assert not job.ready


def test_once_there_is_a_job_only_that_can_fail(make, job):
    promise = make()
    promise.keep(job)
    promise.fail(KeyError("late"))
    assert promise.error is None
    job.finish(None)
    assert promise.staged.done() and promise.error is None


def test_the_job_is_kept_or_the_promise_given_up_never_both(make, job):
    for _ in range(200):
        promise, other = make(0), StagingJob(FilePlan("raw", 0, ()), None, "file")
        waiting = threading.Thread(target=promise.wait_issued, args=(None,))
        waiting.start()
        try:
            promise.keep(other)
            other.finish(None)
        except WaitTimeoutError:
            assert isinstance(promise.error, WaitTimeoutError)
        else:
            assert promise.error is None
        waiting.join(10)
        assert not waiting.is_alive()
