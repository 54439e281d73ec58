"""Finding and ending processes by their ids; imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

MARK = "DATASTATES_STRESS_JOB"
"""Environment variable of every flusher of one job, also of those that outlive their trainer."""


def flushers(mark: str) -> list[int]:
    """The flusher processes of a job that are alive now."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended between the listing and the look, or is another user's
                if wanted in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return sorted(found)


def parent(pid: int) -> int:
    """Its parent's id; 0 when it is gone."""
    try:
        return int(Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def send(pids: Iterable[int], number: int) -> int:
    """Send a signal to processes, in this order. Returns to how many."""
    count = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            count += 1
    return count


def kill(pids: Iterable[int]) -> int:
    return send(pids, signal.SIGKILL)


def wait_for_end(pids: Sequence[int], timeout: float) -> bool:
    """Wait until all of these have ended, whether or not somebody waited for them. False when the time is over."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            if not poller.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                return False
        finally:
            os.close(descriptor)
    return True
