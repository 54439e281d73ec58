"""Writes into docs/cli.md what the commands print, as text: of small checkpoints that it makes, and damages, itself.

The block between ``<!-- screens -->`` and ``<!-- end of screens -->`` is replaced. ``--check`` writes nothing, and ends
with 1 where the document is out of date. What differs from run to run is fixed: ages, rates, and the records
that ``stats`` reads, which are written by hand in the form of the library.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from click.testing import CliRunner
from rewriting import rewrite

from datastates import CheckpointEngine
from datastates.cli import ls, main, watch

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
MODEL_NAME = "mp_rank_00_model_states.pt"
STEPS = (100, 200, 300, 400)
WATCHED_AT = 1796000185.0
AGES = ("3.1 h", "2.1 h", "1.1 h", "3 min")

_BLOCK = re.compile(r"^<!-- screens -->\n.*?^<!-- end of screens -->$", re.MULTILINE | re.DOTALL)
_RATE = re.compile(r"[\d.]+ [KMGT]?i?B/s$", re.MULTILINE)
_MIB = 1 << 20


def updated(text: str) -> str:
    """The document with the screens of today."""
    if not _BLOCK.search(text):
        raise ValueError(f"{DOCUMENT.name} has no block for screens")
    block = f"<!-- screens -->\n{screens()}<!-- end of screens -->"
    return _BLOCK.sub(lambda _: block, text)


def screens() -> str:
    """All screens, as Markdown."""
    with tempfile.TemporaryDirectory(prefix="datastates-screens-") as folder, contextlib.chdir(folder):
        save_checkpoints()
        write_records()
        return "\n".join(text for group in (sound(), damaged()) for text in group)


def sound() -> Iterator[str]:
    yield "A run has saved four checkpoints:\n"
    yield screen("ls checkpoints")
    yield "What is in one, without loading it; then what has changed since an older one, and how long the saves took:\n"
    yield screen("show checkpoints/global_step300")
    yield screen("diff checkpoints/global_step100 checkpoints/global_step300")
    yield screen("stats events")
    yield "The same job as it was seen while it ran:\n"
    yield screen("watch checkpoints --events events --once")


def damaged() -> Iterator[str]:
    """One byte of a tensor is flipped in one checkpoint, a file is lost in another."""
    path = Path("checkpoints/global_step100", MODEL_NAME)
    data = bytearray(path.read_bytes())
    data[data.index(state(100)["module"]["layers.0.weight"].numpy().tobytes()) + 4711] ^= 0x10
    path.write_bytes(data)
    Path("checkpoints/global_step200/ema.safetensors").unlink()
    yield "Now one byte is flipped in `global_step100`, and `global_step200` loses a file:\n"
    yield screen("verify checkpoints/global_step300 checkpoints/global_step100")
    yield screen("verify checkpoints/global_step200")
    yield screen("ls checkpoints")
    yield "Retention by hand shows first what it would do:\n"
    yield screen("prune checkpoints --keep-last 1")
    yield screen("prune checkpoints --keep-last 1 --yes")


def screen(command: str) -> str:
    """What a command prints, in a block of Markdown, with its exit code where that is not 0."""
    ages = iter(AGES)
    with (
        mock.patch.object(ls, "duration_text", lambda _seconds: next(ages)),
        mock.patch.object(watch, "now", lambda: WATCHED_AT),
        mock.patch.object(watch, "_latest_in", lambda _folder: (f"global_step{STEPS[-1]}", WATCHED_AT - 20.1)),
    ):
        done = CliRunner().invoke(main, shlex.split(command), prog_name="datastates")
    if done.exit_code >= 70:
        raise RuntimeError(f"datastates {command} failed: {done.output}")
    output = _RATE.sub("1.9 GiB/s", done.output)
    status = f"$ echo $?\n{done.exit_code}\n" if done.exit_code else ""
    return f"```console\n$ datastates {command}\n{output}{status}```\n"


def save_checkpoints() -> None:
    with CheckpointEngine({"host_cache_size": 2**-6, "pin_host_cache": False}, rank=0) as engine:
        for step in STEPS:
            folder = Path("checkpoints", f"global_step{step}").absolute()
            with engine.checkpoint(str(folder), folder.name):
                engine.save(state(step), str(folder / MODEL_NAME))
                engine.save({"module": state(step)["module"]}, str(folder / "ema.safetensors"))
        engine.wait(persist=True)


def state(step: int) -> dict[str, object]:
    """Values are whole numbers and halves, so that they are the same on every machine."""
    weight = torch.arange(300_000.0).remainder(1000).view(300, 1000)
    weight[: step // 10] += step / 200
    return {
        "module": {"layers.0.weight": weight, "layers.0.bias": torch.full((300,), 0.5, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.zeros(300, 1000)}}, "lr": 0.1},
        "global_steps": step,
    }


def write_records() -> None:
    """Records as `events_dir` gets them, of two ranks."""
    Path("events").mkdir()
    for rank in (0, 1):
        lines = [json.dumps(record) for number, step in enumerate(STEPS) for record in _records(rank, number, step)]
        Path("events", f"events-rank{rank:05d}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _records(rank: int, number: int, step: int) -> Iterator[dict[str, object]]:
    begin = 1000.0 + 60 * number
    folder = Path("checkpoints", f"global_step{step}").absolute()
    common = {"rank": rank, "attempt": f"run-{number}", "path": str(folder / f"rank{rank}.pt")}
    if not number:
        clock = {"time": WATCHED_AT - 205, "host": f"node{rank + 1}", "pid": 4711}
        yield {"event": "clock", "rank": rank, "begin": 1000.0, "end": 1000.0, **clock}
    nbytes = {"nbytes": 4200 * _MIB}
    yield {"event": "save", **common, "begin": begin, "end": begin + 0.021 + 0.002 * rank, **nbytes}
    yield {"event": "stage", **common, "begin": begin, "end": begin + 1.4, "index": 0, **nbytes}
    yield {"event": "staged", **common, "begin": begin, "end": begin + 1.4, **nbytes}
    yield {"event": "fence", "rank": rank, "begin": begin + 1.1, "end": begin + 1.1 + 0.05 * number, "num_files": 1}
    for count in range(2):
        steps = {"begin": begin + 0.6 * count, "end": begin + 0.6 * (count + 1), "number": 100 * number + count + 2}
        yield {"event": "step", "rank": rank, **steps}
    yield {"event": "flush", **common, "begin": begin + 0.1, "end": begin + 4.2 + 0.5 * rank, "index": 0, **nbytes}
    yield {"event": "durable", **common, "begin": begin, "end": begin + 4.25 + 0.5 * rank, **nbytes}
    if rank == 0:
        whole = {"path": str(folder), "nbytes": 8400 * _MIB}
        yield {"event": "committed", **common, **whole, "begin": begin, "end": begin + 4.9}


def run(arguments: list[str]) -> int:
    return rewrite(DOCUMENT, updated, arguments, __file__)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
