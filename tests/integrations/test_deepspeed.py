"""An unmodified DeepSpeed with the ``datastates_ckpt`` section, two real processes, gloo."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.ranks import free_port, run_ranks

WORKER = Path(__file__).parent / "deepspeed_worker.py"
ROUND_TRIP_STAGES = (0, 1, 2, 3)


def test_what_is_saved_is_the_state_at_the_moment_of_the_save_in_every_zero_stage(tmp_path):
    with run_ranks(WORKER, "round_trip", tmp_path, ",".join(map(str, ROUND_TRIP_STAGES)), folder=tmp_path) as ranks:
        log = ranks.wait(240)
    for stage in ROUND_TRIP_STAGES:
        assert log.count(f"ok round trip zero {stage}") == 2
        folder = tmp_path / f"zero{stage}"
        compare_without_datastates(folder / "global_step2", folder / "expected")


COMPARE = """
import sys
sys.modules["datastates"] = None  # it cannot be imported here
import torch

def walk(node, name=""):
    if isinstance(node, torch.Tensor):
        yield name, node.detach()
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from walk(value, f"{name}.{key!r}")
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from walk(value, f"{name}.{index}")

for name in sys.argv[3:]:
    expected = dict(walk(torch.load(f"{sys.argv[2]}/{name}", weights_only=False)))
    for mmap in (False, True):
        found = dict(walk(torch.load(f"{sys.argv[1]}/{name}", weights_only=False, mmap=mmap)))
        assert list(found) == list(expected), name
        for key, tensor in expected.items():
            same = found[key].dtype == tensor.dtype and torch.equal(found[key], tensor)
            assert same, f"{name}: {key} differs"
    print(name, len(expected))
"""


def compare_without_datastates(folder: Path, expected: Path) -> None:
    """Compare a checkpoint with what torch.save wrote of the same moment, where datastates is not installed."""
    names = sorted(path.name for path in expected.iterdir())
    assert names == sorted(path.name for path in folder.glob("*.pt"))
    command = [sys.executable, "-c", COMPARE, str(folder), str(expected), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sum(int(line.split()[-1]) for line in done.stdout.splitlines()) > 10


def test_overlapping_saves_tags_and_reloading(tmp_path):
    with run_ranks(WORKER, "overlap", tmp_path, folder=tmp_path) as ranks:
        log = ranks.wait()
    for line in (
        "save_16bit_model is on disk when it returns",
        "load_checkpoint drains",
        "an existing tag is replaced",
    ):
        assert log.count(f"ok {line}") == 2, log


def test_a_script_that_ends_without_destroy_loses_nothing(tmp_path):
    with run_ranks(WORKER, "exit_without_destroy", tmp_path, folder=tmp_path) as ranks:
        ranks.wait()
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert_resumes(tmp_path, "global_step1")


def test_trainers_killed_after_staging_do_not_lose_the_save(tmp_path):
    with run_ranks(WORKER, "die_staged", tmp_path, folder=tmp_path) as ranks:
        flushers = wait_for_flushers(tmp_path, ranks)
        ranks.kill()
        assert (tmp_path / "latest").read_text() == "global_step1"
        wake_and_wait(flushers)
    assert (tmp_path / "latest").read_text() == "global_step2"
    compare_without_datastates(tmp_path / "global_step2", tmp_path / "expected")
    assert_resumes(tmp_path, "global_step2")


def test_trainers_killed_before_staging_leave_the_previous_checkpoint(tmp_path):
    with run_ranks(WORKER, "die_unstaged", tmp_path, folder=tmp_path) as ranks:
        flushers = wait_for_flushers(tmp_path, ranks)
        ranks.kill()
        wake_and_wait(flushers)
    assert not list((tmp_path / "filler").glob("*.pt"))
    assert not list(tmp_path.rglob(".*.partial"))
    latest = (tmp_path / "latest").read_text()
    assert latest in ("global_step1", "global_step2")
    assert_resumes(tmp_path, latest)


def test_a_killed_flusher_is_replaced_and_the_save_commits(tmp_path):
    with run_ranks(WORKER, "flusher_dies", tmp_path, folder=tmp_path) as ranks:
        log = ranks.wait()
    assert log.count("ok the save committed") == 2


def assert_resumes(folder: Path, tag: str) -> None:
    with run_ranks(WORKER, "resume", folder, tag, folder=folder) as ranks:
        assert ranks.wait().count(f"ok resumed from {tag}") == 2


def wait_for_flushers(folder: Path, ranks) -> list[int]:
    """The flushers' process ids, once every rank has written its own down."""
    pids = []
    for rank, process in enumerate(ranks.processes):
        path = folder / f"staged{rank}"
        while not (path.exists() and path.read_text()):
            assert process.poll() is None, ranks.log()
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        pids.append(int(path.read_text()))
    return pids


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
def test_a_wrong_section_is_a_clear_error(section, tmp_path):
    code = (
        "import sys, json, torch, deepspeed\n"
        "model = torch.nn.Linear(4, 4)\n"
        "section = json.loads(sys.argv[1])\n"
        "config = {'train_batch_size': 1, 'optimizer': {'type': 'AdamW', 'params': {'torch_adam': True}},\n"
        "          'datastates_ckpt': section}\n"
        "deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)\n"
    )
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(free_port())
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(section)], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode != 0
    assert "host_cache_size" in done.stderr
