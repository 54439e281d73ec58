"""An unmodified DeepSpeed with the ``datastates_ckpt`` section, two real processes, gloo."""

from __future__ import annotations

import json
import os
import re
import select
import signal
from pathlib import Path

import pytest

from integrations.jobs import Job
from integrations.ranks import run_ranks

RUNS = "integrations.deepspeed_runs:"
WORKER = Path(__file__).parent / "deepspeed_worker.py"


def start(fork_server, function: str, folder: Path, *arguments: object) -> Job:
    """Run a function of the worker as two ranks."""
    return fork_server.start(RUNS + "run_worker", function, folder, *arguments, folder=folder)


def test_overlapping_saves_tags_and_reloading(fork_server, tmp_path):
    log = start(fork_server, "overlap", tmp_path).wait()
    for line in (
        "save_16bit_model is on disk when it returns",
        "load_checkpoint drains",
        "an existing tag is replaced",
        "tools of DeepSpeed that run in this process find what is in flight",
        "another engine of the process loads what this one has in flight",
    ):
        assert log.count(f"ok {line}") == 2, log
    assert log.count("nothing is saved, since the ranks save different checkpoints") == 2, log


def test_a_script_that_ends_without_destroy_loses_nothing(fork_server, tmp_path):
    with run_ranks(WORKER, "exit_without_destroy", tmp_path, folder=tmp_path) as ranks:
        log = ranks.wait()
    assert len(re.findall(r"\[Rank 0\] datastates \S+ is the active checkpoint engine: ", log)) == 1, log
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert_resumes(fork_server, tmp_path, "global_step1")


def test_trainers_killed_after_staging_do_not_lose_the_save(fork_server, tmp_path):
    job = start(fork_server, "die_staged", tmp_path)
    flushers = [int(pid) for pid in job.wait_announced()]
    job.kill()
    assert (tmp_path / "latest").read_text() == "global_step1"
    wake_and_wait(flushers)
    assert (tmp_path / "latest").read_text() == "global_step2"
    compare = "integrations.deepspeed_compare:compare_folders"
    fork_server.start(compare, tmp_path / "global_step2", tmp_path / "expected", folder=tmp_path, num_ranks=1).wait()
    assert_resumes(fork_server, tmp_path, "global_step2")


def test_trainers_killed_before_staging_leave_the_previous_checkpoint(fork_server, tmp_path):
    job = start(fork_server, "die_unstaged", tmp_path)
    flushers = [int(pid) for pid in job.wait_announced()]
    job.kill()
    wake_and_wait(flushers)
    assert not list((tmp_path / "filler").glob("*.pt"))
    assert not list(tmp_path.rglob(".*.partial"))
    latest = (tmp_path / "latest").read_text()
    assert latest in ("global_step1", "global_step2")
    assert_resumes(fork_server, tmp_path, latest)


def test_a_killed_flusher_is_replaced_and_the_save_commits(fork_server, tmp_path):
    assert start(fork_server, "flusher_dies", tmp_path).wait().count("ok the save committed") == 2


def test_what_the_first_tier_has_lost_is_loaded_from_another(fork_server, tmp_path):
    log = start(fork_server, "lose_the_first_tier", tmp_path).wait()
    for line in (
        "latest comes from the other tier",
        "a tag comes from the other tier",
        "an empty disk is filled again",
        "two is nowhere",
        "never is nowhere",
    ):
        assert log.count(f"ok {line}") == 2, log


def assert_resumes(fork_server, folder: Path, tag: str) -> None:
    assert start(fork_server, "resume", folder, tag).wait().count(f"ok resumed from {tag}") == 2


def wake_and_wait(flushers: list[int]) -> None:
    """Let stopped flushers, orphans by now, go on, and wait until they have ended."""
    descriptors = [os.pidfd_open(pid) for pid in flushers]
    for descriptor in descriptors:
        signal.pidfd_send_signal(descriptor, signal.SIGCONT)
    for descriptor in descriptors:
        ended, _, _ = select.select([descriptor], [], [], 60)
        os.close(descriptor)
        assert ended, "a flusher without its trainer did not end"


@pytest.mark.parametrize("section", [{"host_cache_sise": 1}, {"host_cache_size": -1}, None])
def test_a_wrong_section_is_a_clear_error(section, fork_server, tmp_path):
    arguments = (tmp_path, json.dumps(section))
    log = fork_server.start(RUNS + "start_wrongly", *arguments, folder=tmp_path, num_ranks=1).wait(expect=1)
    assert "host_cache_size" in log.splitlines()[-1], log
