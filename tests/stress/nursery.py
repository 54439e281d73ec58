"""A process that has imported torch and forks the ranks of stress jobs: a start takes milliseconds, not seconds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from stress import processes
from stress.trainer import Job, run

TESTS = Path(__file__).resolve().parent.parent


class Nursery:
    """Starts jobs, one after the other; a context manager. Its processes are not the caller's children."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stress.nursery"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.communicate()  # the end of its input; it kills what is left of a job

    def start(self, job: Job) -> list[int]:
        """Fork the ranks of a job; their ids, by rank, are not used again before `reap`."""
        pids: list[int] = self._ask({"job": asdict(job)})
        return pids

    def reap(self) -> list[int]:
        """Wait for the ranks of the last job. Their exit statuses by rank, -9 for SIGKILL."""
        statuses: list[int] = self._ask({})
        return statuses

    def _ask(self, request: dict[str, Any]) -> Any:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the nursery was started without pipes")
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the nursery has ended")
        return json.loads(answer)


def serve() -> None:
    pids: list[int] = []
    for line in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(line)
        if "job" in request:
            job = Job(**request["job"])
            pids = [_fork(job, rank) for rank in range(job.num_ranks)]
            answer = pids
        else:
            answer = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            pids = []
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    processes.kill(pids)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _fork(job: Job, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(job.file("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(log)
        os.close(null)
        run(job, rank)
        status = 0
    except BaseException:  # noqa: BLE001 - the top of a process: said in the log, and by the exit status
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
