"""The demo's jobs: watched, killed with everything under them but the flushers."""

from __future__ import annotations

import importlib
import os
import sys

import pytest

SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts")

TREE = """
import subprocess, sys, time
program = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); sys.stdin.read()"
folder = sys.argv[1]
children = [
    subprocess.Popen(
        [sys.executable, "-c", program, folder + "/" + name, mark], stdin=subprocess.PIPE, start_new_session=True
    )
    for name, mark in (("worker", "trainer"), ("flusher", "datastates.flusher"))
]
children[0].wait()
"""


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("demo_job")


def start(jobs, tmp_path, program: str):
    return jobs.Job([sys.executable, "-c", program, str(tmp_path)], dict(os.environ), str(tmp_path / "log.txt"))


def has_pid(path) -> bool:
    return path.exists() and path.read_text() != ""


def test_watch_prints_what_the_script_says_and_nothing_else(jobs, tmp_path, capsys):
    with start(jobs, tmp_path, "print('noise'); print('pretrain_gpt: step 1')") as job:
        assert job.watch(lambda: False, timeout=30) is False
        job.check_success()
    assert capsys.readouterr().out == "    step 1\n"


def test_a_failure_shows_the_end_of_the_log(jobs, tmp_path):
    with start(jobs, tmp_path, "raise SystemExit('out of paper')") as job:
        job.watch(lambda: False, timeout=30)
        with pytest.raises(jobs.JobFailed, match=r"(?s)exit status 1.*out of paper"):
            job.check_success()


def test_a_job_that_hangs_is_a_failure_and_does_not_outlive_the_demo(jobs, tmp_path):
    with (
        pytest.raises(jobs.JobFailed, match="did not end"),
        start(jobs, tmp_path, "import time; time.sleep(600)") as job,
    ):
        job.watch(lambda: False, timeout=0.1)
    with pytest.raises(jobs.JobFailed, match="exit status -9"):
        job.check_success()


def test_kill_spares_the_flushers_which_end_when_their_trainer_is_gone(jobs, tmp_path):
    worker, flusher = tmp_path / "worker", tmp_path / "flusher"
    with start(jobs, tmp_path, TREE) as job:
        assert job.watch(lambda: has_pid(worker) and has_pid(flusher), timeout=30)
        flushers = job.kill()
    assert len(flushers) == 1
    jobs.wait_for_end(flushers, timeout=30)  # its standard input ended with the launcher
    assert not os.path.exists(f"/proc/{worker.read_text()}") or "Z" in jobs._stat(int(worker.read_text()))[0]


def test_waiting_for_a_process_that_goes_on_is_a_failure_and_closes_its_descriptor(jobs, tmp_path):
    descriptor = os.pidfd_open(os.getpid())
    with pytest.raises(jobs.JobFailed, match="had not ended"):
        jobs.wait_for_end([descriptor], timeout=0.01)
    with pytest.raises(OSError):
        os.fstat(descriptor)
