"""Hugging Face's Trainer and Accelerate with a DeepSpeed config that has the section: two real processes, gloo."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastates import integrity
from flusher.rig import eventually
from integrations.jobs import ForkServer

RUNS = "integrations.huggingface_runs"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Has imported transformers and Accelerate once."""
    server = ForkServer(RUNS)
    yield server
    server.close()


@pytest.fixture
def start(server, tmp_path):
    """``start(function, *arguments)``: a job of two ranks; ended with the test, its flusher processes, too."""
    flushers = []

    def start(function: str, *arguments: object):
        return server.start(f"{RUNS}:{function}", tmp_path, *arguments, folder=tmp_path)

    def lose_node(job, when=lambda: True) -> None:
        """What the loss of the machine leaves: trainers and flushers end at once, when the condition holds."""
        flushers.extend(int(pid) for pid in job.wait_announced(90))
        eventually(when, "what is to be there before the machine is lost")
        job.kill()
        while flushers:
            os.kill(flushers.pop(), signal.SIGKILL)

    start.lose_node = lose_node
    yield start
    server.kill_all()
    for pid in flushers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def losses(folder: Path, rank: int) -> list[dict[int, str]]:
    """By step, of each run, in the order of the runs."""
    files = sorted(folder.glob(f"losses-*-rank{rank}.json"), key=lambda path: path.stat().st_mtime_ns)
    return [{int(step): loss for step, loss in json.loads(path.read_text()).items()} for path in files]


@pytest.mark.leaves_partial_files
@pytest.mark.parametrize(("stage", "resume"), [(2, "true"), (3, "last")])
def test_a_job_that_loses_its_machine_resumes_from_a_complete_checkpoint(start, tmp_path, stage, resume):
    """With save_total_limit=1 and the second save in flight: Trainer wanted the first one deleted then."""
    out = tmp_path / "out"
    job = start("train", stage, "no", 5, 7, 8)
    # 2 went when 4 was complete, in the background, by way of another name; 4 stays while 6 is not
    start.lose_node(job, when=lambda: checkpoints(out) == ["checkpoint-4", "checkpoint-6"])
    assert integrity.verify(str(out / "checkpoint-4" / "global_step4")) == []
    assert (out / "checkpoint-4" / "latest").read_text() == "global_step4"
    if resume == "true":
        log = start("train", stage, "true", 0, 0, 8).wait(90, expect=1)
        assert "checkpoint-6 was never completed, and is now" in log
        assert "start again" in log
        assert checkpoints(out) == ["checkpoint-4", "incomplete-checkpoint-6"]
    start("train", stage, resume, 0, 0, 8).wait(90)
    for rank in range(2):
        killed, resumed = losses(tmp_path, rank)
        assert list(killed) == [1, 2, 3, 4, 5, 6, 7]
        assert list(resumed) == [5, 6, 7, 8]
        assert [resumed[step] for step in (5, 6, 7)] == [killed[step] for step in (5, 6, 7)]
        best = (tmp_path / f"weights-4-rank{rank}").read_text()
        assert (tmp_path / f"final-rank{rank}").read_text() == best  # load_best_model_at_end
        assert (tmp_path / f"weights-8-rank{rank}").read_text() != best
    kept = [name for name in checkpoints(out) if name.startswith("checkpoint-")]
    assert kept == ["checkpoint-4"]  # the best one alone: so Trainer keeps it with save_total_limit=1
    assert integrity.verify(str(out / "checkpoint-4" / "global_step4")) == []


@pytest.mark.leaves_partial_files
def test_accelerate_keeps_the_older_checkpoint_until_the_younger_is_complete(start, tmp_path):
    folder = tmp_path / "project" / "checkpoints"
    start.lose_node(start("use_accelerate", False))
    assert checkpoints(folder) == ["checkpoint_0", "checkpoint_1"]
    assert integrity.check(str(folder / "checkpoint_1" / "pytorch_model")) != []
    start("use_accelerate", True).wait(90)
    for rank in range(2):
        killed, resumed = (
            json.loads((tmp_path / f"{name}-rank{rank}.json").read_text()) for name in ("killed", "resumed")
        )
        assert resumed == killed
    assert checkpoints(folder) == ["checkpoint_1", "incomplete-checkpoint_1"]
    assert integrity.verify(str(folder / "checkpoint_1" / "pytorch_model")) == []


def test_a_trainer_without_deepspeed_in_the_same_process_is_left_alone(server, tmp_path):
    server.start(f"{RUNS}:leave_others_alone", tmp_path, folder=tmp_path, num_ranks=1).wait(60)
