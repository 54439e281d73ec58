"""How much a save slows down a training loop that is busy with Python alone, and so competes for the GIL.

    python benchmarks/loop.py --dir build/bench

The loop counts in pure Python. In turns it runs as long as a save takes without one and with one; both times the
same number of rounds, so that the difference of the two wall times is all that a save costs: the call, what the
background threads take of the GIL, of the core and of the memory bus, and the fence, which is closed at the end.
The slowdown is that difference as a share of the time from the call to the durable file.

    many    10,000 tensors of 100 kB
    small   20,000 tensors of 64 bytes
    big     10 tensors of 100 MB
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch

from datastates import CheckpointEngine

COUNTS_PER_ROUND = 20_000
STATES = {"many": (10_000, 25_000), "small": (20_000, 16), "big": (10, 25_000_000)}
"""Number of tensors, and how many float32 each has."""


@dataclass(frozen=True)
class Turn:
    """Seconds: of the loop alone and with a save, of the call, until durable; CPU seconds of this process in both."""

    alone: float
    saving: float
    call: float
    durable: float
    cpu_alone: float
    cpu_saving: float

    @property
    def slowdown(self) -> float:
        return (self.saving - self.alone) / max(self.durable, self.call)


def work(rounds: int) -> float:
    """Count in pure Python; the seconds it took."""
    begin = time.perf_counter()
    for _ in range(rounds):
        total = 0
        for number in range(COUNTS_PER_ROUND):
            total += number & 3
    return time.perf_counter() - begin


def turn(engine: CheckpointEngine, state: dict[str, torch.Tensor], path: str, rounds: int) -> Turn:
    cpu = time.process_time()
    alone = work(rounds)
    cpu_alone, cpu = time.process_time() - cpu, time.process_time()
    begin = time.perf_counter()
    engine.save(state, path)
    call = time.perf_counter() - begin
    durable = 0.0
    for _ in range(rounds):
        work(1)
        if not durable and not engine._saver.is_busy:
            durable = time.perf_counter() - begin
    engine.wait()
    saving = time.perf_counter() - begin
    cpu_saving = time.process_time() - cpu
    engine.wait(persist=True)
    return Turn(alone, saving, call, durable or time.perf_counter() - begin, cpu_alone, cpu_saving)


def measure(kind: str, folder: str, repeat: int, seconds: float, cache: float) -> list[Turn]:
    count, elements = STATES[kind]
    state = {f"layers.{number}.weight": torch.full((elements,), float(number)) for number in range(count)}
    path = os.path.join(folder, "loop.pt")
    rounds = max(int(seconds / (work(100) / 100)), 1)
    with CheckpointEngine({"host_cache_size": cache}, rank=0) as engine:
        turn(engine, state, path, rounds)
        turns = [turn(engine, state, path, rounds) for _ in range(repeat)]
    os.unlink(path)
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="build/bench", help="folder on the disk to write to")
    parser.add_argument("--states", nargs="+", choices=list(STATES), default=list(STATES))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="how long the loop runs, longer than a save")
    parser.add_argument("--cache", type=float, default=1.5, help="host cache in GiB")
    parser.add_argument("--out", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    os.makedirs(arguments.dir, exist_ok=True)
    print("| state | call, ms | durable, s | loop alone, s | with a save, s | cost of a save, ms | slowdown |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    rows = {}
    for kind in arguments.states:
        turns = measure(kind, arguments.dir, arguments.repeat, arguments.seconds, arguments.cache)
        rows[kind] = [asdict(one) for one in turns]
        alone, saving, call, durable = (
            statistics.median(getattr(one, name) for one in turns) for name in ("alone", "saving", "call", "durable")
        )
        cost = statistics.median(one.saving - one.alone for one in turns)
        share = statistics.median(one.slowdown for one in turns)
        cells = [f"{1e3 * call:.0f}", f"{durable:.2f}", f"{alone:.2f}", f"{saving:.2f}", f"{1e3 * cost:.0f}"]
        print("| " + " | ".join([kind, *cells, f"{100 * share:.1f} %"]) + " |", flush=True)
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
