"""Every way to save a state, side by side on this machine: tables, plots, and all samples.

    python benchmarks/report.py --dir build/bench            some 12 minutes; what `make bench` runs
    python benchmarks/report.py --dir build/bench --quick    tiny sizes, a minute: that it runs, not figures
    python benchmarks/report.py --draw build/bench/report.json

Every measurement runs in a process of its own (`worker.py`), in turns: in each round all ways once, beginning with
another one each time. The folder must be on a real disk. Writes ``report.json``, ``report.md`` and the plots there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpointers
import plots
import ranks
import save as saving
import tables

HERE = Path(__file__).resolve().parent
MIB, GIB = 2**20, 2**30
TIMEOUT_SECONDS = 240
TRAINING_WAYS = ["none", "torch.save", "clone + thread", "DCP async", "datastates"]
Samples = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Sizes:
    """How much is measured; all in bytes, numbers and seconds."""

    rounds: int = 3
    state_nbytes: int = GIB
    small_tensors: int = 20_000
    saves: int = 2
    pass_seconds: float = 1.0
    steps: int = 6
    layers: int = 8
    width: int = 512
    vocabulary: int = 8192
    idle_nbytes: int = 512 * MIB
    idle_seconds: float = 0.5
    memory_nbytes: int = 2560 * MIB
    memory_cache: int = 256 * MIB
    growth_nbytes: tuple[int, ...] = (64 * MIB, 256 * MIB, GIB, 2 * GIB)
    growth_tensors: tuple[int, ...] = (100, 1000, 10_000, 50_000)
    real_ranks: tuple[int, ...] = (1, 2, 4)
    simulated_ranks: tuple[int, ...] = (10, 100, 1000, 10_000)


QUICK = Sizes(
    rounds=1,
    state_nbytes=32 * MIB,
    small_tensors=500,
    saves=1,
    pass_seconds=0.1,
    steps=2,
    layers=1,
    width=64,
    vocabulary=256,
    idle_nbytes=16 * MIB,
    idle_seconds=0.1,
    memory_nbytes=128 * MIB,
    memory_cache=16 * MIB,
    growth_nbytes=(4 * MIB, 16 * MIB),
    growth_tensors=(10, 100),
    real_ranks=(1, 2),
    simulated_ranks=(10, 100),
)


class Bench:
    """Runs measurements in processes, one at a time."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self._folder = folder / "states"
        self._sizes = sizes
        self.missing: dict[str, str] = {}

    def in_turns(self, title: str, case: str, ways: list[str], given: dict[str, Any], rounds: int) -> Samples:
        """All ways once in each round; a way that fails is left out of the later rounds, and named."""
        samples: Samples = {way: [] for way in ways}
        for turn in range(rounds):
            first = turn % len(ways)
            for way in [*ways[first:], *ways[:first]]:
                if f"{title}: {way}" in self.missing or way in self.missing:
                    continue
                begin = time.monotonic()
                found = self.run(title, case, way, given)
                if found is not None:
                    samples[way].append(found)
                print(
                    f"  {title}, round {turn + 1}: {way} {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True
                )
        return {way: found for way, found in samples.items() if found}

    def run(self, title: str, case: str, way: str, given: dict[str, Any]) -> dict[str, Any] | None:
        """One measurement. None where the way is missing here or fails, which is noted in `missing`."""
        with _worker(case, way, {**given, "dir": str(self._folder)}) as process:
            output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        lines = output.strip().splitlines()
        if process.returncode != 0 or not lines:
            self.missing[f"{title}: {way}"] = (errors.strip().splitlines() or ["died without a word"])[-1][:200]
            return None
        found: dict[str, Any] = json.loads(lines[-1])
        if "missing" in found:
            self.missing[way] = found["missing"]
            return None
        return found

    def memory(self, way: str) -> dict[str, Any] | None:
        """Memory of the process tree over time while a state larger than the cache is saved twice."""
        given = {
            "nbytes": self._sizes.memory_nbytes,
            "cache_bytes": self._sizes.memory_cache,
            "rest_seconds": 0.3,
            "saves": 2,
            "dir": str(self._folder),
        }
        with _worker("memory", way, given) as process:
            assert process.stdout is not None
            head = process.stdout.readline()
            if not head or "ready" not in json.loads(head):
                self.missing[f"memory: {way}"] = head.strip() or "died"
                process.communicate()
                return None
            series: list[tuple[float, int]] = []
            done = threading.Event()
            sampler = threading.Thread(target=_sample, args=(process.pid, series, done))
            sampler.start()
            try:
                output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
            finally:
                done.set()
                sampler.join()
        if process.returncode != 0:
            self.missing[f"memory: {way}"] = f"exit status {process.returncode}"
            return None
        found = json.loads(output.strip().splitlines()[-1])
        begin, base = json.loads(head)["ready"], series[0][1]
        last = found["windows"][-1][1]  # what the process gives back at its end is not of interest
        found["series"] = [(at - begin, nbytes - base) for at, nbytes in series if at <= last]
        found["peak"] = max(nbytes for _, nbytes in found["series"])
        found["cache_bytes"] = self._sizes.memory_cache
        return found


def _worker(case: str, way: str, given: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "worker.py"), case, way, json.dumps(given)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _sample(pid: int, series: list[tuple[float, int]], done: threading.Event) -> None:
    while not done.is_set():
        series.append((time.monotonic(), _tree_nbytes(pid)))
        done.wait(0.02)


def _tree_nbytes(pid: int) -> int:
    """Memory of a process and its children that is theirs or shared among them; page cache is not counted.

    Shared memory of a memfd is in the resident set of each that maps it: counted once, by its largest user.
    Source: proc_pid_status(5), RssAnon and RssShmem.
    """
    pids, anonymous, shared = [pid], 0, 0
    for found in pids:
        try:
            for task in Path(f"/proc/{found}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text("ascii").split()]
            status = Path(f"/proc/{found}/status").read_text("utf-8")
        except OSError:
            continue  # it has ended meanwhile
        sizes = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Rss")}
        anonymous += int(sizes.get("RssAnon", 0)) * 1024
        shared = max(shared, int(sizes.get("RssShmem", 0)) * 1024)
    return anonymous + shared


def measure(folder: Path, sizes: Sizes, ways: list[str]) -> dict[str, Any]:
    """Everything that concerns some ways, as one dictionary of plain data."""
    bench = Bench(folder, sizes)
    stepping = [way for way in TRAINING_WAYS if way in ("none", *ways)]
    state = {"nbytes": sizes.state_nbytes, "saves": sizes.saves, "pass_seconds": sizes.pass_seconds}
    state["cache_bytes"] = max(sizes.state_nbytes, 64 * MIB)
    model = {"layers": sizes.layers, "width": sizes.width, "vocabulary": sizes.vocabulary}
    steps = {"steps": sizes.steps, "cache_bytes": GIB}
    idle = {**steps, "nbytes": sizes.idle_nbytes, "step_seconds": sizes.idle_seconds}
    found: dict[str, Any] = {"machine": saving.machine(folder), "rounds": sizes.rounds}
    found["big"] = bench.in_turns("few large tensors", "state", ways, {**state, "num_tensors": 16}, sizes.rounds)
    small = {**state, "num_tensors": sizes.small_tensors}
    found["small"] = bench.in_turns("many small tensors", "state", ways, small, 1)
    found["limit"] = _limit(folder, sizes)
    found["training"] = bench.in_turns("training", "training", stepping, {**model, **steps}, sizes.rounds)
    found["idle"] = bench.in_turns("idle host", "idle", stepping, idle, sizes.rounds)
    found["memory"] = {way: bench.memory(way) for way in stepping if way != "none"}
    found["growth"] = _growth(bench, sizes)
    found["ranks"] = ranks.measure(folder / "states", list(sizes.real_ranks), list(sizes.simulated_ranks))
    found["notes"] = {way: kind.note for way, kind in checkpointers.ALL.items()}
    found["missing"] = bench.missing
    return found


def _limit(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """What the disk gives one writer with direct I/O, in the same run."""
    method = saving.raw_write(sizes.state_nbytes)
    path = folder / "states" / "raw"
    seconds = []
    for _ in range(sizes.rounds + 1):
        path.unlink(missing_ok=True)
        seconds.append(method(path).durable_seconds)
    path.unlink()
    return {"nbytes": sizes.state_nbytes, "durable": seconds[1:]}


def _growth(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    """By bytes, and by number of tensors, for the blocking way and ours."""
    grown: dict[str, Any] = {"bytes": [], "tensors": []}
    for nbytes in sizes.growth_nbytes:
        grown["bytes"].append(_grown(bench, {"nbytes": nbytes, "num_tensors": 16}, sizes))
    for count in sizes.growth_tensors:
        grown["tensors"].append(_grown(bench, {"nbytes": 64 * MIB, "num_tensors": count}, sizes))
    return grown


def _grown(bench: Bench, given: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    case = {**given, "saves": 2 * sizes.saves, "pass_seconds": min(sizes.pass_seconds, 0.5), "cache_bytes": GIB}
    samples = bench.in_turns(f"growth to {given}", "state", ["torch.save", "datastates"], case, 1)
    return {**given, "samples": samples}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="all ways to save a state, side by side")
    parser.add_argument(
        "--dir", type=Path, default=Path("build/bench"), help="where to write; made if missing; no tmpfs"
    )
    parser.add_argument(
        "--ways", default=",".join(checkpointers.ALL), help="separated by commas (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: that it runs, not figures")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only tables and plots, from an earlier run")
    options = parser.parse_args(arguments)
    if options.draw:
        folder, found = options.draw.parent, json.loads(options.draw.read_text("utf-8"))
    else:
        folder = options.dir
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "states").mkdir(exist_ok=True)
        kind, _ = saving.file_system(folder)
        if kind in ("tmpfs", "ramfs"):
            parser.error(f"{folder} is on a {kind}: nothing is durable there; name a folder on a disk with --dir")
        begin = time.monotonic()
        ways = [way for way in checkpointers.ALL if way in options.ways.split(",")]
        if not ways:
            parser.error(f"--ways {options.ways}: none of {', '.join(checkpointers.ALL)}")
        found = measure(folder, QUICK if options.quick else Sizes(), ways)
        found["seconds"] = time.monotonic() - begin
        (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(tables.write(found), encoding="utf-8")
    plots.draw(found, folder)
    print(tables.write(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
