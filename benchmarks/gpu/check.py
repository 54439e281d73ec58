"""Runs the device path on a GPU and measures it, in less than eight minutes: see ``docs/accelerators.md``.

Each step runs in a process of its own with a time limit, so that one that fails or hangs does not hide the others.
Exit status: 0 all steps went well, 1 one of them did not, 2 there is no accelerator.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import steps
import tables
import torch

import datastates

LIMIT_SECONDS = 465.0
MIN_SECONDS = 5.0
"""With less time left a step is not begun."""


def machine(is_simulated: bool) -> dict[str, object]:
    """What the figures were taken on."""
    found: dict[str, object] = {"device": "CPU, simulated" if is_simulated else "?"}
    if not is_simulated and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found |= {
            "device_memory_gib": round(properties.total_memory / 2**30, 1),
            "num_devices": torch.cuda.device_count(),
        }
        found["runtime"] = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    elif not is_simulated:
        found["device"] = str(torch.accelerator.current_accelerator())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found |= {"cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1), "kernel": platform.release()}
    found |= {"python": platform.python_version(), "torch": torch.__version__, "datastates": datastates.__version__}
    return found


def run_step(name: str, settings: steps.Settings) -> dict[str, Any]:
    """A step in a process of its own, killed with all its children when its time is over."""
    context = multiprocessing.get_context("fork" if settings.is_simulated else "spawn")
    result = settings.folder / f"{name}.json"
    process = context.Process(target=_in_child, args=(name, settings, result))
    begin = time.monotonic()
    process.start()
    process.join(settings.seconds)
    seconds = time.monotonic() - begin
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return {"seconds": seconds, "error": f"not done within {settings.seconds:.0f} s"}
    if not result.exists():
        return {"seconds": seconds, "error": f"its process ended with status {process.exitcode} and no result"}
    found = json.loads(result.read_text("utf-8"))
    error = found.pop("error", None)
    return {"seconds": seconds, "found": found, **({"error": error} if error else {})}


def _in_child(name: str, settings: steps.Settings, result: Path) -> None:
    os.setsid()
    measure, _ = steps.ALL[name]
    try:
        found = measure(settings)
    except Exception:  # noqa: BLE001 - top of a process: the reason stands in the result
        found = {"error": traceback.format_exc(limit=6)}
    result.write_text(json.dumps(found), encoding="utf-8")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description="tests and measures the device path on a GPU")
    parser.add_argument(
        "--out", type=Path, default=steps.ROOT / "benchmarks" / "results", help="folder for the results"
    )
    parser.add_argument(
        "--dir", type=Path, help="where checkpoints are written meanwhile (default: a temporary folder)"
    )
    parser.add_argument(
        "--steps", default=",".join(steps.ALL), help=f"which, by comma (default: {','.join(steps.ALL)})"
    )
    parser.add_argument(
        "--simulate", action="store_true", help="tiny sizes on the CPU: only shows that the script runs"
    )
    options = parser.parse_args(arguments)
    options.steps = options.steps.split(",")
    if unknown := set(options.steps) - set(steps.ALL):
        parser.error(f"unknown steps {', '.join(sorted(unknown))}; known: {', '.join(steps.ALL)}")
    return options


def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    end = time.monotonic() + LIMIT_SECONDS
    found: dict[str, Any] = {
        "is_simulated": options.simulate,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(options.simulate),
        "steps": {},
    }
    for name in options.steps:
        seconds = min(steps.ALL[name][1], end - time.monotonic())
        folder = scratch / name
        folder.mkdir()
        step = {"seconds": 0.0, "error": "no time was left for it"}
        if seconds >= MIN_SECONDS:
            step = run_step(name, steps.Settings(options.simulate, folder, seconds))
        shutil.rmtree(folder, ignore_errors=True)
        found["steps"][name] = step
        print(f"{name}: {step['seconds']:.1f} s, {'FAILED' if 'error' in step else 'ok'}", file=sys.stderr, flush=True)
        write(options.out, found)  # what is there is kept whatever comes later
    return found


def write(folder: Path, found: dict[str, Any]) -> None:
    """One JSON and one Markdown file, named after device and day."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", f"gpu {found['machine']['device']} {found['date'][:10]}".lower()).strip("-")
    (folder / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(tables.document(found), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not options.simulate and not torch.accelerator.is_available():
        print(
            f"gpu_check: torch {torch.__version__} finds no accelerator here: run it on a machine with a GPU, or with "
            "--simulate to see that it runs",
            file=sys.stderr,
        )
        return 2
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.dir) as scratch:
        found = run(options, Path(scratch))
    print(tables.document(found))
    return 1 if any("error" in step for step in found["steps"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
