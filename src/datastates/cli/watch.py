"""``datastates watch``: a running job, live."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from datastates.cli.console import (
    Amount,
    duration_text,
    json_option,
    path_text,
    print_rows,
    row_lines,
    size_text,
)
from datastates.errors import CorruptCheckpointError
from datastates.manifest import read_commit, read_latest
from datastates.record_files import EVENTS, GrowingFolder, no_records
from datastates.run_view import RankView, RunView, TierView
from datastates.save_records import SaveRecord

now = time.time

_RANKS_SHOWN = 8
Row = list[str | Text]


@click.command()
@click.argument("directory", type=click.Path(), default=".")
@click.option("--events", type=click.Path(), help=f'Folder of records; by default DIRECTORY or "{EVENTS}" in it.')
@click.option("--every", type=Amount(0.1, 3600), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once instead of until Ctrl-C.")
@json_option
def command(directory: str, events: str | None, every: float, once: bool, as_json: bool) -> None:
    """Show what a running job is doing: steps, saves in flight, rates, what is committed, what is lost.

    DIRECTORY is the folder of its checkpoints, or that of its records, which events_dir names in the section
    datastates_ckpt. Without records only the newest checkpoint can be told. Reads what is new in the records and two
    small files, so that it may run beside the job; ranks may come and go.
    """
    watched = Watched(directory, events or directory)
    if once and not os.path.exists(directory):
        raise no_records(directory)
    try:
        if as_json:
            for _ in _looks(watched, every, once=once):
                click.echo(json.dumps(watched.plain(now())))
        else:
            _show(watched, every, once=once)
    except KeyboardInterrupt:
        if once:
            raise


class Watched:
    """What is known of a job, brought up to date by `look`."""

    def __init__(self, directory: str, events: str) -> None:
        """Args:
        directory: of checkpoints, or of records; it need not be there yet.
        events: what `record_paths` takes; it need not be there yet.
        """
        self.view = RunView()
        self.latest: tuple[str, float | None] | None = None
        """What ``latest`` names, and the Unix time of its commit; None where there is none."""
        self._directory = directory
        self.trouble = ""
        """Why the last look was in vain; empty where it was not."""
        self._records = GrowingFolder(events)

    def look(self) -> None:
        """Read what is new. Raises OSError for what is there and cannot be read."""
        self.view.note_all(self._records.read())
        last = self.view.last_committed
        folders = [self._directory, *([] if last is None else [os.path.dirname(last.path)])]
        self.latest = next((found for folder in folders if (found := _latest_in(folder)) is not None), None)

    def plain(self, at: float) -> dict[str, Any]:
        """For machines: `RunView.plain`, and ``latest``."""
        tag, committed_at = self.latest or (None, None)
        found = {"time": at, "trouble": self.trouble, "latest": tag, "latest_committed_at": committed_at}
        return {**found, "records_since": self.view.begin, "is_cut": self._records.is_cut, **self.view.plain(at)}

    def rows(self, at: float) -> list[Row]:
        """For people: a label and a text each."""
        rows: list[Row] = [["trouble", Text(self.trouble, style="red")]] if self.trouble else []
        rows.append(["run", _run_text(self.view, at)])
        since = self.view.begin if self._records.is_cut else None
        rows.append(["committed", _committed_text(self.view, self.latest, at, since)])
        rows += [["in flight", _flight_text(save, at)] for save in self.view.in_flight]
        rows.append(["rates", _rates_text(self.view)])
        rows += [["tier", _tier_text(tier)] for tier in self.view.tiers]
        rows += [["lost", Text(f"{path_text(one.path)}: {one.failure}", style="red")] for one in self.view.failures]
        return [*rows, *_advice_rows(self.view)]


def _looks(
    watched: Watched, every: float, *, once: bool, pause: Callable[[float], object] = time.sleep
) -> Iterator[None]:
    """One look after the other, for ever unless ``once``. What the first look raises is raised, later it is shown."""
    watched.look()
    yield
    while not once:
        pause(every)
        try:
            watched.look()
            watched.trouble = ""
        except OSError as error:  # a server that is away for a while
            watched.trouble = str(error)
        yield


def _show(watched: Watched, every: float, *, once: bool) -> None:
    console = Console(highlight=False)
    if once or not console.is_terminal:
        for number, _ in enumerate(_looks(watched, every, once=once)):
            if number:
                click.echo()
            print_rows(watched.rows(now()))
        return
    with Live(console=console, auto_refresh=False) as live:
        for _ in _looks(watched, every, once=False):
            live.update(Text("\n").join(row_lines(watched.rows(now()))), refresh=True)


def _latest_in(directory: str) -> tuple[str, float | None] | None:
    tag = read_latest(directory)
    if not tag:
        return None
    if not os.path.isdir(os.path.join(directory, tag)):  # also where no folder can have such a name
        return tag, None
    try:
        commit = read_commit(os.path.join(directory, tag))
    except CorruptCheckpointError:
        return tag, None  # `ls` and `verify` say more
    return tag, None if commit is None else commit.committed_at


def _run_text(view: RunView, at: float) -> str:
    if not view.ranks:
        return "no records yet; they are written where events_dir is set"
    present = view.present
    hosts = sorted({rank.host for rank in present.values() if rank.host})
    where = f" on {', '.join(hosts[:_RANKS_SHOWN])}{', …' if len(hosts) > _RANKS_SHOWN else ''}" if hosts else ""
    number = len(present)
    text = f"{number} {'rank' if number == 1 else 'ranks'}{where}"
    if gone := len(view.ranks) - number:
        text += f" ({gone} more before the last start)"
    slowest = min(present.values(), key=lambda rank: rank.num_steps)
    if slowest.num_steps:
        text += f"; {slowest.num_steps} steps since its start, {_step_text(slowest)}"
    return f"{text}; seen {_age(max(rank.seen_at for rank in view.ranks.values()), at)}"


def _step_text(rank: RankView) -> str:
    typical = rank.meter.measured.step_seconds
    last = f"the last in {duration_text(rank.step_seconds or 0.0)}"
    return last if typical is None else f"{last}, without saves {duration_text(typical)}"


def _committed_text(view: RunView, latest: tuple[str, float | None] | None, at: float, since: float | None) -> str:
    """What is committed; ``since`` is the begin of what is counted where that is not the begin of the run."""
    lost = max((rank.num_lost for rank in view.ranks.values()), default=0)
    skipped = max((rank.num_skipped for rank in view.ranks.values()), default=0)
    span = "" if since is None else f" in the last {duration_text(max(at - since, 0.0))}"
    text = f"{view.num_committed}{span}, {lost} lost, {skipped} skipped" if view.ranks else "-"
    last = view.last_committed
    if last is not None and last.committed_at is not None and last.committed_seconds is not None:
        text += f"; last {path_text(last.path)}, {size_text(last.nbytes)}, {_age(last.committed_at, at)}"
        text += f", after {duration_text(last.committed_seconds)}"
    if latest is not None:
        when = "not committed" if latest[1] is None else f"committed {_age(latest[1], at)}"
        text += f"; latest is {latest[0]}, {when}"
    return text


def _flight_text(save: SaveRecord, at: float) -> str:
    text = f"{path_text(save.path)}: {size_text(save.nbytes)}, begun {_age(save.begin, at)}"
    if save.nbytes:
        staged, flushed = (min(done / save.nbytes, 1.0) for done in (save.staged_nbytes, save.flushed_nbytes))
        text += f", staged {staged:.0%}, written {flushed:.0%}"
    return text + (", durable" if save.durable_at is not None and save.flushed_nbytes >= save.nbytes else "")


def _rates_text(view: RunView) -> str:
    names = {"copy": "copy_nbytes_per_second", "write": "flush_nbytes_per_second"}
    found = {text: view.rate(name) for text, name in names.items()}
    known = [f"{text} {size_text(rate)}/s" for text, rate in found.items() if rate is not None]
    return ", ".join(known) or "-"


def _tier_text(tier: TierView) -> str | Text:
    text = f"{tier.name}: {tier.num_behind} checkpoints behind" if tier.num_behind else f"{tier.name}: up to date"
    return Text(f"{text}; {tier.error}", style="red") if tier.error else text


def _advice_rows(view: RunView) -> list[Row]:
    advice = view.advice
    if advice is None:
        return []
    pace = f"saving every {advice.interval_text} is sustainable"
    return [["advice", Text(advice.remedy, style="yellow") if advice.remedy else pace]]


def _age(since: float, at: float) -> str:
    return f"{duration_text(max(at - since, 0.0))} ago"
