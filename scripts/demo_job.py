"""A training job that the demo starts, watches and kills: a launcher and all processes under it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

POLL_SECONDS = 0.002  # a save of a small model lasts some 100 ms, and must be met in its middle
FLUSHER = b"datastates.flusher"  # an argument of its command line: python -m datastates.flusher


class JobFailed(Exception):  # noqa: N818 - it reads as what happened
    """A job ended otherwise than it should have; the message ends with the tail of its log."""


class Job:
    """One start of a command. Use as a context manager: whatever is left of it is killed at the end.

    Its processes are known by their process descriptors, so a recycled process id is never hit.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: str) -> None:
        """Start the command in a session of its own, with its output appended to the file `log`."""
        self._log = log
        with open(log, "ab") as output:
            self._log_position = output.tell()
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            for descriptor in self.kill():
                os.close(descriptor)

    def watch(self, until: Callable[[], bool], timeout: float) -> bool:
        """Print what the script says until `until` is true (returns True) or the job has ended by itself (False).

        Raises:
            JobFailed: neither happened within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            if until():
                return True
            ended = self._process.poll() is not None
            self._print_news()
            if ended:
                return False
            if time.monotonic() > deadline:
                raise JobFailed(f"the job did not end within {timeout:.0f} s\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)

    def check_success(self) -> None:
        """Raise JobFailed unless the job has ended with exit status 0."""
        status = self._process.wait()
        if status != 0:
            raise JobFailed(f"the job ended with exit status {status}\n{self.log_tail()}")

    def kill(self) -> list[int]:
        """SIGKILL the launcher and all processes under it, except flushers; returns once they are gone.

        Returns:
            the process descriptors of the flushers, which end by themselves; the caller closes them.
        """
        victims, flushers = [], []
        for pid in [self._process.pid, *_descendants(self._process.pid)]:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                descriptor = os.pidfd_open(pid)
                is_flusher = FLUSHER in _arguments(pid)
                (flushers if is_flusher else victims).append(descriptor)
        for descriptor in victims:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        self._process.wait()
        wait_for_end(victims, timeout=60)
        self._print_news()
        return flushers

    def log_tail(self, num_lines: int = 80) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()[-num_lines:]
        return f"----- the end of {self._log}:\n" + "\n".join(lines)

    def _print_news(self) -> None:
        """Print the new lines that the training script wrote itself."""
        with open(self._log, "rb") as file:
            file.seek(self._log_position)
            news = file.read()
        news = news[: news.rfind(b"\n") + 1]
        self._log_position += len(news)
        for line in news.decode(errors="replace").splitlines():
            if line.startswith("pretrain_gpt: "):
                print("    " + line.removeprefix("pretrain_gpt: "), flush=True)


def wait_for_end(descriptors: Sequence[int], timeout: float) -> None:
    """Wait until the processes have ended, and close their descriptors.

    Raises:
        JobFailed: one of them has not ended within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    try:
        for descriptor in descriptors:
            while _is_running(descriptor):
                if time.monotonic() > deadline:
                    raise JobFailed(f"a process had not ended {timeout:.0f} s after the job was killed")
                time.sleep(POLL_SECONDS)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _is_running(descriptor: int) -> bool:
    """Whether the process of the descriptor runs; one that ended but was not yet reaped by init does not."""
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
        pid = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
    if pid <= 0:
        return False
    try:
        return _stat(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _descendants(root: int) -> list[int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parents[int(name)] = int(_stat(int(name))[1])
    found = [root]
    for parent in found:  # grows while it is walked
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on, after the name, which may hold blanks and parentheses."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _arguments(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().split(b"\0")
