"""``datastates ls``: the checkpoints in a folder."""

from __future__ import annotations

import os
import time
from typing import Any

import click
from rich.text import Text

from datastates.catalog import CheckpointRecord
from datastates.cli.checkpoints import checkpoints_below, nothing_in
from datastates.cli.console import duration_text, json_option, print_json, print_rows, printable, size_text

_HEADER = ("", "step", "size", "ranks", "age", "checkpoint", "state")


@click.command()
@click.argument("directory", type=click.Path(), default=".")
@json_option
def command(directory: str, as_json: bool) -> None:
    """List the checkpoints in DIRECTORY (by default the current folder), the oldest first.

    Says of each its step, size, number of ranks and age, and whether it is complete, or what is missing. The one that
    "latest" names has a star. Reads records and sizes only, and changes nothing: what a job is just saving is
    incomplete.
    """
    records = checkpoints_below(directory)
    if as_json:
        print_json([_plain(record) for record in records])
    elif records:
        print_rows([_HEADER, *(_row(record, directory) for record in records)])
    else:
        click.echo(printable(nothing_in(directory)), err=True)


def _row(record: CheckpointRecord, directory: str) -> list[str | Text]:
    problem = record.problem.replace(record.path + os.sep, "")  # the row names the checkpoint
    complete = f"complete, {record.part}" if record.part else "complete"
    state = Text(problem, style="red") if problem else Text(complete, style="green")
    return [
        "*" if record.is_latest else "",
        "-" if record.step is None else str(record.step),
        size_text(record.nbytes),
        "-" if record.world_size is None else str(record.world_size),
        duration_text(max(time.time() - record.created_at, 0.0)),
        os.path.relpath(record.path, directory),
        state,
    ]


def _plain(record: CheckpointRecord) -> dict[str, Any]:
    return {
        "path": record.path,
        "tag": record.tag,
        "step": record.step,
        "nbytes": record.nbytes,
        "created_at": record.created_at,
        "world_size": record.world_size,
        "is_latest": record.is_latest,
        "is_committed": record.is_committed,
        "is_complete": record.is_complete,
        "problem": record.problem,
        "part": None if record.part is None else str(record.part),
    }
