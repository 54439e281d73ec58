"""What the demo's records say: loss curves compared, a table of checkpoints. Pure: reads records, starts nothing."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Record = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The records of one training run. All times are seconds of this host's monotonic clock.

    Attributes:
        engine: name of the checkpoint engine, as the table shows it.
        metrics: what the training script recorded: ``start``, ``step`` and ``save_checkpoint`` of every rank.
        events: what datastates recorded (see datastates.events); empty for other engines.
        durable: when each checkpoint was durable, by step. A checkpoint that is missing here never was.
        nbytes: size of each checkpoint, by step.
    """

    engine: str
    metrics: Sequence[Record]
    events: Sequence[Record]
    durable: dict[int, float]
    nbytes: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One row of the table. None where there was nothing to measure.

    Attributes:
        blocked_seconds: how long ``save_checkpoint`` took, on the slowest rank.
        stall_seconds: how long the next optimizer step was held back, on the slowest rank.
        busy_step_seconds: median time of the steps that ran while the save was in flight.
        durable_seconds: from the call of ``save_checkpoint`` until the checkpoint was durable.
    """

    engine: str
    step: int
    nbytes: int
    blocked_seconds: float
    stall_seconds: float | None
    busy_step_seconds: float | None
    durable_seconds: float | None


def read_jsonl(path: str) -> list[Record]:
    """The records of a file of JSON lines, none where there is no file.

    A last line without its line feed is left out: its writer was killed, or is still writing it.
    """
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def compare_curves(reference: Iterable[Record], other: Iterable[Record]) -> list[str]:
    """The differences between two loss curves, one sentence each; empty when they are equal to the last bit.

    A step that a curve holds more than once, because a resumed run computed it again, must be equal each time.
    """
    expected = {record["step"]: record["loss"] for record in reference}
    differences, seen = [], set()
    for record in other:
        step, loss = record["step"], record["loss"]
        seen.add(step)
        if step not in expected:
            differences.append(f"step {step}: not in the reference")
        elif loss != expected[step]:
            differences.append(f"step {step}: loss {loss}, the reference has {expected[step]}")
    differences += [f"step {step}: missing" for step in expected if step not in seen]
    return differences if expected else ["the reference has no steps"]


def committed_at(events: Iterable[Record], step: int) -> float | None:
    """When rank 0, which moves ``latest``, knew the checkpoint of `step` to be committed. None if it never was.

    The other ranks only look for the commit record from time to time, and so know it later than it is true.
    """
    committed = (event for event in events if event["event"] == "committed" and event["rank"] == 0)
    return min((_number(event, "end") for event in committed if is_of_step(event, step)), default=None)


def is_of_step(event: Record, step: int) -> bool:
    """Whether the event's path is DeepSpeed's folder of the checkpoint of `step`, or lies in it."""
    return f"global_step{step}" in str(event.get("path", "")).split("/")


def checkpoints(run: Run) -> list[Checkpoint]:
    """One row per checkpoint of a run, in the order of steps."""
    saves = _spans(run.metrics, "save_checkpoint")
    steps = _spans(run.metrics, "step")
    rows = []
    for step, spans in sorted(saves.items()):
        begin = min(span[0] for span in spans.values())
        durable = run.durable.get(step)
        flight = (begin, durable if durable is not None else float("inf"))
        busy = [_length(spans) for spans in steps.values() if _overlaps(spans, flight) and _first(spans) >= begin]
        rows.append(
            Checkpoint(
                engine=run.engine,
                step=step,
                nbytes=run.nbytes.get(step, 0),
                blocked_seconds=max(end - begin for begin, end in spans.values()),
                stall_seconds=_stall(run, steps.get(step + 1), spans),
                busy_step_seconds=statistics.median(busy) if busy else None,
                durable_seconds=None if durable is None else durable - begin,
            )
        )
    return rows


def idle_step_seconds(run: Run, warm_up: int = 2) -> float | None:
    """The median time of steps during which no save was in flight, without the first `warm_up` steps."""
    steps = _spans(run.metrics, "step")
    flights = [
        (min(span[0] for span in spans.values()), run.durable.get(step, float("inf")))
        for step, spans in _spans(run.metrics, "save_checkpoint").items()
    ]
    first = min(steps, default=0) + warm_up
    idle = [
        _length(spans)
        for step, spans in steps.items()
        if step >= first and not any(_overlaps(spans, flight) for flight in flights)
    ]
    return statistics.median(idle) if idle else None


def format_table(runs: Sequence[Run]) -> str:
    """The Markdown table: every checkpoint of every run, then each run's medians."""
    header = (
        "engine",
        "step",
        "MiB",
        "`save_checkpoint` blocked",
        "stall at next optimizer step",
        "step with a save in flight",
        "step without",
        "durable after",
    )
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    medians = []
    for run in runs:
        rows = checkpoints(run)
        lines += [_line(row, str(row.step), "") for row in rows]
        if rows:
            medians.append(_line(_median(rows), "**median**", format_seconds(idle_step_seconds(run))))
    return "\n".join(lines + medians) + "\n"


def format_seconds(seconds: float | None) -> str:
    """Three digits that matter, in milliseconds below a second; a dash for None."""
    if seconds is None:
        return "–"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def _line(row: Checkpoint, step: str, idle: str) -> str:
    cells = (
        row.engine,
        step,
        f"{row.nbytes / 2**20:.0f}",
        format_seconds(row.blocked_seconds),
        format_seconds(row.stall_seconds),
        format_seconds(row.busy_step_seconds),
        idle,
        format_seconds(row.durable_seconds),
    )
    return "| " + " | ".join(cells) + " |"


def _median(rows: Sequence[Checkpoint]) -> Checkpoint:
    def median(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return Checkpoint(
        engine=rows[0].engine,
        step=0,
        nbytes=int(statistics.median(row.nbytes for row in rows)),
        blocked_seconds=statistics.median(row.blocked_seconds for row in rows),
        stall_seconds=median(row.stall_seconds for row in rows),
        busy_step_seconds=median(row.busy_step_seconds for row in rows),
        durable_seconds=median(row.durable_seconds for row in rows),
    )


Spans = dict[int, tuple[float, float]]  # begin and end by rank


def _spans(metrics: Iterable[Record], event: str) -> dict[int, Spans]:
    """Begin and end of each occurrence of an event: by step, then by rank."""
    found: dict[int, Spans] = {}
    for record in metrics:
        if record["event"] == event:
            span = (_number(record, "begin"), _number(record, "end"))
            found.setdefault(int(_number(record, "step")), {})[int(_number(record, "rank"))] = span
    return found


def _stall(run: Run, next_step: Spans | None, save: Spans) -> float | None:
    """Time in fences between the start of a save and the end of the next step, on the slowest rank."""
    if next_step is None:
        return None
    totals = dict.fromkeys(next_step, 0.0)
    for event in run.events:
        rank = int(_number(event, "rank"))
        if event["event"] == "fence" and rank in next_step and rank in save:
            begin, end = _number(event, "begin"), _number(event, "end")
            if save[rank][0] <= begin < next_step[rank][1]:
                totals[rank] += end - begin
    return max(totals.values())


def _overlaps(spans: Spans, flight: tuple[float, float]) -> bool:
    return any(begin < flight[1] and flight[0] < end for begin, end in spans.values())


def _first(spans: Spans) -> float:
    return min(begin for begin, _ in spans.values())


def _length(spans: Spans) -> float:
    return max(end - begin for begin, end in spans.values())


def _number(record: Record, key: str) -> float:
    value = record[key]
    if not isinstance(value, (int, float)):
        raise ValueError(f"record {record!r}: {key} is no number")
    return float(value)
