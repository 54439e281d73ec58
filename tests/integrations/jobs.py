"""Runs functions as several ranks of one job, forked by a server that has imported DeepSpeed once."""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("fork_server.py")
START_SECONDS = 120.0


class Job:
    """The ranks of one job, forked at once; rank ``n`` writes to ``rank<n>.log`` in the folder."""

    def __init__(self, server: ForkServer, number: int, folder: Path, num_ranks: int) -> None:
        self._server = server
        self._number = number
        self._logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
        self._num_ranks = num_ranks

    @property
    def statuses(self) -> dict[int, int]:
        """Exit status by rank, of those that have ended; negative: killed by that signal."""
        return self._server.ended.setdefault(self._number, {})

    def log(self) -> str:
        texts = [(log.name, log.read_text(errors="replace") if log.exists() else "(none)") for log in self._logs]
        return "\n".join(f"--- {name}\n{text}" for name, text in texts)

    def wait(self, timeout: float = 60.0, expect: int = 0) -> str:
        """Wait for all ranks; fails with their output unless each ends with the expected status."""
        self._wait_ended(timeout)
        assert self.statuses == dict.fromkeys(range(self._num_ranks), expect), f"{self.statuses}\n{self.log()}"
        return self.log()

    def wait_announced(self, timeout: float = 60.0) -> list[str]:
        """What every rank has announced last, once each has; fails with their output if one ends before."""
        deadline = time.monotonic() + timeout
        said = self._server.said.setdefault(self._number, {})
        while len(said) < self._num_ranks:
            assert not self.statuses, f"{self.statuses}\n{self.log()}"
            assert time.monotonic() < deadline, f"nothing announced within {timeout} s\n{self.log()}"
            self._server.listen(deadline - time.monotonic())
        return [said[rank] for rank in range(self._num_ranks)]

    def kill(self, timeout: float = 30.0) -> None:
        """SIGKILL every rank that lives; their flusher processes live on."""
        if len(self.statuses) < self._num_ranks:
            self._server.send({"kill": self._number})
            self._wait_ended(timeout)

    def _wait_ended(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while len(self.statuses) < self._num_ranks:
            left = deadline - time.monotonic()
            assert left > 0, f"not done within {timeout} s\n{self.log()}"
            self._server.listen(left)


class ForkServer:
    """The tests' side of the server. One thread uses it."""

    def __init__(self, *modules: str) -> None:
        """Start it; blocks until it has imported the modules."""
        self.ended: dict[int, dict[int, int]] = {}
        self.said: dict[int, dict[int, str]] = {}
        self.loaded: dict[str, str | None] = {}
        self._numbers = itertools.count(1)
        command = [sys.executable, str(SERVER), *modules]
        scripts = os.path.dirname(sys.executable)  # ninja is there, also where the environment is not activated
        env = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}", "TORCHDYNAMO_DISABLE": "1"}
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._unread = b""
        self._is_ready = False
        self._jobs: list[Job] = []
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready:
            self.listen(deadline - time.monotonic())

    def start(self, function: str, *arguments: object, folder: Path, num_ranks: int = 2) -> Job:
        """Fork the ranks of a job; each calls ``module:name`` with the arguments."""
        number = next(self._numbers)
        folder.mkdir(parents=True, exist_ok=True)
        request: dict[str, Any] = {"start": number, "function": function, "num_ranks": num_ranks}
        self.send(request | {"folder": str(folder), "arguments": [_plain(value) for value in arguments]})
        job = Job(self, number, folder, num_ranks)
        self._jobs.append(job)
        return job

    def load_operator(self, name: str, timeout: float = 800.0) -> str | None:
        """Load a compiled operator of DeepSpeed into the server, for all later jobs; returns why that fails."""
        if name not in self.loaded:
            self.send({"load": name})
        deadline = time.monotonic() + timeout
        while name not in self.loaded:
            assert time.monotonic() < deadline, f"{name} not compiled within {timeout} s"
            self.listen(deadline - time.monotonic())
        return self.loaded[name]

    def kill_all(self) -> None:
        """End every rank of every job that lives."""
        for job in self._jobs:
            job.kill()
        self._jobs.clear()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def listen(self, timeout: float) -> None:
        """Take what the server says, at least one event unless the time ends."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        readable, _, _ = select.select([descriptor], [], [], max(timeout, 0.0))
        if not readable:
            return
        data = os.read(descriptor, 1 << 16)
        assert data, "the fork server has ended"
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            self._is_ready = self._is_ready or "ready" in event
            if "ended" in event:
                self.ended.setdefault(event["ended"], {})[event["rank"]] = event["status"]
            if "loaded" in event:
                self.loaded[event["loaded"]] = event["error"]
            if "said" in event:
                self.said.setdefault(event["said"], {})[event["rank"]] = event["text"]


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
