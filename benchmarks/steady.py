"""Two hundred saves in a row: is the last like the first?

    python benchmarks/steady.py --dir build/bench

A checkpoint of 64 MiB in a few large and 2,000 small tensors is saved again and again, of which the youngest two are
kept. The table compares the first saves (but for ten that warm up) with the last: seconds, memory of both processes
without the host cache, open files, threads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from datastates.config import CheckpointConfig
from datastates.removal import remove_checkpoint
from datastates.saver import Saver

WARM_UP, WINDOW = 10, 30


def own_memory(pid: int) -> float:
    """MiB of a process that are neither files nor shared memory. Source: proc_pid_status(5), RssAnon."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) / 1024


def num_open(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def run(folder: Path, count: int) -> list[dict[str, float]]:
    state = {f"large{n}": torch.full((2 << 20,), 1.0) for n in range(8)}
    state |= {f"small{n}": torch.full((16,), 1.0) for n in range(2000)}
    saver = Saver(CheckpointConfig(host_cache_bytes=256 << 20), run_id=f"steady-{os.getpid()}")
    rows = []
    try:
        for number in range(count):
            torch._foreach_add_(list(state.values()), 1.0)
            path = folder / f"step{number}"
            begin = time.perf_counter()
            attempt = saver.begin(str(path), path.name, update_latest=True)
            saver.save(state, str(path / "state.pt"), attempt=attempt)
            blocked = time.perf_counter() - begin
            saver.commit(attempt).result()
            row = {"blocked, ms": 1e3 * blocked, "committed, ms": 1e3 * (time.perf_counter() - begin)}
            for name, pid in (("trainer", os.getpid()), ("flusher", saver.flusher_pid)):
                row |= {f"{name}: memory, MiB": own_memory(pid), f"{name}: open files": num_open(pid)}
                row[f"{name}: threads"] = num_threads(pid)
            rows.append(row)
            if number >= 2:
                remove_checkpoint(str(folder / f"step{number - 2}"))
    finally:
        saver.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="build/bench/steady", help="folder on the disk to write to")
    parser.add_argument("--saves", type=int, default=200, help=f"how many, more than {WARM_UP + 2 * WINDOW}")
    arguments = parser.parse_args()
    if arguments.saves <= WARM_UP + 2 * WINDOW:
        parser.error(f"--saves {arguments.saves}: more than {WARM_UP + 2 * WINDOW} are needed for a comparison")
    rows = run(Path(arguments.dir).resolve(), arguments.saves)
    first, last = rows[WARM_UP : WARM_UP + WINDOW], rows[-WINDOW:]
    print(f"| | saves {WARM_UP} to {WARM_UP + WINDOW} | the last {WINDOW} of {len(rows)} |\n|---|---:|---:|")
    for name in rows[0]:
        values = [statistics.median(row[name] for row in part) for part in (first, last)]
        print(f"| {name} | {values[0]:.1f} | {values[1]:.1f} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
