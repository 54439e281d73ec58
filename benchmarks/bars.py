"""The bars that this project holds itself to, each with what was reached on this machine.

    python benchmarks/bars.py --dir build/bench                 some 30 minutes; prints a table, writes bars.json
    python benchmarks/bars.py --dir build/bench --only 2,5      some of them
    python benchmarks/bars.py --dir build/bench --quick         tiny sizes: that it runs, not figures

What is compared runs in turns, each measurement in a process of its own (`worker.py`): in each round all ways once,
beginning with another one each time. Medians over the rounds; fsync is inside all times; the folder must be on a disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loop
import plan
import report
import save as saving
import spare
import steady
from tables import blocked, step_seconds, values

GIB, MIB = 2**30, 2**20
OURS, BLOCKING, ASYNC, RAW = "datastates", "torch.save", "DCP async", "raw O_DIRECT"
WAYS = [BLOCKING, ASYNC, OURS]
median = statistics.median


@dataclass(frozen=True)
class Sizes:
    """How much is measured; bytes, numbers and seconds."""

    rounds: int = 5
    states: tuple[int, ...] = (GIB, 4 * GIB, 8 * GIB)
    pass_seconds_per_gib: float = 0.7
    idle: tuple[int, float, int] = (512 * MIB, 0.5, 20)  # bytes per step, seconds of a step, steps
    full: tuple[int, float, int] = (2 * GIB, 0.5, 4)  # more than the disk takes in a step
    model: tuple[int, int, int] = (12, 768, 25_152)  # layers, width, vocabulary: 124 million parameters
    tokens: tuple[int, int] = (1, 256)
    steps: int = 4
    durable: int = GIB
    small_tensors: int = 20_000
    memory: tuple[int, int] = (2560 * MIB, 256 * MIB)  # state, cache
    plans: tuple[int, ...] = (20_000, 1_000_000)
    loop_seconds: float = 1.5
    saves: int = 200


QUICK = Sizes(
    rounds=1,
    states=(16 * MIB,),
    idle=(4 * MIB, 0.05, 2),
    full=(16 * MIB, 0.01, 2),
    model=(1, 64, 256),
    tokens=(1, 16),
    steps=2,
    durable=16 * MIB,
    small_tensors=200,
    memory=(128 * MIB, 16 * MIB),
    plans=(400,),
    loop_seconds=0.1,
    saves=steady.WARM_UP + 2 * steady.WINDOW + 1,
)


@dataclass(frozen=True)
class Row:
    """One line of the table; ``is_reached`` None where the bar is no number."""

    bar: str
    what: str
    wanted: str
    reached: str
    is_reached: bool | None

    def line(self) -> str:
        word = {True: "yes", False: "**no**", None: ""}[self.is_reached]
        return f"| {self.bar} | {self.what} | {self.wanted} | {self.reached} | {word} |"


class Bars:
    """Measures bar by bar; all samples are in `found`."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self._folder, self._sizes = folder, sizes
        self._bench = report.Bench(folder, report.Sizes(memory_nbytes=sizes.memory[0], memory_cache=sizes.memory[1]))
        self.found: dict[str, Any] = {"machine": saving.machine(folder), "missing": self._bench.missing}

    def _in_turns(self, title: str, case: str, ways: list[str], given: dict[str, Any]) -> report.Samples:
        samples = self._bench.in_turns(title, case, ways, given, self._sizes.rounds)
        self.found[title] = samples
        if lost := [way for way in ways if way not in samples]:
            raise SystemExit(f"{title}: {', '.join(lost)} failed: {self._bench.missing}")
        return samples

    def blocked(self) -> list[Row]:
        """Bar 1."""
        rows = []
        for nbytes in self._sizes.states:
            given = {"nbytes": nbytes, "num_tensors": 32, "saves": 1, "cache_bytes": nbytes, "only_blocked": True}
            given["pass_seconds"] = self._sizes.pass_seconds_per_gib * nbytes / GIB
            title = f"{nbytes / GIB:g} GiB, blocked"
            seconds = {
                way: median(blocked(found)) for way, found in self._in_turns(title, "state", WAYS, given).items()
            }
            for way, wanted in ((BLOCKING, 100), (ASYNC, 10)):
                share = seconds[way] / seconds[OURS]
                reached = f"{share:,.0f} x ({1e3 * seconds[way]:.0f} to {1e3 * seconds[OURS]:.2f} ms)"
                rows.append(Row("1", f"{title}, less than {way}", f"{wanted} x", reached, share >= wanted))
        return rows

    def idle(self) -> list[Row]:
        """Bar 2, a step that leaves the host idle."""
        nbytes, seconds, steps = self._sizes.idle
        given = {"nbytes": nbytes, "step_seconds": seconds, "steps": steps, "cache_bytes": 2 * nbytes}
        fits = self._in_turns("idle host, bytes fit the disk's time", "idle", ["none", OURS], given)
        share = _per_step(fits[OURS]) / _per_step(fits["none"])
        what = f"idle host, {nbytes / GIB:g} GiB at each step of {seconds:g} s"
        rows = [Row("2", what, "1.03 x", f"{share:.3f} x of no saves", share <= 1.03)]
        nbytes, seconds, steps = self._sizes.full
        given = {"nbytes": nbytes, "step_seconds": seconds, "steps": steps, "cache_bytes": nbytes}
        full = self._in_turns("idle host, more than the disk takes", "idle", ["none", OURS], given)
        raw = self._in_turns("idle host, the disk", "state", [RAW], _durable(nbytes, 16))
        limit = max(_per_step(full["none"]), median(values(raw[RAW], "durable")))
        share = _per_step(full[OURS]) / limit
        what = f"idle host, {nbytes / GIB:g} GiB at each step of {seconds:g} s"
        return [*rows, Row("2", what, "1.05 x", f"{share:.3f} x of max(compute, bytes / disk)", share <= 1.05)]

    def training(self) -> list[Row]:
        """Bar 2, training on the cores that the save needs, too; and bar 1 beside it."""
        layers, width, vocabulary = self._sizes.model
        given = {"layers": layers, "width": width, "vocabulary": vocabulary, "tokens": self._sizes.tokens}
        given |= {"steps": self._sizes.steps, "cache_bytes": 2 * GIB}
        found = self._in_turns("training", "training", ["none", *WAYS], given)
        share = {way: _per_step(samples) / _per_step(found["none"]) for way, samples in found.items()}
        others = ", ".join(f"{way} {share[way]:.2f}" for way in (BLOCKING, ASYNC))
        what = f"training on all cores, {found[OURS][0]['nbytes'] / GIB:.2f} GiB at each step"
        what += f" of {_per_step(found['none']):.2f} s"
        rows = [Row("2", what, "1.15 x", f"{share[OURS]:.3f} x of no saves ({others})", share[OURS] <= 1.15)]
        waits = {way: median(_waits(samples)) for way, samples in found.items() if way != "none"}
        less = waits[BLOCKING] / waits[OURS]
        reached = f"{less:,.0f} x ({1e3 * waits[BLOCKING]:.0f} to {1e3 * waits[OURS]:.2f} ms)"
        return [*rows, Row("1", f"the same training, blocked, less than {BLOCKING}", "100 x", reached, less >= 100)]

    def durable(self) -> list[Row]:
        """Bar 3."""
        rows = []
        nbytes = self._sizes.durable
        for count, kind, wanted in ((16, "large", 0.95), (self._sizes.small_tensors, "small", 0.85)):
            title = f"{nbytes / GIB:g} GiB in {count:,} {kind} tensors, durable"
            found = self._in_turns(title, "state", [RAW, OURS], _durable(nbytes, count))
            rate = {way: nbytes / median(values(samples, "durable")) for way, samples in found.items()}
            share = rate[OURS] / rate[RAW]
            reached = f"{100 * share:.0f} % ({rate[OURS] / 1e9:.2f} of {rate[RAW] / 1e9:.2f} GB/s)"
            rows.append(Row("3", f"{title}, of one raw writer", f"{100 * wanted:.0f} %", reached, share >= wanted))
        self.found["spare"] = found = spare.measure(self._folder / "states", nbytes, self._sizes.rounds)
        new, rewritten = (nbytes / median(found[name]) for name in ("new", "rewritten"))
        reached = f"{100 * (rewritten / new - 1):.0f} % ({new / 1e9:.2f} to {rewritten / 1e9:.2f} GB/s)"
        return [
            *rows,
            Row("3", "files of retired checkpoints rewritten", "25 to 50 % more", reached, rewritten >= 1.25 * new),
        ]

    def memory(self) -> list[Row]:
        """Bar 4."""
        found = self._bench.memory(OURS)
        if found is None:
            raise SystemExit(f"memory: failed: {self._bench.missing}")
        self.found["memory"] = found
        cache = self._sizes.memory[1]
        beyond = (found["peak"] - cache) / MIB
        what = f"{found['nbytes'] / MIB:.0f} MiB of state, cache of {cache / MIB:.0f} MiB: memory beyond the cache"
        return [Row("4", what, "64 MiB", f"{beyond:.0f} MiB", beyond <= 64)]

    def planning(self) -> list[Row]:
        """Bar 5."""
        found = [plan.measure(count, str(self._folder), 3 if count < 10**6 else 1) for count in self._sizes.plans]
        self.found["planning"] = found
        rows = []
        for row in found:
            for name, wanted in (("first", 150), ("known", 50)):
                what = f"save() of {row['tensors']:,} small tensors, {name}"
                is_held = row["tensors"] <= 20_000
                wanted_ms = f"{wanted} ms" if is_held else "works"
                rows.append(Row("5", what, wanted_ms, f"{row[name]:,.0f} ms", row[name] <= wanted if is_held else None))
        return rows

    def looping(self) -> list[Row]:
        """Bar 6."""
        turns = loop.measure("many", str(self._folder), self._sizes.rounds, self._sizes.loop_seconds, 1.5)
        self.found["loop"] = [vars(turn) for turn in turns]
        share = median(turn.slowdown for turn in turns)
        call, durable = (1e3 * median(getattr(turn, name) for turn in turns) for name in ("call", "durable"))
        what = "a loop of pure Python beside a save of 10,000 tensors"
        reached = f"{100 * share:.1f} % (of {durable:.0f} ms until durable, the call {call:.0f})"
        return [Row("6", what, "3 %", reached, share <= 0.03)]

    def steady(self) -> list[Row]:
        """Bar 7."""
        rows = self.found["steady"] = steady.run(self._folder / "states" / "steady", self._sizes.saves)
        first, last = rows[steady.WARM_UP :][: steady.WINDOW], rows[-steady.WINDOW :]
        pairs = {name: [median(row[name] for row in part) for part in (first, last)] for name in rows[0]}
        shown = {"blocked, ms", "committed, ms", "trainer: memory, MiB", "flusher: memory, MiB"}
        parts = ", ".join(f"{name} {a:.1f} to {b:.1f}" for name, (a, b) in pairs.items() if name in shown)
        is_flat = all(b <= 1.1 * a + 1 for a, b in pairs.values())
        return [Row("7", f"{len(rows)} saves, the last {steady.WINDOW} like the first", "alike", parts, is_flat)]


def _durable(nbytes: int, count: int) -> dict[str, Any]:
    return {"nbytes": nbytes, "num_tensors": count, "saves": 3, "cache_bytes": nbytes, "only_durable": True}


def _per_step(samples: list[dict[str, Any]]) -> float:
    return median(step_seconds(samples))


def _waits(samples: list[dict[str, Any]]) -> list[float]:
    """Seconds that each save kept the training waiting: its call, and the stall before the optimizer's step."""
    return [step["call"] + step["stall"] for sample in samples for step in sample["steps"]]


GROUPS: dict[str, list[Callable[[Bars], list[Row]]]] = {
    "1": [Bars.blocked],
    "2": [Bars.idle, Bars.training],
    "3": [Bars.durable],
    "4": [Bars.memory],
    "5": [Bars.planning],
    "6": [Bars.looping],
    "7": [Bars.steady],
}


def run(folder: Path, sizes: Sizes, wanted: list[str]) -> tuple[list[Row], dict[str, Any]]:
    (folder / "states").mkdir(parents=True, exist_ok=True)
    bars = Bars(folder, sizes)
    rows = []
    for number in wanted:
        for measure in GROUPS[number]:
            begin = time.monotonic()
            rows += measure(bars)
            print(f"bar {number}: {measure.__name__}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return sorted(rows, key=lambda row: row.bar), bars.found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="the project's bars, and what this machine reaches")
    parser.add_argument("--dir", type=Path, default=Path("build/bench"), help="a folder on a disk; made if missing")
    parser.add_argument("--only", default=",".join(GROUPS), help="bars, separated by commas (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: that it runs, not figures")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := [number for number in wanted if number not in GROUPS]:
        parser.error(f"--only {options.only}: no bar {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    options.dir.mkdir(parents=True, exist_ok=True)
    kind, _ = saving.file_system(options.dir)
    if kind in ("tmpfs", "ramfs"):
        parser.error(f"{options.dir} is on a {kind}: nothing is durable there; name a folder on a disk with --dir")
    rows, found = run(options.dir, QUICK if options.quick else Sizes(), wanted)
    (options.dir / "bars.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("| bar | what | wanted | reached | met |\n|---|---|---|---|---|")
    print("\n".join(row.line() for row in rows))
    print("\n" + "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in found["machine"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
