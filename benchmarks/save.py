"""How long does saving block training, and when is the checkpoint durable: datastates against torch.save.

    python benchmarks/save.py --gib 1 --repeat 5 --dir /scratch

Every method writes the same state to a file of the same name, in a folder that must be on a real disk, in turns: in
each repetition all methods once, beginning with another one each time, after one round that does not count. The file
of the save before is deleted first, outside the measured time. Durable means that file and folder are fsynced.

torch.save    ``torch.save(state, path)``, then fsync of the file and the folder: blocked until durable
datastates    ``save(state, path)`` (blocked), ``wait()`` (staged), ``wait(persist=True)`` (durable)
raw O_DIRECT  one thread, one reused buffer, blocks of 16 MiB, preallocated file: what the disk gives one writer
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import datastates

GIB = 2**30
BLOCK_BYTES = 16 * 2**20
NUM_TENSORS = 20
BASELINE = "torch.save"
FILE = "state.pt"


@dataclass(frozen=True)
class Sample:
    """Times of one save, from its begin, in seconds; None where the method has no such moment."""

    blocked_seconds: float | None
    staged_seconds: float | None
    durable_seconds: float


@dataclass
class Row:
    """All samples of one method."""

    method: str
    samples: list[Sample] = field(default_factory=list)

    def values(self, name: str) -> list[float]:
        return [value for sample in self.samples if (value := getattr(sample, name)) is not None]


Method = Callable[[Path], Sample]


def make_state(nbytes: int) -> dict[str, torch.Tensor]:
    """``NUM_TENSORS`` float32 tensors of ``nbytes`` together, of random bytes, so that nothing can be compressed."""
    count = nbytes // NUM_TENSORS // 4
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{index}.weight": torch.rand(count, generator=generator) for index in range(NUM_TENSORS)}


def torch_save(state: dict[str, torch.Tensor]) -> Method:
    def save(path: Path) -> Sample:
        begin = time.perf_counter()
        torch.save(state, path)
        _fsync(path)
        _fsync(path.parent)
        end = time.perf_counter()
        return Sample(end - begin, None, end - begin)

    return save


def lazy_save(state: dict[str, torch.Tensor], engine: datastates.CheckpointEngine) -> Method:
    def save(path: Path) -> Sample:
        begin = time.perf_counter()
        engine.save(state, str(path))
        blocked = time.perf_counter()
        engine.wait()
        staged = time.perf_counter()
        engine.wait(persist=True)
        durable = time.perf_counter()
        return Sample(blocked - begin, staged - begin, durable - begin)

    return save


def raw_write(nbytes: int) -> Method:
    """Whole blocks, then cut to ``nbytes``. The buffer is a mapping, so it is page-aligned."""
    buffer = mmap.mmap(-1, BLOCK_BYTES)
    for begin in range(0, BLOCK_BYTES, mmap.PAGESIZE):
        buffer[begin : begin + mmap.PAGESIZE] = os.urandom(mmap.PAGESIZE)

    def save(path: Path) -> Sample:
        begin = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            for offset in range(0, nbytes, BLOCK_BYTES):
                written = os.pwrite(descriptor, buffer, offset)
                if written != BLOCK_BYTES:
                    raise OSError(f"{path}: wrote {written} bytes at {offset}, expected {BLOCK_BYTES}")
            os.ftruncate(descriptor, nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _fsync(path.parent)
        return Sample(None, None, time.perf_counter() - begin)

    return save


def measure(methods: dict[str, Method], folder: Path, repeat: int) -> list[Row]:
    """One warm-up round, then ``repeat`` rounds of all methods in turns."""
    rows = {name: Row(name) for name in methods}
    names = list(methods)
    for turn in range(repeat + 1):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            path = folder / FILE  # one name for all: where a file lies on the disk makes a difference of a third
            path.unlink(missing_ok=True)
            os.sync()  # also what was written and deleted before is settled, so that no method pays for another
            sample = methods[name](path)
            if turn > 0:
                rows[name].samples.append(sample)
            print(
                f"  {'warm-up' if turn == 0 else f'round {turn}'}: {name} {sample.durable_seconds:.2f} s",
                file=sys.stderr,
            )
    return list(rows.values())


def check_saved(path: Path, state: dict[str, torch.Tensor]) -> None:
    """The measured file is an ordinary torch.save file with exactly the state."""
    loaded = torch.load(path, mmap=True, weights_only=True)
    if list(loaded) != list(state) or not all(torch.equal(loaded[name], state[name]) for name in state):
        raise SystemExit(f"{path}: what torch.load reads is not the state that was saved")


def table(rows: list[Row], nbytes: int) -> str:
    """Markdown: medians with minimum and maximum, and ratios to torch.save."""
    heads = [
        "method",
        "blocked, s",
        "staged, s",
        "durable, s",
        "durable, GiB/s",
        "blocked / torch.save",
        "speed / torch.save",
    ]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    base = next((row for row in rows if row.method == BASELINE), None)
    for row in rows:
        durable = row.values("durable_seconds")
        cells = [row.method, *(_spread(row.values(f"{name}_seconds")) for name in ("blocked", "staged", "durable"))]
        cells.append(f"{nbytes / GIB / statistics.median(durable):.2f}")
        cells += [_share(row, base, "blocked_seconds"), _gain(row, base)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def _share(row: Row, base: Row | None, name: str) -> str:
    if base is None or not row.values(name):
        return ""
    return f"1/{statistics.median(base.values(name)) / statistics.median(row.values(name)):.3g}"


def _gain(row: Row, base: Row | None) -> str:
    if base is None:
        return ""
    name = "durable_seconds"
    return f"{statistics.median(base.values(name)) / statistics.median(row.values(name)):.2f} x"


def file_system(folder: Path) -> tuple[str, str]:
    """Type and source of the file system that holds a folder. Source: proc_pid_mountinfo(5)."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text("utf-8").splitlines():
        fields = line.split()
        if fields[2] == wanted:
            kind, source = fields[fields.index("-") + 1 :][:2]
            return kind, source
    return "unknown", wanted


def machine(folder: Path) -> dict[str, object]:
    kind, source = file_system(folder)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "file_system": kind,
        "device": source,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "datastates": datastates.__version__,
    }


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="datastates against torch.save: time blocked, time to durable")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state in GiB (default: 1)")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write; made if missing; no tmpfs")
    parser.add_argument("--repeat", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--host-cache-size", type=float, help="gigabytes (default: as large as the state, at least 1)")
    parser.add_argument("--json", type=Path, help="also write all samples to this file")
    options = parser.parse_args(arguments)
    if options.gib <= 0 or options.repeat < 1:
        parser.error(f"--gib {options.gib} and --repeat {options.repeat} must be more than zero")
    options.dir.mkdir(parents=True, exist_ok=True)
    kind, _ = file_system(options.dir)
    if kind in ("tmpfs", "ramfs"):
        parser.error(f"{options.dir} is on a {kind}: nothing is durable there; name a folder on a disk with --dir")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    nbytes = int(options.gib * GIB) // (4 * NUM_TENSORS) * (4 * NUM_TENSORS)
    state = make_state(nbytes)
    cache = options.host_cache_size or max(1.0, options.gib)
    print(
        f"{nbytes / GIB:.2f} GiB in {NUM_TENSORS} tensors, host cache {cache:g} GB, in {options.dir}", file=sys.stderr
    )
    engine = datastates.CheckpointEngine({"host_cache_size": cache}, rank=0)
    methods = {BASELINE: torch_save(state), "datastates": lazy_save(state, engine), "raw O_DIRECT": raw_write(nbytes)}
    try:
        rows = measure(methods, options.dir, options.repeat)
        methods["datastates"](options.dir / FILE)
        check_saved(options.dir / FILE, state)
    finally:
        engine.close()
        (options.dir / FILE).unlink(missing_ok=True)
    about = machine(options.dir)
    print(table(rows, nbytes))
    print(f"\n{nbytes / GIB:.2f} GiB in {NUM_TENSORS} tensors, {options.repeat} rounds, median (minimum to maximum).")
    print("; ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items()))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": about, "nbytes": nbytes, "host_cache_size": cache, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
