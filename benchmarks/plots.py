"""The plots of a report, as SVG files."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from tables import blocked, values

GIB, MIB = 2**30, 2**20
OURS, OTHERS = "#c44e52", "#8c9bb0"
PARTS = {"compute": "#8c9bb0", "stall": "#dd8452", "behind": "#937860", "call": "#c44e52"}


def draw(found: dict[str, Any], folder: Path) -> None:
    """All plots that the report has samples for, beside each other in ``folder``."""
    plt.rcParams["svg.hashsalt"] = "datastates"  # the same samples make the same file
    for name, plot in _PLOTS.items():
        figure = plot(found)
        if figure is not None:
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


def _bars(ways: dict[str, float], title: str, label: str, *, log: bool) -> Any:
    figure, axes = plt.subplots(figsize=(7, 0.45 * len(ways) + 1.2), layout="constrained")
    names = sorted(ways, key=lambda way: -ways[way])
    bars = axes.barh(
        names, [ways[name] for name in names], color=[OURS if n == "datastates" else OTHERS for n in names]
    )
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.set(title=title, xlabel=label)
    if log:
        axes.set_xscale("log")
    axes.margins(x=0.15)
    return figure


def _blocked(found: dict[str, Any]) -> Any:
    if not found["big"]:
        return None
    ways = {
        f"{way}{_torn(samples)}": 1e3 * statistics.median(blocked(samples)) for way, samples in found["big"].items()
    }
    return _bars(ways, "How long a save keeps the training waiting", "milliseconds, logarithmic", log=True)


def _torn(samples: list[dict[str, Any]]) -> str:
    return " (torn)" if sum(values(samples, "torn")) else ""


def _bandwidth(found: dict[str, Any]) -> Any:
    if not found["big"]:
        return None
    ways = {
        way: samples[0]["nbytes"] / GIB / statistics.median(values(samples, "durable"))
        for way, samples in found["big"].items()
    }
    figure = _bars(ways, "Durable bytes per second", "GiB/s", log=False)
    limit = found["limit"]["nbytes"] / GIB / statistics.median(found["limit"]["durable"])
    figure.axes[0].axvline(limit, color="black", linestyle="--", label="raw O_DIRECT, one writer")
    figure.axes[0].legend(loc="lower right")
    return figure


def _timeline(found: dict[str, Any]) -> Any:
    ways = found["training"]
    if not ways:
        return None
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(ways) + 1.6), layout="constrained")
    for row, way in enumerate(reversed(list(ways))):
        for step in ways[way][0]["steps"]:
            left = step["begin"]
            for part, color in PARTS.items():
                axes.barh(row, step[part], left=left, color=color, edgecolor="white", linewidth=0.3)
                left += step[part]
    axes.set_yticks(range(len(ways)), list(reversed(list(ways))))
    axes.set(title="Training on the CPU, saved at every step", xlabel="seconds")
    labels = {"compute": "step", "stall": "stall", "behind": "waits for the one before", "call": "save()"}
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in PARTS.values()]
    figure.legend(handles, labels.values(), ncols=4, loc="outside lower center")
    return figure


def _memory(found: dict[str, Any]) -> Any:
    known = {way: one for way, one in found["memory"].items() if one}
    if not known:
        return None
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for way, one in known.items():
        times, sizes = zip(*one["series"], strict=True)
        axes.plot(times, [nbytes / MIB for nbytes in sizes], label=way, color=OURS if way == "datastates" else None)
    one = next(iter(known.values()))
    axes.axhline(one["cache_bytes"] / MIB, color="black", linestyle="--", linewidth=0.8, label="cache")
    title = f"Host memory above the begin: two saves of {one['nbytes'] / MIB:.0f} MiB"
    axes.set(title=title, xlabel="seconds", ylabel="MiB")
    axes.legend()
    return figure


def _growth(found: dict[str, Any]) -> Any:
    figure, (by_bytes, by_tensors, by_ranks) = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for axes, kind, key in ((by_bytes, "bytes", "nbytes"), (by_tensors, "tensors", "num_tensors")):
        for way in ("torch.save", "datastates"):
            points = [point for point in found["growth"][kind] if way in point["samples"]]
            scale = MIB if key == "nbytes" else 1
            steps = [1e3 * statistics.median(blocked(point["samples"][way])) for point in points]
            color = OURS if way == "datastates" else OTHERS
            axes.loglog([point[key] / scale for point in points], steps, "o-", label=way, color=color)
        axes.set(xlabel="MiB" if key == "nbytes" else "tensors (64 MiB)", ylabel="blocked, ms")
        axes.legend()
    simulated = found["ranks"]["simulated"]
    by_ranks.loglog(
        [one["ranks"] for one in simulated],
        [1e3 * (one["read"] + one["commit"]) for one in simulated],
        "o-",
        color=OURS,
    )
    by_ranks.set(xlabel="ranks (simulated)", ylabel="rank 0's commit, ms")
    return figure


_PLOTS = {"blocked": _blocked, "bandwidth": _bandwidth, "timeline": _timeline, "memory": _memory, "growth": _growth}
