"""Which calls of which optimizer count as a training step, and what the records say of it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from datastates.copier import copier_for
from datastates.events import Event, EventLog
from datastates.fence import Fence
from datastates.plan import FilePlan
from datastates.staging_job import StagingJob


class Training:
    """Optimizers beside a fence, and the steps that it records."""

    def __init__(self) -> None:
        self.records: list[Event] = []
        self.fence = Fence(copier_for, EventLog(listener=self.records.append))

    def optimizer(self) -> torch.optim.Optimizer:
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        return torch.optim.SGD([parameter], lr=0.1)

    @property
    def numbers(self) -> list[int]:
        assert {record["event"] for record in self.records} <= {"step"}
        return [record["number"] for record in self.records]


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.fence.remove()


def test_each_step_ends_where_the_next_begins(training):
    optimizer = training.optimizer()
    for _ in range(3):
        optimizer.step()
    assert training.numbers == [1, 2, 3]
    first, second, third = training.records
    assert first["begin"] == first["end"] == second["begin"]  # when the first has begun nobody has seen
    assert second["begin"] < second["end"] == third["begin"] < third["end"]


def test_of_several_optimizers_the_first_to_step_counts(training):
    first, second = training.optimizer(), training.optimizer()
    for _ in range(2):
        first.step()
        second.step()
        second.step()
    assert training.numbers == [1, 2]


def test_another_counts_when_the_first_is_gone(training):
    first, second = training.optimizer(), training.optimizer()
    first.step()
    del first
    gc.collect()
    second.step()
    assert training.numbers == [1, 2]


def test_a_framework_that_tells_of_steps_is_believed(training):
    optimizer = training.optimizer()
    for _ in range(2):
        training.fence.note_step()
        for _ in range(5):  # ZeRO steps once for each group of parameters
            optimizer.step()
    assert training.numbers == [1, 2]


def test_a_forked_child_records_nothing(training):
    optimizer = training.optimizer()
    child = os.fork()
    if not child:
        optimizer.step()
        os._exit(len(training.records))
    assert os.waitpid(child, 0)[1] == 0


def test_without_its_hook_nothing_is_recorded(training):
    training.fence.remove()
    training.optimizer().step()
    assert training.numbers == []


def test_what_is_asked_for_while_the_fence_closes_is_heard_of_when_it_is_closed():
    heard: list[tuple[list[object], bool]] = []
    job = StagingJob(FilePlan("nothing", 0, ()), None, "a.pt")
    job.finish(None)
    fence = Fence(copier_for, EventLog(), before_closed=lambda jobs: heard.append((list(jobs), fence.is_open)))
    try:
        fence.add(job)
        fence.close()
    finally:
        fence.remove()
    assert heard == [([job], True), ([], False)]
