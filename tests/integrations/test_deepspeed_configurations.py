"""Every configuration: saved lazily while training goes on, killed, resumed, equal to the last bit."""

from __future__ import annotations

import os
import select

import pytest

from integrations.deepspeed_configurations import CONFIGURATIONS


def wait_ended(descriptors: list[int]) -> None:
    """Wait until the processes behind the pidfds have ended."""
    for descriptor in descriptors:
        ended, _, _ = select.select([descriptor], [], [], 60)
        os.close(descriptor)
        assert ended, "a flusher without its trainer did not end"


@pytest.mark.timeout(900)  # an operator may have to be compiled; every wait here has a bound of its own
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_saved_lazily_killed_and_resumed_it_is_equal(name, fork_server, need_operators, tmp_path):
    configuration = CONFIGURATIONS[name]
    need_operators(*configuration.needs)
    ranks = {"folder": tmp_path, "num_ranks": configuration.num_ranks}
    job = fork_server.start("integrations.deepspeed_runs:save_and_wait", name, tmp_path, **ranks)
    flushers = [os.pidfd_open(int(pid)) for pid in job.wait_announced()]
    job.kill()
    wait_ended(flushers)
    fork_server.start("integrations.deepspeed_compare:compare_runs", tmp_path, folder=tmp_path, num_ranks=1).wait()
    fork_server.start("integrations.deepspeed_runs:resume_and_check", name, tmp_path, **ranks).wait()
