"""``datastates stats``: how long the saves of a run blocked it, and when they were durable."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from datastates.cli.console import duration_text, json_option, path_text, print_json, print_rows, size_text
from datastates.openmetrics import openmetrics_text
from datastates.record_files import read_records
from datastates.run_view import seen_in
from datastates.save_records import SaveRecord, summary_of

_PLAIN = (
    "attempt",
    "path",
    "begin",
    "nbytes",
    "num_files",
    "blocked_seconds",
    "fenced_seconds",
    "staged_seconds",
    "durable_seconds",
    "committed_seconds",
    "carried_seconds",
    "nbytes_per_second",
    "num_in_flight",
    "num_free_slabs",
    "num_slabs",
    "failure",
)
_HEADER = ("begun", "size", "ranks", "blocked", "held back", "staged", "durable", "committed", "rate", "checkpoint")


@click.command()
@click.argument("records", type=click.Path())
@click.option("--last", type=click.IntRange(1), metavar="N", help="The last N saves only.")
@click.option("--openmetrics", is_flag=True, help="Print OpenMetrics text, for Prometheus, of all saves.")
@json_option
def command(records: str, last: int | None, openmetrics: bool, as_json: bool) -> None:
    """Show what the records of a run say about its saves.

    RECORDS is the folder that events_dir names in the section datastates_ckpt, one file of it, or a folder of
    checkpoints that has it as "events". Times count from the begin of a save and are those of its slowest rank: blocked
    (the call of save), held back (optimizer steps that waited for copies), staged (all copied), durable (all on the
    device), committed (visible as a whole). Then what interval is sustainable and which cache hides a save, by what was
    measured.
    """
    if openmetrics and (as_json or last):
        raise click.UsageError("--openmetrics excludes --json and --last")
    view, saves = seen_in(read_records(records))
    if openmetrics:
        click.echo(openmetrics_text(view), nl=False)
        return
    saves = saves[-last if last else 0 :]
    summary, advice = summary_of(saves), view.advice
    if as_json:
        plain = None if advice is None else advice.plain()
        print_json({"summary": summary, "advice": plain, "saves": [_plain(save) for save in saves]})
        return
    origin = saves[0].begin if saves else 0.0
    print_rows([_HEADER, *(_row(save, origin) for save in saves)])
    click.echo()
    click.echo(_sentence(summary))
    if advice is not None:
        pace = f"a save every {advice.interval_text} or less often is sustainable"
        click.echo(f"Advice: {advice.remedy or 'nothing to change'}; {pace}.")


def _plain(save: SaveRecord) -> dict[str, Any]:
    return {name: getattr(save, name) for name in _PLAIN} | {"ranks": sorted(save.ranks)}


def _row(save: SaveRecord, origin: float) -> list[str | Text]:
    return [
        f"+{duration_text(save.begin - origin)}",
        size_text(save.nbytes),
        str(len(save.ranks)),
        duration_text(save.blocked_seconds),
        duration_text(save.fenced_seconds),
        _time(save.staged_seconds),
        _time(save.durable_seconds),
        _time(save.committed_seconds),
        _rate(save.nbytes_per_second),
        Text(f"{path_text(save.path)}\n{save.failure}", style="red") if save.failure else path_text(save.path),
    ]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration_text(seconds)


def _rate(nbytes_per_second: float | None) -> str:
    return "-" if nbytes_per_second is None else f"{size_text(nbytes_per_second)}/s"


def _sentence(summary: dict[str, Any]) -> str:
    text = f"{summary['num_saves']} saves, {summary['num_committed']} committed, {summary['num_lost']} lost or skipped"
    num_open = summary["num_saves"] - summary["num_committed"] - summary["num_lost"]
    if num_open:
        text += f", {num_open} without an end (in flight, or the job was killed)"
    if not summary["num_committed"]:
        return text
    text += f"; medians: {size_text(summary['nbytes'])}, blocked {duration_text(summary['blocked_seconds'])}"
    text += f", held back {duration_text(summary['fenced_seconds'])}, durable after {_time(summary['durable_seconds'])}"
    interval, durable = summary["interval_seconds"], summary["durable_seconds"]
    if interval is not None and durable is not None and interval < durable:
        text += (
            f". Saves are begun every {duration_text(interval)}, faster than they are durable: save less often, "
            "or see `datastates doctor --directory` for what the disk can do"
        )
    return text
