"""What the commands print with: people's text with colours on a terminal only, JSON for machines, progress."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Function = TypeVar("Function", bound=Callable[..., Any])

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
MAX_GIB = 1 << 20
"""Sizes on the command line are at most a PiB; a larger one is a slip, or no number."""

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_SHOWN_AS_SECOND = 0.9995  # in three digits


def json_option(function: Function) -> Function:
    """Add ``--json`` to a command, as the argument ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")(function)


def print_rows(rows: Sequence[Sequence[str | Text]]) -> None:
    """Print rows in aligned columns on standard output: never cut, with colours on a terminal only.

    Where a cell of the last column has several lines, the further ones stand below the first. Control characters are
    shown as `printable` does.
    """
    console = Console(highlight=False, soft_wrap=True)
    for line in row_lines(rows):
        console.print(line)


def row_lines(rows: Sequence[Sequence[str | Text]]) -> Iterator[Text]:
    """The lines that `print_rows` prints."""
    cells = [[_cell(cell, lines=number == len(row) - 1) for number, cell in enumerate(row)] for row in rows]
    widths = [max((cell_len(cell.plain) for cell in column), default=0) for column in zip(*cells, strict=True)]
    indent = sum(width + 2 for width in widths[:-1])
    for row in cells:
        line = Text()
        for cell, width in zip(row[:-1], widths, strict=False):
            line.append_text(cell)
            line.append(" " * (width - cell_len(cell.plain) + 2))
        for number, part in enumerate(row[-1].split("\n")):
            line.append(" " * indent if number else "")
            line.append_text(part)
            line.rstrip()
            yield line
            line = Text()


def printable(text: str, *, lines: bool = False) -> str:
    """A text of others as it may go to a terminal: what is no printable character stands there as Python writes it.

    Args:
        text: may hold anything, names of files that are no UTF-8 included.
        lines: leave the ends of lines as they are.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or (lines and one == "\n") else ascii(one)[1:-1] for one in text)


def _cell(cell: str | Text, *, lines: bool) -> Text:
    plain = cell if isinstance(cell, str) else cell.plain
    shown = printable(plain, lines=lines)
    if isinstance(cell, Text):
        return cell if shown == plain else Text(shown, cell.style)
    return Text(shown)


class Amount(click.FloatRange):
    """A range of finite numbers: click's own lets NaN through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no amount", param, ctx)
        return number


def print_json(value: object) -> None:
    """Print a value as indented JSON, in ASCII: names of files need not be of any encoding."""
    click.echo(json.dumps(value, indent=2))


class _RateColumn(ProgressColumn):
    """Bytes per second in the units of all other sizes; rich's own column counts in powers of ten."""

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        return Text("" if rate is None else f"{size_text(rate)}/s", style="progress.data.speed")


@contextmanager
def byte_progress(description: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on standard error with rate and time left; nothing where that is no terminal.

    Args:
        description: what is being done.
        total: bytes in all.
        quiet: show nothing at all.

    Yields:
        To be called with the number of bytes done since the last call, by any thread.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        _RateColumn(),
        TimeRemainingColumn(),
    )
    target = Console(stderr=True)
    with Progress(*columns, console=target, transient=True, disable=quiet or not target.is_terminal) as progress:
        task = progress.add_task(description, total=total)

        def advance(nbytes: int) -> None:
            progress.advance(task, nbytes)

        yield advance


def size_text(nbytes: float) -> str:
    """A number of bytes for people: ``1.5 GiB``."""
    value = float(nbytes)
    for unit in _UNITS[:-1]:
        if abs(value) < 1024:
            return f"{_short(value)} {unit}"
        value /= 1024
    return f"{_short(value)} {_UNITS[-1]}"


def path_text(path: str) -> str:
    """A path for people: from the current folder where it lies in it, otherwise as it is; "-" where there is none."""
    if not path:
        return "-"
    inside = os.path.relpath(path)
    return path if inside == os.pardir or inside.startswith(os.pardir + os.sep) else inside


def duration_text(seconds: float) -> str:
    """A span of time for people, in its largest unit: ``3 min``; below a second in ms, to a hundredth of one."""
    for unit_seconds, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if abs(seconds) >= unit_seconds:
            return f"{_short(seconds / unit_seconds)} {unit}"
    if 0 < abs(seconds) < _SHOWN_AS_SECOND:
        return f"{round(seconds * 1000, 2):.3g} ms"
    return f"{_short(seconds)} s"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
