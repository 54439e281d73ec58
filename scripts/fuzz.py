"""Loads a million damaged files, each in one of all ways; says what came of it.

    python scripts/fuzz.py                          1,000,000 files, some two hours on 2 cores
    python scripts/fuzz.py --count 20000 --first 5000000 --processes 4

The files are those of ``tests/stress/fuzz.py``; each follows from its number. Exit status 1 when a loader gave another
answer than a state or a refusal, took more memory or time than a small file may, or died. The short form is part of
``make test``: tests/test_fuzz.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from stress import fuzz  # noqa: E402

BATCH = 5000
HANG_SECONDS = 60
"""Processor time for one file, after which the kernel ends the process: code in C that hangs hears of nothing else."""

STILL_SECONDS = 900.0
"""Wall time for one file, for what waits and uses no processor: long, since a busy machine may let a process wait."""

EXTRA_BYTES = 512 << 20
"""So much more memory than at the begin: a file of a few kilobytes must not need it."""


def _child(seeds: range, path: Path, current: Synchronized[int], send: Connection) -> None:
    warnings.simplefilter("ignore")  # torch warns of pickles of other protocols
    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_BYTES, used + EXTRA_BYTES))

    def begin(seed: int) -> None:
        current.value = seed
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + HANG_SECONDS, most))

    send.send(fuzz.run(seeds, path, begin))
    send.close()


class _Batch:
    """A process that loads files one after the other."""

    def __init__(self, process: BaseProcess, current: Synchronized[int]) -> None:
        self.process = process
        self.current = current
        self._last = current.value, time.monotonic()
        self._is_still = False

    def kill_if_still(self) -> None:
        if self.current.value != self._last[0]:
            self._last = self.current.value, time.monotonic()
        elif time.monotonic() - self._last[1] > STILL_SECONDS and not self._is_still:
            self._is_still = True
            self.process.kill()

    def end(self) -> str:
        """How a process ended that has sent nothing; waits until it has."""
        self.process.join()
        if self._is_still:
            return f"hangs: nothing came of it in {STILL_SECONDS:g} s"
        if self.process.exitcode == -signal.SIGXCPU:
            return f"hangs: it took {HANG_SECONDS} s of processor time and more"
        return f"the process died: exit code {self.process.exitcode}"


def run_all(first: int, count: int, num_processes: int, folder: Path) -> fuzz.Outcome:
    """All files from ``first`` on, in processes of a batch each, so that one that dies costs no more than its batch."""
    context, total, running = multiprocessing.get_context("fork"), fuzz.Outcome(), {}
    batches = [range(begin, min(begin + BATCH, first + count)) for begin in range(first, first + count, BATCH)]
    begun = time.monotonic()
    while batches or running:
        while batches and len(running) < num_processes:
            seeds, current = batches.pop(0), context.Value("q", -1)
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(seeds, folder / f"file-{seeds.start}", current, send))
            process.start()
            send.close()
            running[receive] = _Batch(process, current)
        for receive in wait(list(running), timeout=1.0):
            batch = running.pop(receive)
            try:
                found = receive.recv()
            except EOFError:
                found = fuzz.Outcome(faults={batch.current.value: batch.end()})
            batch.process.join()
            total.add(found)
            for seed, fault in found.faults.items():
                print(f"file {seed}: {fault}", file=sys.stderr, flush=True)
            print(f"  {sum(total.answers.values())} files, {len(total.faults)} faults", file=sys.stderr, flush=True)
        for batch in running.values():
            batch.kill_if_still()
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    return total


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="load damaged files, and look how they are refused")
    parser.add_argument("--count", type=int, default=1_000_000, help="number of files (default: 1000000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first file (default: 0)")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="at a time")
    parser.add_argument("--dir", type=Path, help="where to write the files (default: a temporary folder in memory)")
    options = parser.parse_args(arguments)
    memory = Path("/dev/shm")
    parent = options.dir or (memory if memory.is_dir() else None)
    with tempfile.TemporaryDirectory(prefix="datastates-fuzz-", dir=parent) as folder:
        total = run_all(options.first, options.count, options.processes, Path(folder))
    for answer, number in total.answers.most_common():
        print(f"{number:>9}  {answer}")
    print(f"{len(total.faults):>9}  faults; most memory {total.peak_nbytes >> 20} MiB")
    for seed, fault in sorted(total.faults.items()):
        print(f"\nfile {seed}:\n{fault}")
    return 1 if total.faults else 0


if __name__ == "__main__":
    sys.exit(main())
