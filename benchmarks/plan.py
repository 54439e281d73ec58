"""How long `save()` blocks for states of many small tensors: the first time, and when the structure is known.

    python benchmarks/plan.py --dir build/bench

Each state is half weights, half optimizer state (moments and 0-dim step counters). "Known" saves change every value,
and numbers such as the learning rate; the layout of the file is that of the save before. Times are medians of the
call of ``save()`` in milliseconds, with everything that is not a tensor pickled and every tensor copied inside;
"reference" is the planner that is used for states which are not ordinary.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from typing import Any

import torch

from datastates import CheckpointEngine, formats
from datastates.state import capture_host, default_is_eager

ELEMENTS = 16


def state_of(num_tensors: int) -> dict[str, Any]:
    quarter = num_tensors // 4
    moments = {n: {"exp_avg": torch.full((ELEMENTS,), 1.0), "step": torch.tensor(1.0)} for n in range(quarter)}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(quarter))}]
    weights = {f"layers.{n}.weight": torch.full((ELEMENTS,), 1.0) for n in range(num_tensors - 2 * quarter)}
    return {"model": weights, "optimizer": {"state": moments, "param_groups": groups}, "step": 0}


def train(state: dict[str, Any]) -> None:
    """Change all values in place, as a step does."""
    torch._foreach_add_(list(state["model"].values()), 1.0)
    for moment in state["optimizer"]["state"].values():
        moment["step"] += 1
    state["optimizer"]["param_groups"][0]["lr"] *= 0.99
    state["step"] += 1


def milliseconds(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def measure(num_tensors: int, folder: str, repeat: int) -> dict[str, float]:
    state = state_of(num_tensors)
    path = os.path.join(folder, "state.pt")
    first, known, reference = [], [], []
    for _ in range(repeat):
        with CheckpointEngine({"host_cache_size": 0.5}, rank=0) as engine:
            engine.save({"warm": torch.ones(1)}, path)
            engine.wait(persist=True)
            first.append(milliseconds(lambda: engine.save(state, path)))
            for _ in range(3):
                engine.wait(persist=True)
                train(state)
                known.append(milliseconds(lambda: engine.save(state, path)))
        gc.collect()
        reference.append(milliseconds(lambda: formats.plan(state, "torch", capture_host, default_is_eager(1 << 16))))
    os.unlink(path)
    medians = {"first": first, "known": known, "reference": reference}
    return {"tensors": num_tensors} | {name: statistics.median(values) for name, values in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="build/bench", help="folder on the disk to write to")
    parser.add_argument("--tensors", type=int, nargs="+", default=[1000, 20_000, 100_000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    os.makedirs(arguments.dir, exist_ok=True)
    rows = [measure(count, arguments.dir, arguments.repeat) for count in arguments.tensors]
    print("| tensors | first save, ms | known structure, ms | reference planner, ms | µs per tensor, known |")
    print("|---:|---:|---:|---:|---:|")
    for row in rows:
        times = [f"{row[name]:.0f}" for name in ("first", "known", "reference")]
        per_tensor = f"{1e3 * row['known'] / row['tensors']:.1f}"
        print("| " + " | ".join([f"{row['tensors']:,}", *times, per_tensor]) + " |")
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
