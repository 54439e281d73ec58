"""The tables of a report, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

GIB, MIB = 2**30, 2**20


def write(found: dict[str, Any]) -> str:
    """The whole report of `report.measure`."""
    machine = "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in found["machine"].items())
    parts = [
        f"Medians (minimum to maximum) of {found['rounds']} rounds, in turns, fsync inside all times. {machine}.",
        *_states("Few large tensors", found["big"], found["limit"]),
        *_states("Many small tensors", found["small"], None),
        *_steps("Training on the CPU, saved at every step", found["training"]),
        *_steps("A step that leaves the host idle, saved at every step", found["idle"]),
        *_memory(found["memory"]),
        *_growth(found["growth"]),
        *_ranks(found["ranks"]),
        *_missing(found["missing"]),
    ]
    return "\n".join(parts) + "\n"


def values(samples: Sequence[dict[str, Any]], key: str) -> list[float]:
    """All values of a key, whether a sample has one or a list of them."""
    return [value for sample in samples for value in _as_list(sample[key])]


def blocked(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds that each save kept the training waiting: its call, and the stall before the state might change."""
    return [call + stall for call, stall in zip(values(samples, "call"), values(samples, "stall"), strict=True)]


def step_seconds(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds per step with a save, of each run: of all steps but the first, which has no save in flight beside it."""
    parts = ("compute", "stall", "behind", "call")
    return [statistics.mean(sum(step[part] for part in parts) for step in sample["steps"][1:]) for sample in samples]


def _as_list(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _spread(numbers: Sequence[float], scale: float = 1.0) -> str:
    middle, low, high = (scale * value for value in (statistics.median(numbers), min(numbers), max(numbers)))
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _states(title: str, ways: dict[str, Any], limit: dict[str, Any] | None) -> list[str]:
    if not ways:
        return []
    base = ways.get("torch.save")
    nbytes, torn = next(iter(ways.values()))[0]["nbytes"], "torn tensors"
    rows = []
    for way, samples in ways.items():
        share = statistics.median(blocked(base)) / statistics.median(blocked(samples)) if base else float("nan")
        durable = values(samples, "durable")
        rows.append(
            [
                way,
                _spread(blocked(samples), 1e3),
                f"1/{share:.3g}",
                _spread(durable),
                f"{nbytes / GIB / statistics.median(durable):.2f}",
                str(int(sum(values(samples, "torn")))),
            ]
        )
    if limit is not None:
        rate = limit["nbytes"] / GIB / statistics.median(limit["durable"])
        rows.append(["raw O_DIRECT, one writer", "", "", _spread(limit["durable"]), f"{rate:.2f}", ""])
    heads = ["way", "blocked, ms", "of torch.save", "durable, s", "durable, GiB/s", torn]
    return [f"\n### {title}: {nbytes / GIB:.2f} GiB\n", _table(heads, rows)]


def _steps(title: str, ways: dict[str, Any]) -> list[str]:
    if "none" not in ways:
        return []
    nothing = statistics.median(step_seconds(ways["none"]))
    nbytes = ways["none"][0]["nbytes"]
    rows = []
    for way, samples in ways.items():
        steps = [step for sample in samples for step in sample["steps"]]
        seconds = step_seconds(samples)
        cells = [way, _spread(seconds), f"{statistics.median(seconds) / nothing:.3f}"]
        cells += [f"{1e3 * statistics.median(step[key] for step in steps):.1f}" for key in ("call", "stall", "behind")]
        rows.append(cells)
    heads = ["way", "seconds per step", "of no saves", "call, ms", "stall, ms", "waits for the one before, ms"]
    return [f"\n### {title}: {nbytes / GIB:.2f} GiB\n", _table(heads, rows)]


def _memory(ways: dict[str, Any]) -> list[str]:
    known = {way: found for way, found in ways.items() if found}
    if not known:
        return []
    one = next(iter(known.values()))
    title = f"Memory: {one['nbytes'] / MIB:.0f} MiB of state, a cache of {one['cache_bytes'] / MIB:.0f} MiB"
    rows = [[way, f"{found['peak'] / MIB:.0f}"] for way, found in known.items()]
    return [f"\n### {title}\n", _table(["way", "most above the begin, MiB"], rows)]


def _growth(growth: dict[str, Any]) -> list[str]:
    rows = []
    for kind in ("bytes", "tensors"):
        for point in growth[kind]:
            cells = [f"{point['nbytes'] / MIB:.0f}", f"{point['num_tensors']:,}"]
            for way in ("torch.save", "datastates"):
                samples = point["samples"].get(way)
                cells.append(f"{1e3 * statistics.median(blocked(samples)):.2f}" if samples else "")
                cells.append(f"{1e3 * statistics.median(values(samples, 'durable')):.0f}" if samples else "")
            rows.append(cells)
    ways = ("torch.save", "datastates")
    heads = ["MiB", "tensors", *(f"{way} {what}, ms" for way in ways for what in ("blocked", "durable"))]
    return ["\n### Growth\n", _table(heads, rows)]


def _ranks(ranks: dict[str, Any]) -> list[str]:
    real = [[str(one["ranks"]), f"{1e3 * one['blocked']:.1f}", f"{one['committed']:.2f}"] for one in ranks["real"]]
    simulated = [
        [f"{one['ranks']:,}", f"{1e3 * one['read']:.1f}", f"{1e3 * one['commit']:.1f}"] for one in ranks["simulated"]
    ]
    return [
        f"\n### Ranks: {ranks['nbytes'] / MIB:.0f} MiB over all of them, slowest rank\n",
        _table(["ranks", "blocked, ms", "committed, s"], real),
        "\n### Ranks, simulated: what rank 0 does alone when all parts are durable\n",
        _table(["ranks", "manifests read, ms", "files named, record written, ms"], simulated),
    ]


def _missing(missing: dict[str, str]) -> list[str]:
    lines = [f"- {way}: {cause}" for way, cause in missing.items()]
    return ["\nNot measured:\n", *lines] if lines else []
