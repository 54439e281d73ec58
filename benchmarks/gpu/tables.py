"""What the GPU check found, as a document for people."""

from __future__ import annotations

import statistics
from typing import Any

GIB = 2**30


def document(found: dict[str, Any]) -> str:
    """Markdown: the machine, then a table for each step; a step that failed has its reason in its place."""
    machine, steps = found["machine"], found["steps"]
    lines = [f"# GPU check: {machine['device']}", ""]
    if found["is_simulated"]:
        lines += ["**Simulated on the CPU at tiny size: these figures say nothing but that the script runs.**", ""]
    lines += ["; ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items() if name != "device"), ""]
    for name, step in steps.items():
        lines += [f"## {name}", ""]
        if "error" in step:
            lines += [f"**Failed after {step['seconds']:.0f} s:** {step['error'].strip()}", ""]
        make = _TABLES.get(name)
        if make is not None and step.get("found"):
            lines += [*make(step["found"]), ""]
    return "\n".join(lines)


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def _tests(found: dict[str, Any]) -> list[str]:
    row = [str(found[kind]) for kind in ("passed", "failed", "skipped")]
    return _table(["passed", "failed", "skipped"], [row])


def _link(found: dict[str, Any]) -> list[str]:
    names = {
        "pinned_gib_s": "plain copy to torch's pinned memory (the link's limit)",
        "slabs_gib_s": "registered slabs of the host cache",
        "unregistered_slabs_gib_s": "slabs that are not registered",
        "pinning_gib_s": "registering the host cache",
    }
    rows = [[text, f"{found[name]:.2f}"] for name, text in names.items() if name in found]
    for name in ("large", "small"):
        one = found[name]
        text = f"a save of {one['num_tensors']} tensors, {one['nbytes'] / GIB:.3g} GiB, until staged"
        rows.append([text, f"{one['staged_gib_s']:.2f}"])
    lines = _table(["device to host", "GiB/s"], rows)
    lines += [
        "",
        *_table(
            ["save of", "call, ms", "fence, ms", "staged, ms"], [_milliseconds(found[n]) for n in ("large", "small")]
        ),
    ]
    return lines


def _milliseconds(one: dict[str, Any]) -> list[str]:
    names = ("call_seconds", "fence_seconds", "staged_seconds")
    return [f"{one['num_tensors']} tensors", *(f"{one[name] * 1e3:.2f}" for name in names)]


def _matmul(found: dict[str, Any]) -> list[str]:
    row = [f"{statistics.median(found[name]):.3f}" for name in ("idle_seconds", "saving_seconds")]
    heads = ["products alone, s", "while a save drains, s", "ratio", "alone, TFLOP/s"]
    return _table(heads, [[*row, f"{found['slowdown']:.3f}", f"{found['idle_tflop_s']:.0f}"]])


def _training(found: dict[str, Any]) -> list[str]:
    plain = statistics.median(found["plain_step_seconds"])
    text = (
        f"{found['num_parameters'] / 1e9:.2f} billion parameters, {found['nbytes'] / GIB:.2f} GiB of state, "
        f"{found['sequences']} sequences, host cache {found['host_cache_gb']:g} GB. "
        f"A step without a save: {plain:.3f} s."
    )
    heads = [
        "way",
        "call, s",
        "held before the step, s",
        "step with a save, s",
        "saved at every step, s",
        "of a plain step",
    ]
    rows = []
    for name, one in found["ways"].items():
        if "error" in one:
            rows.append([name, one["error"], "", "", "", ""])
            continue
        lone = [
            statistics.median(row[key] for row in one["lone"])
            for key in ("call_seconds", "hold_seconds", "step_seconds")
        ]
        every = statistics.median(one["every_step_seconds"])
        rows.append([name, *(f"{value:.4f}" for value in (*lone, every)), f"{every / plain:.2f}"])
    return [text, "", *_table(heads, rows)]


def _loads(found: dict[str, Any]) -> list[str]:
    size = found["nbytes"] / GIB
    rows = [
        [name, f"{statistics.median(values):.3f}", f"{size / statistics.median(values):.2f}"]
        for name, values in found["seconds"].items()
    ]
    return _table(["load to the device", "s", "GiB/s"], rows)


_TABLES = {"tests": _tests, "link": _link, "matmul": _matmul, "training": _training, "loads": _loads}
