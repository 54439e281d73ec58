"""How a process may end, with a save in flight, and what becomes of the save. Real processes, real signals."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HEAD = """
import os, signal, sys, threading, time
import torch
from datastates import CheckpointEngine
"""

ENGINE = """
engine = CheckpointEngine({"host_cache_size": 2**-8, "slab_bytes": 1 << 20}, rank=0)
state = {"w": torch.arange(2 << 20, dtype=torch.float32)}
"""

STAGED = """
engine.save(state, "state.pt")
engine.wait()
print(engine.saver.flusher_pid, flush=True)
"""

ENDS = {
    "return": ("", 0),
    "exception": ("raise KeyError('training broke')", 1),
    "sys.exit": ("sys.exit(7)", 7),
    "os._exit": ("os._exit(5)", 5),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
    "SIGINT": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", 1),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "group SIGTERM": ("os.killpg(os.getpgid(0), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
    "group SIGINT": ("os.killpg(os.getpgid(0), signal.SIGINT); time.sleep(60)", 1),
}


def run(tmp_path: Path, code: str) -> tuple[int, str, str]:
    """Run a script in a session of its own and wait until its flusher has ended, too."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + code)
    with (tmp_path / "stderr").open("w") as errors:  # a file: the flusher has it, too, and may outlive the trainer
        process = subprocess.Popen(
            [sys.executable, str(script)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    flusher = os.pidfd_open(int(line)) if line.strip().isdigit() else None
    out = process.stdout.read()  # not communicate(), which misses what readline() has taken from the pipe already
    process.stdout.close()
    process.wait(90)
    err = (tmp_path / "stderr").read_text()
    if flusher is not None:
        ended, _, _ = select.select([flusher], [], [], 60)
        os.close(flusher)
        assert ended, f"the flusher outlives its trainer; {err}"
    return process.returncode, line + out, err


@pytest.mark.parametrize("end", ENDS)
def test_what_was_staged_survives_every_way_to_end(tmp_path, end):
    code, status = ENDS[end]
    found, _, err = run(tmp_path, ENGINE + STAGED + code)
    assert found in ({1, -signal.SIGINT} if "SIGINT" in end else {status}), err
    assert float(torch.load(tmp_path / "state.pt")["w"][-1]) == (2 << 20) - 1
    assert not list(tmp_path.glob(".*.partial"))


def test_the_users_signal_handler_still_runs_and_may_save(tmp_path):
    code = """
def handler(number, frame):
    print("handler", flush=True)
    engine.save({"n": 1}, "last.pt")
    sys.exit(3)
signal.signal(signal.SIGTERM, handler)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
    found, out, err = run(tmp_path, ENGINE + STAGED + code)
    assert found == 3, err
    assert "handler" in out
    assert torch.load(tmp_path / "last.pt")["n"] == 1


def test_a_signal_handler_that_has_interrupted_a_save_is_refused_and_harms_nothing(tmp_path):
    code = """
import random
from datastates.errors import ReentranceError
answers = {"saved": [], "refused": 0}
def handler(number, frame):
    try:
        engine.save({"n": torch.full((100,), len(answers["saved"]))}, f"handler{len(answers['saved'])}.pt")
        answers["saved"].append(True)
    except ReentranceError:
        answers["refused"] += 1
    arm()
def arm():
    signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.002 * random.random())
signal.signal(signal.SIGALRM, handler)
arm()
for number in range(150):
    engine.save({"n": torch.full((100,), number), "w": torch.full((40_000,), float(number))}, f"loop{number % 4}.pt")
while not (answers["saved"] and answers["refused"]):
    engine.save({"n": torch.full((100,), 149), "w": torch.full((40_000,), 149.0)}, "loop1.pt")
signal.setitimer(signal.ITIMER_REAL, 0)
engine.wait(persist=True)
engine.close()
for number in range(len(answers["saved"])):
    assert torch.load(f"handler{number}.pt")["n"][0] == number
print("all there")
"""
    found, out, err = run(tmp_path, ENGINE + code)
    assert (found, out.split("\n")[-2]) == (0, "all there"), err
    for number in (146, 147, 148, 149):
        assert torch.load(tmp_path / f"loop{number % 4}.pt")["w"][0] == number


def test_forked_workers_that_live_on_do_not_keep_the_flusher(tmp_path):
    """A data-loader worker holds copies of the trainer's descriptors, the socket among them."""
    code = """
pid = os.fork()
if pid == 0:
    os.close(1); os.close(2)
    time.sleep(20)
    os._exit(0)
with open("worker", "w") as file:
    file.write(str(pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    found, _, _ = run(tmp_path, ENGINE + STAGED + code)
    worker = int((tmp_path / "worker").read_text())
    os.kill(worker, 0)  # still there, while the flusher has ended
    os.kill(worker, signal.SIGKILL)
    assert found == -signal.SIGKILL
    assert float(torch.load(tmp_path / "state.pt")["w"][-1]) == (2 << 20) - 1


def test_the_end_is_bounded_when_the_flusher_stands_still(tmp_path):
    code = ENGINE.replace('"slab_bytes"', '"close_timeout_seconds": 0.5, "slab_bytes"')
    code += """
os.kill(engine.saver.flusher_pid, signal.SIGSTOP)
engine.save(state, "state.pt")
with open("flusher", "w") as file:
    file.write(str(engine.saver.flusher_pid))
"""
    found, _, err = run(tmp_path, code)
    flusher = int((tmp_path / "flusher").read_text())
    descriptor = os.pidfd_open(flusher)
    os.kill(flusher, signal.SIGKILL)
    select.select([descriptor], [], [], 10)
    os.close(descriptor)
    assert found == 0
    assert "ends with a save lost" in err
    for partial in tmp_path.glob(".*.partial"):
        partial.unlink()


def test_a_daemon_thread_that_saves_does_not_hang_the_end(tmp_path):
    code = """
def forever():
    number = 0
    while True:
        number += 1
        try:
            engine.save({"n": number}, "loop.pt")
        except Exception:
            return
threading.Thread(target=forever, daemon=True).start()
while not os.path.exists("loop.pt"):
    time.sleep(0.01)
"""
    found, _, err = run(tmp_path, ENGINE + STAGED + code)
    assert found == 0, err
    assert torch.load(tmp_path / "loop.pt")["n"] >= 1
