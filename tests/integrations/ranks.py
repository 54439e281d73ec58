"""Runs a script as several ranks of one job, as a launcher would, and takes them all down together."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[1])


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives out by itself: it may be taken later."""
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Ranks:
    """The processes of one job; rank ``n`` writes to ``rank<n>.log`` in the folder."""

    def __init__(self, script: Path, arguments: list[object], folder: Path, num_ranks: int = 2) -> None:
        self._logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
        port = str(free_port())
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self._logs):
            env = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            with log.open("w") as output:
                command = [sys.executable, str(script), *map(str, arguments)]
                self.processes.append(
                    subprocess.Popen(
                        command, env=env, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
                    )
                )

    def log(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in self._logs)

    def wait(self, timeout: float = 120, expect: int = 0) -> str:
        """Wait for all ranks; fails with their output unless each ends with the expected status."""
        try:
            codes = [process.wait(timeout) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done within {timeout} s\n{self.log()}") from None
        assert codes == [expect] * len(codes), f"exit status {codes}\n{self.log()}"
        return self.log()

    def kill(self) -> None:
        """SIGKILL every rank; their flusher processes live on."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextmanager
def run_ranks(script: Path, *arguments: object, folder: Path, num_ranks: int = 2) -> Iterator[Ranks]:
    ranks = Ranks(script, list(arguments), folder, num_ranks)
    try:
        yield ranks
    finally:
        ranks.kill()
