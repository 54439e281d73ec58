"""Where each millisecond of a save goes: writes `docs/profile.md` from what it measures.

    python benchmarks/anatomy.py --dir build/bench --out docs/profile.md

Times come from the library's own event records, from clocks around the functions that a call of ``save()`` consists of
(each is called once per save, so the clocks cost nothing), and from the kernel's account of each thread.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from datastates.config import CheckpointConfig
from datastates.formats import geometry, torch_layout, torch_planner, torch_structure
from datastates.saver import Saver
from datastates.staging import Staging

PARTS: list[tuple[str, Any, str]] = [
    ("pickle the structure, with a mark for each tensor", torch_planner, "skeleton_of"),
    ("compare keys and containers", torch_planner, "_keys"),
    ("find each tensor's memory", torch_planner, "memory_of"),
    ("compare shapes, strides, dtypes, devices", geometry.Looks, "fit"),
    ("copy the small tensors", torch_structure.Structure, "copies"),
    ("put the file's image together", torch_layout.Layout, "fill"),
    ("tell flusher and stager", Staging, "submit"),
]
ROUNDS = 7


class Clocks:
    """Sums the seconds that functions take, by name of the part that they are."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        for part, owner, name in PARTS:
            setattr(owner, name, self._clocked(part, getattr(owner, name)))

    def _clocked(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[part] += time.perf_counter() - begin

        return call


def thread_seconds(pid: int) -> dict[str, float]:
    """CPU seconds of each thread of a process so far, by id. Source: proc(5), ``schedstat``."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return found


def state_of(kind: str) -> dict[str, torch.Tensor]:
    count, elements = {"small": (20_000, 16), "many": (10_000, 25_000), "big": (20, 13_421_772)}[kind]
    return {f"layers.{number}.weight": torch.full((elements,), float(number)) for number in range(count)}


def timeline(events: list[dict[str, Any]], begin: float) -> dict[str, float]:
    """Milliseconds from the begin of a save to each turn of it, from the records of one file."""
    spans = {name: [(e["begin"], e["end"]) for e in events if e["event"] == name] for name in ("stage", "flush")}
    at = {e["event"]: e["end"] for e in events}
    turns = {
        "`save()` has returned": at["save"],
        "the first slab is copied": spans["stage"][0][1],
        "the first write begins": min(span[0] for span in spans["flush"]),
        "the last slab is copied: the state may change": spans["stage"][-1][1],
        "the last write ends": max(span[1] for span in spans["flush"]),
        "the file is durable (fsync)": at["durable"],
        "it is visible and said so": at["committed"],
    }
    return {name: 1e3 * (moment - begin) for name, moment in turns.items()}


def measure(kind: str, folder: str, clocks: Clocks) -> dict[str, Any]:
    """Medians over some saves of the same state; the first two do not count."""
    events: list[dict[str, Any]] = []
    state, path = state_of(kind), os.path.join(folder, "anatomy.pt")
    nbytes = sum(tensor.nbytes for tensor in state.values())
    lines, calls, parts, cpus = [], [], [], []
    saver = Saver(CheckpointConfig(host_cache_bytes=1 << 30), run_id="anatomy", listener=events.append)
    try:
        for turn in range(ROUNDS + 2):
            for tensor in state.values():
                tensor.add_(1.0)
            os.sync()
            before = {**thread_seconds(os.getpid()), **thread_seconds(saver.flusher_pid)}
            events.clear()
            clocks.seconds.clear()
            begin, cpu = time.monotonic(), time.thread_time()
            handle = saver.save(state, path)
            calls.append((time.monotonic() - begin, time.thread_time() - cpu))
            handle.staged.result()
            handle.committed.result()
            after = {**thread_seconds(os.getpid()), **thread_seconds(saver.flusher_pid)}
            if turn >= 2:
                lines.append(timeline(events, begin))
                parts.append(dict(clocks.seconds))
                cpus.append(_by_role({key: value - before.get(key, 0.0) for key, value in after.items()}))
    finally:
        saver.close()
        os.unlink(path)
    return {
        "nbytes": nbytes,
        "call": 1e3 * statistics.median(call for call, _ in calls[2:]),
        "timeline": _medians(lines),
        "parts": {name: 1e3 * value for name, value in _medians(parts).items()},
        "cpu": {name: 1e3 * value for name, value in _medians(cpus).items()},
    }


def _by_role(seconds: dict[str, float]) -> dict[str, float]:
    """Our threads by name, those of the flusher together; the main thread waits, and is left out."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    ours = {key: value for key, value in seconds.items() if names.get(key, "").startswith("datastates-")}
    trainer = {f"trainer: {names[key].removeprefix('datastates-')}": value for key, value in ours.items()}
    return {**trainer, "flusher: hashing and writing": sum(v for key, v in seconds.items() if key not in names)}


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def document(small: dict[str, Any], many: dict[str, Any], big: dict[str, Any]) -> str:
    other = small["call"] - sum(small["parts"].values())
    call = [f"| {name} | {value:.1f} |" for name, value in [*small["parts"].items(), ("the rest", other)]]
    turns = [
        f"| {name} | {value:.1f} | {many['timeline'][name]:.1f} | {small['timeline'][name]:.1f} |"
        for name, value in big["timeline"].items()
    ]
    where = f"{len(os.sched_getaffinity(0))} cores, kernel {platform.release()}, Python {platform.python_version()}"
    cpu = [f"| {name} | {value:.0f} | {many['cpu'].get(name, 0):.0f} |" for name, value in big["cpu"].items()]
    return f"""# Where the time of a save goes

Written by `python benchmarks/anatomy.py --dir build/bench --out docs/profile.md`: medians of {ROUNDS} saves to one
path, on {where}, torch {torch.__version__}.
Run it on your machine: the disk decides half of it.

## The call of `save()`

20,000 tensors of 64 bytes, structure known from an earlier save, {small["call"]:.0f} ms in all. All of it is
inside the call, and ends before training goes on:

| part | ms |
|---|---:|
{chr(10).join(call)}

Large tensors cost the call only their place in the plan: 20 tensors of 54 MB {big["call"]:.1f} ms, 10,000 of 100 kB
{many["call"]:.0f} ms.

## From the call to the durable file

Milliseconds from the begin of the call, while the caller waits:

| moment | {big["nbytes"] / 1e9:.2f} GB in 20 tensors | {many["nbytes"] / 1e9:.2f} GB in 10,000 | 20,000 small ones |
|---|---:|---:|---:|
{chr(10).join(turns)}

Copying and writing overlap, slab by slab. Between the last write and the durable file stands the fsync; behind it, a
rename and the fsync of the folder. Before the first write, the file is created: that waits where the file system is
busy with giving back the space of the file that the save before has replaced, as it is here.

## Core-milliseconds beside the training

| thread | {big["nbytes"] / 1e9:.2f} GB in 20 tensors | {many["nbytes"] / 1e9:.2f} GB in 10,000 |
|---|---:|---:|
{chr(10).join(cpu)}

The stager's share is one copy of the state, the flusher's one pass of CRC-32 and direct writes from the same memory.
Neither holds the trainer's GIL meanwhile: a slab takes it once to be copied and passed on, and reports of written
slabs are collected.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="build/bench", help="folder on the disk to write to")
    parser.add_argument("--out", help="write the document to this file; else it is printed")
    arguments = parser.parse_args()
    os.makedirs(arguments.dir, exist_ok=True)
    clocks = Clocks()
    text = document(*(measure(kind, arguments.dir, clocks) for kind in ("small", "many", "big")))
    if arguments.out:
        Path(arguments.out).write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
