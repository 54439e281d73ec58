"""Forks the ranks of DeepSpeed jobs from a process that has imported torch and DeepSpeed once.

``python fork_server.py`` reads one JSON request per line from stdin and answers with JSON events, one per line::

    {"start": 7, "function": "module:name", "arguments": [...], "num_ranks": 2, "folder": "..."}  ->  {"started": 7}
    {"load": "CPUAdamBuilder"}                           a compiled operator of DeepSpeed, for all later jobs
                                                         ->  {"loaded": "CPUAdamBuilder", "error": null}
    {"kill": 7}                                          SIGKILL to every rank of the job that lives
                                                         ->  {"ended": 7, "rank": 0, "status": -9} for each rank

A rank may say something itself (`announce`): ``{"said": 7, "rank": 0, "text": "..."}``. Every rank is a process of its
own that writes to ``rank<n>.log`` in the folder and ends without the interpreter's exit. The end of stdin ends the
server and all ranks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

CHANNEL = "DATASTATES_TEST_CHANNEL"


def announce(text: str) -> None:
    """Say something to the test that started this rank."""
    descriptor, job = map(int, os.environ[CHANNEL].split(","))
    event = {"said": job, "rank": int(os.environ["RANK"]), "text": text}
    os.write(descriptor, json.dumps(event).encode() + b"\n")


def job_number() -> int:
    """The number of the job that this rank belongs to."""
    return int(os.environ[CHANNEL].split(",")[1])


class Server:
    """Owns the ranks; single threaded, so that forking is safe."""

    def __init__(self, channel: int) -> None:
        """Args:
        channel: where the events go.
        """
        self._channel = channel
        self._ranks: dict[int, tuple[int, int]] = {}  # process id -> (job, rank)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._unread = b""

    def run(self) -> None:
        gc.freeze()
        self._say({"ready": True})
        while True:
            ready = {key.fd for key, _ in self._selector.select()}
            if self._wake_reader in ready:
                os.read(self._wake_reader, 4096)
            if 0 in ready and not self._read_requests():
                break
            self._reap(os.WNOHANG)
        self._kill(None)
        self._reap(0)

    def _read_requests(self) -> bool:
        data = os.read(0, 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "start" in request:
                self._start(request)
            elif "load" in request:
                self._say({"loaded": request["load"], "error": load_operator(request["load"])})
            else:
                self._kill(request["kill"])
        return bool(data)

    def _start(self, request: dict[str, Any]) -> None:
        for rank in range(request["num_ranks"]):
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                run_rank(request, rank, self._channel)
            self._ranks[pid] = request["start"], rank
        self._say({"started": request["start"]})

    def _kill(self, job: int | None) -> None:
        for pid, (owner, _) in self._ranks.items():
            if job in (None, owner):
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still its own

    def _reap(self, options: int) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, options)
            if pid == 0:
                return
            job, rank = self._ranks.pop(pid)
            self._say({"ended": job, "rank": rank, "status": os.waitstatus_to_exitcode(status)})

    def _say(self, event: dict[str, Any]) -> None:
        os.write(self._channel, json.dumps(event).encode() + b"\n")


def load_operator(name: str) -> str | None:
    """Load an operator of DeepSpeed, compiling it if need be; returns why that fails."""
    builder = importlib.import_module("deepspeed.accelerator").get_accelerator().create_op_builder(name)
    remove_stale_lock(Path(os.environ["TORCH_EXTENSIONS_DIR"], builder.name, "lock"))
    try:
        builder.load(verbose=False)
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def remove_stale_lock(lock: Path) -> None:
    """Remove the lock that a killed compilation has left, or torch waits for it for ever.

    Whoever compiles has the file open. Source: torch 2.13, torch/utils/file_baton.py.
    """
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if descriptor.readlink() == lock:
                return
    lock.unlink(missing_ok=True)


def run_rank(request: dict[str, Any], rank: int, channel: int) -> None:
    """The life of one rank; does not return."""
    status = 1
    try:
        folder = Path(request["folder"])
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.environ[CHANNEL] = f"{channel},{request['start']}"
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request["num_ranks"]))
        module, _, name = request["function"].partition(":")
        getattr(importlib.import_module(module), name)(*request["arguments"])
        status = 0
    except BaseException:  # noqa: BLE001 - the top of the process: said in its log, and by its status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    events = os.dup(1)
    os.dup2(2, 1)  # what is printed while modules are imported is no event
    for name in sys.argv[1:]:
        importlib.import_module(name)
    Server(events).run()
