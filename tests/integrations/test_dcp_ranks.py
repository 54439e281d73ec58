"""Several ranks save and load through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integrations.jobs import ForkServer, Job
from integrations.ranks import free_port


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer("integrations.dcp_runs")
    yield server
    server.close()


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``start(function, *arguments, num_ranks=2)``: the ranks of a job that works in the test's folder, or another."""

    def begin(function: str, *arguments: object, num_ranks: int = 2, folder: Path = tmp_path) -> Job:
        name = f"integrations.dcp_runs:{function}"
        return server.start(name, folder, *arguments, folder=folder, num_ranks=num_ranks)

    yield begin
    server.kill_all()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param((2, 1), [(3, 1), (4, 2)], id="fsdp"),
        pytest.param((4, 2), [(1, 1), (2, 1)], id="fsdp and tensor parallel"),
    ],
)
def test_a_lazy_save_that_outlives_its_job_is_loaded_by_any_number_of_ranks(start, saved, loaded):
    num_ranks, num_tensor_parallel = saved
    job = start("saves_while_training", num_tensor_parallel, num_ranks=num_ranks)
    job.wait_announced()
    job.kill()
    assert set(job.statuses.values()) == {-signal.SIGKILL}
    for num_ranks, num_tensor_parallel in loaded:
        start("loads", num_tensor_parallel, num_ranks=num_ranks).wait()


def test_a_save_is_committed_on_all_ranks_and_parts_are_read_in_part(start):
    start("saves_and_waits").wait()


def test_sharded_tensors_of_the_first_fsdp_are_saved_while_training_goes_on(start):
    start("saves_sharded_tensors").wait()


def test_whatever_fails_on_one_rank_is_told_to_all_and_the_next_save_works(start):
    start("one_rank_fails").wait()


def test_what_fails_on_one_rank_when_the_others_have_written_is_over_for_all(start):
    start("one_rank_fails_late", num_ranks=3).wait()


def test_a_rank_that_never_plans_holds_training_up_for_a_limited_time(start):
    job = start("one_rank_dies")
    job._wait_ended(60)
    assert job.statuses == {0: 0, 1: -signal.SIGKILL}, job.log()


def test_the_example_goes_on_where_it_was_with_the_same_losses(start, tmp_path):
    def losses(folder: str, num_steps: int) -> list[str]:
        options = ("--save-interval", "2", "--steps", str(num_steps), "--host-cache-gb", str(2**-6))
        (tmp_path / folder).mkdir(exist_ok=True)
        log = start("runs_the_example", free_port(), *options, folder=tmp_path / folder).wait()
        return [line for line in log.splitlines() if line.startswith("step ")]

    whole, first, second = losses("whole", 5), losses("cut", 3), losses("cut", 5)
    assert first + second == whole and len(whole) == 5
