"""The demo's picture: what trained, copied and wrote at the same time, one lane per kind and rank."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from demo_report import Record, Run, checkpoints, format_seconds
from matplotlib.axes import Axes
from matplotlib.patches import Patch

KINDS = {  # event: words of its lane, colour (Okabe and Ito's palette, told apart by the colour-blind, too)
    "step": ("training step", "#56B4E9"),
    "save_checkpoint": ("save_checkpoint", "#D55E00"),
    "fence": ("fence: step held back", "#CC79A7"),
    "stage": ("copy to host cache", "#E69F00"),
    "flush": ("flush to disk", "#009E73"),
}
DURABLE = "#000000"


def draw(runs: Sequence[Run], path: str) -> None:
    """Write a PNG: a row per run; at the left the whole run, at the right one save, magnified."""
    heights = [0.9 + 0.42 * len(_lanes(run)) for run in runs]
    figure, axes = plt.subplots(
        len(runs),
        2,
        figsize=(17, 1.5 + sum(heights)),
        width_ratios=(1, 1),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    windows = [_window(run) for run in runs]
    width = max(end - begin for begin, end, _ in windows)  # one scale for all runs
    for run, (begin, _, step), (whole, magnified) in zip(runs, windows, axes, strict=True):
        origin = min(float(record["begin"]) for record in run.metrics if record["event"] == "step")
        _draw_lanes(whole, run, origin, None)
        whole.set_title(f"{run.engine}: the whole run", loc="left", fontweight="bold")
        _draw_lanes(magnified, run, origin, (begin - origin, begin - origin + width))
        row = next(row for row in checkpoints(run) if row.step == step)
        magnified.set_title(
            f"the save at step {row.step}: blocked {format_seconds(row.blocked_seconds)}, next step held back "
            f"{format_seconds(row.stall_seconds)}, durable after {format_seconds(row.durable_seconds)}",
            loc="left",
            fontsize=10,
        )
    longest = max(whole.get_xlim()[1] for whole, _ in axes)
    for whole, _ in axes:
        whole.set_xlim(-0.01 * longest, longest)
    for axis in axes[-1]:
        axis.set_xlabel("seconds since the first step")
    handles = [Patch(color=colour, label=label) for label, colour in KINDS.values()]
    handles.append(plt.Line2D([], [], color=DURABLE, linestyle="--", label="checkpoint durable"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _window(run: Run) -> tuple[float, float, int]:
    """Begin and end of the part to magnify, the second save (the first one warms up) and a margin, and its step."""
    saves = [record for record in run.metrics if record["event"] == "save_checkpoint"]
    steps = sorted({int(record["step"]) for record in saves})
    step = steps[min(1, len(steps) - 1)]
    begin = min(float(record["begin"]) for record in saves if record["step"] == step)
    end = max([*(float(record["end"]) for record in saves if record["step"] == step), run.durable.get(step, begin)])
    return begin - 0.1 * (end - begin), end + 0.4 * (end - begin), step


def _records(run: Run) -> list[Record]:
    return [*run.metrics, *(event for event in run.events if event["event"] in ("fence", "stage", "flush"))]


def _lanes(run: Run) -> list[tuple[str, int]]:
    """Kind and rank of each lane, from the top down."""
    ranks = sorted({int(record["rank"]) for record in run.metrics})
    present = {record["event"] for record in _records(run)}
    return [(kind, rank) for kind in KINDS if kind in present for rank in ranks]


def _draw_lanes(axis: Axes, run: Run, origin: float, window: tuple[float, float] | None) -> None:
    records, lanes = _records(run), _lanes(run)
    for position, (kind, rank) in enumerate(lanes):
        spans = [
            (float(record["begin"]) - origin, float(record["end"]) - float(record["begin"]), int(record.get("step", 0)))
            for record in records
            if record["event"] == kind and record["rank"] == rank
        ]
        bars = [(begin, length) for begin, length, _ in spans]
        # White lines part long bars; a bar of a millisecond would vanish between them, and needs an edge to be seen.
        edge = "white" if kind == "step" or (window and kind in ("stage", "flush")) else KINDS[kind][1]
        axis.broken_barh(
            bars,
            (position - 0.4, 0.8),
            facecolor=KINDS[kind][1],
            edgecolor=edge,
            linewidth=0.3 if edge == "white" else 0.7,
        )
        if kind == "step":
            _number_steps(axis, position, spans, window)
    for moment in run.durable.values():
        axis.axvline(moment - origin, color=DURABLE, linestyle="--", linewidth=1)
    axis.set_yticks(range(len(lanes)), [f"{KINDS[kind][0]}, rank {rank}" for kind, rank in lanes])
    axis.set_ylim(len(lanes) - 0.4, -0.6)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.5)
    axis.set_axisbelow(True)
    if window:
        axis.set_xlim(window)
        axis.tick_params(labelleft=False)


def _number_steps(
    axis: Axes, position: int, spans: Sequence[tuple[float, float, int]], window: tuple[float, float] | None
) -> None:
    """Write the step's number into the visible part of each bar, or of every fifth where there are many."""
    first, last = window or (-float("inf"), float("inf"))
    every = 1 if window or len(spans) <= 30 else 5
    for begin, length, step in spans:
        left, right = max(begin, first), min(begin + length, last)
        if left < right and step % every == 0:
            axis.text((left + right) / 2, position, str(step), ha="center", va="center", fontsize=7)
