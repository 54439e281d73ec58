"""Checkpoints are dated one after the other, whatever the clock says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from datastates import Checkpointer, load_latest
from datastates.commit_times import CommitTimes
from datastates.manifest import commit_path, read_commit
from tiers.checkpoints import make_checkpoint

FUTURE = 4e9  # seconds: the clock was wrong once


def test_a_commit_is_later_than_all_beside_it(tmp_path):
    before = time.time()
    assert CommitTimes().next(str(tmp_path / "none" / "step1")) >= before
    make_checkpoint(tmp_path, "step1", at=FUTURE)
    (tmp_path / "step2" / ".datastates").mkdir(parents=True)
    Path(commit_path(str(tmp_path / "step2"))).write_bytes(b"{")  # damaged: others are dated all the same
    (tmp_path / "file").touch()
    times = CommitTimes()
    first, second = times.next(str(tmp_path / "step3")), times.next(str(tmp_path / "step4"))
    assert FUTURE < first < second < FUTURE + 1


def test_what_another_process_has_committed_meanwhile_is_older(tmp_path):
    times = CommitTimes()
    times.next(str(tmp_path / "step1"))
    make_checkpoint(tmp_path, "step2", at=FUTURE)
    (tmp_path / "latest").write_text("step2")
    assert times.next(str(tmp_path / "step3")) > FUTURE


def test_the_newest_is_the_one_saved_last_where_the_clock_was_set_back(tmp_path):
    settings = {"host_cache_gb": 2**-7, "pin_host_cache": False}
    with Checkpointer(tmp_path, **settings) as checkpointer:
        checkpointer.save(10, {"w": torch.ones(3)}, block=True)
    record = Path(commit_path(str(tmp_path / "step10")))
    record.write_text(json.dumps(json.loads(record.read_bytes()) | {"committed_at": FUTURE}))
    with Checkpointer(tmp_path, **settings) as checkpointer:
        checkpointer.save(9, {"w": torch.ones(3)}, block=True)
    assert read_commit(str(tmp_path / "step9")).committed_at > FUTURE
    assert load_latest(tmp_path).tag == "step9"
