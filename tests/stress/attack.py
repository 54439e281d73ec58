"""One start of a job, and the blow that ends it or some of its processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from stress import processes
from stress.kills import SPARE_TRAINERS, Kill
from stress.trainer import Job

JOB_TIMEOUT_SECONDS = 120.0  # for what takes a second or two on a machine that is not busy
_POLL_SECONDS = 0.002


class News:
    """What the ranks of a job tell, through a named pipe."""

    def __init__(self, path: str) -> None:
        os.mkfifo(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""
        self.lines: list[tuple[str, int, int]] = []

    def take(self) -> None:
        try:
            while data := os.read(self._descriptor, 1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    word, rank, step = line.decode().split()
                    self.lines.append((word, int(rank), int(step)))
        except BlockingIOError:
            return

    def steps(self, word: str, rank: int | None = None) -> set[int]:
        """The steps that a word was said of, by one rank or any."""
        return {step for said, who, step in self.lines if said == word and rank in (None, who)}

    def ranks(self, word: str) -> set[int]:
        """The ranks that said a word."""
        return {rank for said, rank, _ in self.lines if said == word}

    def steps_of_all(self, word: str, num_ranks: int) -> set[int]:
        return set.intersection(*(self.steps(word, rank) for rank in range(num_ranks)))

    def close(self) -> None:
        os.close(self._descriptor)


class Attack:
    """The processes of one start, and what a `Kill` does to them.

    Attributes:
        num_killed: processes that got SIGKILL while they were alive.
        is_ready: every rank has committed a checkpoint.
    """

    def __init__(self, kill: Kill, job: Job, news: News, trainers: list[int]) -> None:
        self.num_killed = 0
        self.is_ready = False
        self._kill = kill
        self._job = job
        self._news = news
        self._trainers = trainers

    def happen(self) -> None:
        """Wait for the moment and strike; then, like a launcher, kill the ranks that are left of a broken job."""
        if self._kill.way == "at start":
            time.sleep(self._kill.delay_seconds)
            self._die(self._trainers)
            return
        self.is_ready = self._wait(lambda: len(self._news.ranks("ready")) == self._job.num_ranks)
        if not self.is_ready:
            self._die(self._trainers)
            return
        with open(self._job.file("armed"), "x"):
            pass
        if self._kill.way.endswith(("point", "request")):
            self._await_point()
        else:
            self._await_moment()
            self._strike(self._kill.way)
        if self._kill.way not in SPARE_TRAINERS:
            time.sleep(self._kill.lag_seconds)
            self._die(self._trainers)

    def _await_moment(self) -> None:
        num_begun = len(self._news.steps("begun")) + self._kill.num_steps
        self._wait(lambda: len(self._news.steps("begun")) >= num_begun)
        time.sleep(self._kill.delay_seconds)

    def _await_point(self) -> None:
        """The victims kill themselves."""
        if self._kill.way.endswith("request"):
            victim = self._trainers[self._kill.rank]
            self.num_killed += self._wait(lambda: processes.wait_for_end([victim], 0))
        else:
            self.num_killed += self._wait(lambda: os.path.exists(self._job.file("reached")))

    def _strike(self, way: str) -> None:
        flushers = processes.flushers(self._job.mark)
        victim = self._trainers[self._kill.rank]
        own = [pid for pid in flushers if processes.parent(pid) == victim]
        victims = {
            "all trainers": self._trainers,
            "one trainer": [victim],
            "one flusher": own,
            "all flushers": flushers,
            "one rank": [victim, *own],
            "everything": [*self._trainers, *flushers],
        }[way.replace("stopped", "all").replace("all everything", "everything")]
        if self._kill.is_after:
            victims = victims[::-1]
        if way.startswith("stopped"):
            processes.send(victims, signal.SIGSTOP)
            time.sleep(self._kill.lag_seconds)
        self._die(victims)

    def _die(self, pids: list[int]) -> None:
        self.num_killed += processes.kill(pid for pid in pids if not processes.wait_for_end([pid], 0))

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for something. False when all ranks have ended, or the time is over, without it."""
        deadline = time.monotonic() + JOB_TIMEOUT_SECONDS
        while True:
            is_over = processes.wait_for_end(self._trainers, 0) or time.monotonic() > deadline
            self._news.take()
            if condition():
                return True
            if is_over:
                return False
            time.sleep(_POLL_SECONDS)
