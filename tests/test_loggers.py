"""Listeners that hand the numbers of saves on: what they say, on which thread, and whom their failures harm."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from datastates.config import CheckpointConfig
from datastates.errors import WaitTimeoutError
from datastates.events import Event, EventLog
from datastates.loggers import DictLogger, RelayedListener, TensorBoardLogger
from datastates.saver import Saver

SUMMARY: Event = {
    "event": "summary",
    "rank": 0,
    "begin": 1.0,
    "end": 3.0,
    "attempt": "a",
    "path": "/c/global_step30",
    "tag": "global_step30",
    "nbytes": 100,
    "blocked_seconds": 0.5,
    "step_seconds": None,
}


def failed(attempt: str) -> Event:
    return {"event": "failed", "rank": 0, "begin": 1.0, "end": 2.0, "attempt": attempt, "path": "/c", "error": "lost"}


def test_a_function_gets_the_numbers_that_are_known():
    rows: list[dict[str, float]] = []
    with DictLogger(rows.append) as logger:
        logger(SUMMARY)
        logger({**SUMMARY, "event": "stage"})
    assert rows == [
        {
            "checkpoint/nbytes": 100,
            "checkpoint/blocked_seconds": 0.5,
            "checkpoint/num_committed": 1,
            "checkpoint/num_lost": 0,
            "checkpoint/num_skipped": 0,
            "checkpoint/step": 30,
        }
    ]


def test_losses_are_counted_once_for_each_checkpoint():
    rows: list[dict[str, float]] = []
    with DictLogger(rows.append, prefix="c.") as logger:
        for record in (failed("a"), failed("a"), failed("b"), {**failed("c"), "event": "skipped"}):
            logger(record)
    assert [(row["c.num_lost"], row["c.num_skipped"]) for row in rows] == [(1, 0), (2, 0), (2, 1)]


def test_a_slow_function_holds_up_nobody(gate):
    rows: list[dict[str, float]] = []

    def log(values: dict[str, float]) -> None:
        gate.hold()
        rows.append(values)

    logger = DictLogger(log)
    logger(SUMMARY)
    gate.wait_held()
    logger(SUMMARY)  # returns, though the first is not done
    assert rows == []
    with pytest.raises(WaitTimeoutError, match="not handed on"):
        logger.close(timeout=0.01)
    gate.open()
    logger.close()
    assert len(rows) == 2


def test_a_function_that_hangs_holds_up_the_end_of_the_block_only_so_long(gate, monkeypatch, caplog):
    monkeypatch.setattr("datastates.loggers.CLOSE_SECONDS", 0.01)
    with DictLogger(lambda values: gate.hold()) as logger:
        logger(SUMMARY)
        gate.wait_held()
    assert "not handed on within 0.01 s" in caplog.text
    gate.open()
    logger.close()


def test_what_is_too_much_is_dropped_and_counted(gate, monkeypatch):
    monkeypatch.setattr("datastates.loggers._MAX_QUEUED", 3)
    logger = DictLogger(lambda values: gate.hold())
    logger(SUMMARY)
    gate.wait_held()
    for _ in range(5):
        logger(SUMMARY)
    assert logger.num_dropped == 2
    gate.open()
    logger.close()


def test_a_function_that_fails_is_told_of_once_and_tried_again(caplog):
    calls = []

    def log(values: dict[str, float]) -> None:
        calls.append(threading.current_thread().name)
        raise ConnectionError("gone")

    with DictLogger(log) as logger:
        logger(SUMMARY)
        logger(SUMMARY)
    assert calls == ["datastates-logger"] * 2
    (told,) = caplog.records
    assert "DictLogger" in told.getMessage() and told.exc_info[0] is ConnectionError


def test_after_close_records_are_left_out():
    rows: list[dict[str, float]] = []
    logger = DictLogger(rows.append)
    logger.close()
    logger.close()
    logger(SUMMARY)
    assert rows == []


def test_the_end_of_the_interpreter_waits_for_what_is_queued(run_script):
    code = (
        "import time\n"
        "from datastates.loggers import DictLogger\n"
        "logger = DictLogger(lambda values: print(values['checkpoint/nbytes'], flush=True))\n"
        f"for _ in range(100): logger({SUMMARY!r})\n"
    )
    assert run_script(code).stdout == "100\n" * 100


def test_a_forked_child_leaves_it_to_the_parent():
    rows: list[dict[str, float]] = []
    with DictLogger(rows.append) as logger:
        child = os.fork()
        if not child:
            logger(SUMMARY)
            logger.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        logger(SUMMARY)
    assert len(rows) == 1


def test_each_listener_needs_work_of_its_own():
    with RelayedListener() as listener, pytest.raises(NotImplementedError):
        listener._handle(SUMMARY)


class Tags:
    def __init__(self, folder: Any) -> None:
        found = EventAccumulator(str(folder))
        found.Reload()
        self.scalars = {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_a_real_run_is_in_tensorboard(tmp_path):
    config = CheckpointConfig(host_cache_bytes=8 << 20)
    writer = SummaryWriter(str(tmp_path / "board"))
    logger = TensorBoardLogger(writer)
    saver = Saver(config, run_id="run", listener=logger)
    for step in (10, 20):
        folder = str(tmp_path / f"step{step}")
        attempt = saver.begin(folder, f"step{step}", update_latest=True)
        saver.save({"w": torch.ones(1 << 18)}, f"{folder}/w.pt", attempt=attempt)
        saver.commit(attempt).result(60)
    saver.close()
    logger.close()
    writer.close()
    scalars = Tags(tmp_path / "board").scalars
    assert [step for step, _ in scalars["checkpoint/nbytes"]] == [10, 20]
    assert all(value > 1 << 20 for _, value in scalars["checkpoint/nbytes"])
    assert [value for _, value in scalars["checkpoint/num_committed"]] == [1, 2]
    assert {"checkpoint/blocked_seconds", "checkpoint/durable_seconds", "checkpoint/advised_seconds"} <= set(scalars)


@pytest.mark.parametrize("event", ["save", "stage", "flush", "committed"])
def test_a_failing_listener_loses_no_save(tmp_path, caplog, event):
    """Nor does the log, which keeps what was raised, keep the host cache of the thread that raised it."""

    def listener(record: Event) -> None:
        if record["event"] == event:
            raise RuntimeError(record["event"])

    saver = Saver(CheckpointConfig(host_cache_bytes=8 << 20), run_id="run", listener=listener)
    handle = saver.save({"w": torch.ones(1 << 20)}, str(tmp_path / "w.pt"))
    handle.committed.result(60)
    saver.close()
    assert torch.equal(torch.load(tmp_path / "w.pt")["w"], torch.ones(1 << 20))
    assert len([one for one in caplog.records if "listener" in one.getMessage()]) == 1


def test_what_has_no_step_is_put_at_the_number_of_saves():
    found = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
            found.append((tag, global_step))

    with TensorBoardLogger(Writer(), prefix="") as logger:
        logger({**SUMMARY, "tag": ""})
        logger({**SUMMARY, "tag": "best"})
    assert [step for tag, step in found if tag == "nbytes"] == [1, 2]


def test_records_of_an_event_log_reach_it():
    rows: list[dict[str, float]] = []
    log = EventLog()
    logger = DictLogger(rows.append)
    log.add(logger, logger.end)
    log.record("summary", 0.0, 1.0, tag="step7", nbytes=5)
    log.close()
    assert rows[0]["checkpoint/step"] == 7
