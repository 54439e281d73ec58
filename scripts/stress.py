"""Kills jobs, lets a disk lose power and saves by the thousand, for some minutes; says what came of it.

    make stress                                    half an hour on 2 cores
    make stress ARGS="--kills 50 --saves 500"
    make stress ARGS="--dir /scratch --seed 7 --json build/stress.json"

Exit status 1 when a promise was broken; the checkpoints and logs of such a run stay where it says. The short forms are
part of ``make test``: tests/faults/test_kills.py, test_soak.py and test_power_loss.py, tests/tiers/test_tier_kills.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))

from faults.power_loss import PowerLossError, run_power_loss  # noqa: E402
from stress.kills import WAYS  # noqa: E402
from stress.lineage import Outcome, run_kills  # noqa: E402
from stress.soak import LIMITS, Report  # noqa: E402
from tiers.killing import run_tier_kills  # noqa: E402

SMALL_DISK_BYTES = 2 << 20


def kill_table(outcomes: Sequence[Outcome]) -> str:
    """One row per way of killing; a start in which the named point was not reached counts as no kill."""
    lines = [
        "| killed | kills | processes | nothing lost | newest saves lost | most lost | cleaned up | broken promises |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    killed = [outcome for outcome in outcomes if outcome.num_killed]
    rows = [(way, [outcome for outcome in killed if outcome.kill.way == way]) for way in WAYS]
    for name, row in [*((way, row) for way, row in rows if row), ("**all**", killed)]:
        cells = [
            len(row),
            sum(outcome.num_killed for outcome in row),
            sum(not outcome.num_lost for outcome in row),
            sum(outcome.num_lost > 0 for outcome in row),
            max((outcome.num_lost for outcome in row), default=0),
            sum(outcome.num_recovered > 0 for outcome in row),
            sum(bool(outcome.violations) for outcome in row),
        ]
        lines.append("| " + " | ".join([name, *map(str, cells)]) + " |")
    return "\n".join(lines)


def soak_table(report: Report) -> str:
    """First and last sample and the growth from the middle of the run to its end."""
    first, last, drift, excess = report.samples[0], report.samples[-1], report.drift(), report.excess()
    lines = [
        f"| held | after {first.num_saves} saves | after {last.num_saves} | growth | |",
        "|---|---:|---:|---:|---|",
    ]
    for name in LIMITS:
        verdict = "grows" if name in excess else "flat"
        lines.append(f"| {name} | {getattr(first, name)} | {getattr(last, name)} | {drift[name]} | {verdict} |")
    return "\n".join(lines)


def run_soak(folder: Path, num_saves: int) -> Report:
    """Soak in a process of its own; with a full disk among the faults where one can be mounted."""
    with ExitStack() as stack:
        command = [sys.executable, "-m", "stress.soak", str(folder / "soak"), str(num_saves)]
        disk = folder / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(disk)]
        if shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0:
            stack.callback(subprocess.run, ["umount", str(disk)], check=True)
            command.append(str(disk))
        with open(folder / "soak.log", "w", encoding="utf-8") as log:
            path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
            env = {**os.environ, "PYTHONPATH": path}
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True, check=True)
    return Report.from_json(done.stdout)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, metavar="N", help="0: none")
    parser.add_argument("--saves", type=int, default=3000, metavar="N", help="of the soak; at least 60, 0: none")
    parser.add_argument("--power-losses", type=int, default=100, metavar="N", help="per cut point of a save; 0: none")
    parser.add_argument("--tier-kills", type=int, default=60, metavar="N", help="during uploads; 0: none")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), metavar="WAY", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="on the storage to be tried; default: the folder for temporary files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser.parse_args(arguments)


def try_kills(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    """Kill; returns the figures, and whether a promise was broken."""
    outcomes = run_kills(str(folder), options.kills, options.seed, options.ways, tell=say)
    print(f"\n{len(outcomes)} starts, seed {options.seed}\n\n{kill_table(outcomes)}\n")
    return {"outcomes": [asdict(outcome) for outcome in outcomes]}, any(outcome.violations for outcome in outcomes)


def try_power_losses(options: argparse.Namespace, _: Path) -> tuple[dict[str, Any], bool]:
    """Cut the power; likewise."""
    try:
        figures = run_power_loss(options.power_losses, options.seed)
    except PowerLossError as error:
        print(f"BROKEN: {error}")
        return {"broken": str(error)}, True
    print(f"power losses: {', '.join(f'{name} {count}' for name, count in figures.items())}\n")
    return dict(figures), False


def try_soak(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    """Save by the thousand; likewise."""
    report = run_soak(folder, options.saves)
    print(f"{options.saves} saves; failed as they should: {report.failed}, otherwise: {report.unexpected}")
    print(f"\n{soak_table(report)}\n")
    return {"excess": report.excess(), **asdict(report)}, bool(report.excess() or report.unexpected)


def try_tier_kills(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    """Kill flushers while they carry checkpoints to an object store; likewise."""
    problems = run_tier_kills(folder, options.tier_kills, options.seed)
    for place, found in problems.items():
        print(f"BROKEN: {place}: {'; '.join(found)}")
    print(f"{options.tier_kills} kills during uploads, {len(problems)} broken promises\n")
    return {"problems": problems}, bool(problems)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="datastates-stress-", dir=options.dir))
    figures: dict[str, Any] = {"seed": options.seed}
    is_broken = False
    wanted = {
        try_kills: options.kills,
        try_power_losses: options.power_losses,
        try_soak: options.saves,
        try_tier_kills: options.tier_kills,
    }
    for part in (part for part, count in wanted.items() if count):
        name = part.__name__.removeprefix("try_")
        (folder / name).mkdir()
        begin = time.monotonic()
        found, is_part_broken = part(options, folder / name)
        figures[name] = found | {"seconds": time.monotonic() - begin}
        print(f"{name}: {figures[name]['seconds']:.0f} s\n", flush=True)
        is_broken |= is_part_broken
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if is_broken:
        print(f"PROMISES WERE BROKEN; what is left of it: {folder}")
    else:
        shutil.rmtree(folder)
    return int(is_broken)


def say(number: int, outcome: Outcome) -> None:
    """A line per kill; more where something is wrong."""
    lost = f"{outcome.num_lost} of {outcome.num_begun} saves lost"
    print(f"{number:5d}  {outcome.seconds:5.2f} s  {outcome.kill}: {lost}", flush=True)
    for violation in outcome.violations:
        print(f"       BROKEN: {violation}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
