"""What it is worth to write over the files of a deleted checkpoint instead of new ones.

    python benchmarks/spare.py --dir build/bench

Two `Checkpointer`s with ``keep_last=1``, one with ``keep_spare``, save the same state in turns. The time is from the
call until the checkpoint is committed; the older one is deleted before the next save begins, and the disk is idle then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch

from datastates import Checkpointer

GIB = 2**30
NUM_TENSORS = 20
WARM_UP = 3


def measure(folder: Path, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each save, by ``"new"`` and ``"rewritten"``."""
    state = {f"layers.{n}.weight": torch.full((nbytes // NUM_TENSORS // 4,), float(n)) for n in range(NUM_TENSORS)}
    seconds: dict[str, list[float]] = {"new": [], "rewritten": []}
    savers = {
        name: Checkpointer(folder / name, keep_last=1, keep_spare=name == "rewritten", host_cache_gb=nbytes / GIB)
        for name in seconds
    }
    try:
        for number in range(rounds + WARM_UP):
            for name, saver in savers.items() if number % 2 else reversed(savers.items()):
                torch._foreach_add_(list(state.values()), 1.0)
                os.sync()
                begin = time.perf_counter()
                saver.save(number, {"model": state}).committed.result()
                if number >= WARM_UP:
                    seconds[name].append(time.perf_counter() - begin)
                saver.wait()
    finally:
        for name, saver in savers.items():
            saver.close()
            shutil.rmtree(folder / name)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"), help="folder on the disk to write to")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state in GiB")
    parser.add_argument("--repeat", type=int, default=7)
    arguments = parser.parse_args()
    nbytes = int(arguments.gib * GIB)
    seconds = measure(arguments.dir, nbytes, arguments.repeat)
    print("| files | committed, s | GB/s |\n|---|---:|---:|")
    for name, found in seconds.items():
        middle = statistics.median(found)
        print(f"| {name} | {middle:.2f} ({min(found):.2f} to {max(found):.2f}) | {nbytes / middle / 1e9:.2f} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
