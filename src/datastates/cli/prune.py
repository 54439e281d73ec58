"""``datastates prune``: remove older checkpoints by hand."""

from __future__ import annotations

import os

import click

from datastates.catalog import CheckpointRecord
from datastates.cli.checkpoints import checkpoints_below
from datastates.cli.console import json_option, print_json, print_rows, printable, size_text
from datastates.errors import CheckpointNotFoundError
from datastates.pins import is_pinned
from datastates.removal import remove_checkpoint
from datastates.retention import RetentionPolicy, in_order


@click.command()
@click.argument("directory", type=click.Path())
@click.option("--keep-last", type=click.IntRange(1), default=3, show_default=True, help="The newest so many stay.")
@click.option("--keep-every", type=click.IntRange(1), metavar="STEPS", help="Steps that are multiples of this stay.")
@click.option("--keep", multiple=True, metavar="TAG", help="This one stays; may be given several times.")
@click.option("--yes", is_flag=True, help="Remove them; without it nothing is changed.")
@json_option
def command(
    directory: str, keep_last: int, keep_every: int | None, keep: tuple[str, ...], yes: bool, as_json: bool
) -> None:
    """Show which checkpoints in DIRECTORY are not needed any more, and remove them with --yes.

    Only complete checkpoints are counted and removed. What "latest" names stays, as do what is pinned, what a link
    points to, what is damaged, and what is incomplete: a job may be writing it, and what a dead job has left is removed
    by the next start.
    Where DIRECTORY holds the folders of several runs, each is a series of its own. A checkpoint that is being removed
    is there whole or not at all.
    """
    found = [record for record in checkpoints_below(directory) if record.is_committed and record.is_complete]
    records = [record for record in found if not _is_linked(record, directory)]
    linked = {os.path.realpath(record.path) for record in found if _is_linked(record, directory)}
    unknown = set(keep) - {record.tag for record in records}
    if unknown:
        raise CheckpointNotFoundError(f"{directory}: no complete checkpoint is called {', '.join(sorted(unknown))}")
    pinned = frozenset(record.tag for record in records if is_pinned(record.path))
    policy = RetentionPolicy(keep_last=keep_last, keep_every=keep_every, pinned=pinned | frozenset(keep))
    doomed = [
        record
        for series in _by_folder(records)
        for record in _doomed(policy, series)
        if os.path.realpath(record.path) not in linked
    ]
    for record in doomed if yes else ():
        remove_checkpoint(record.path)
        if not as_json:
            click.echo(printable(f"removed {os.path.relpath(record.path, directory)}, {size_text(record.nbytes)}"))
    if as_json:
        paths = [record.path for record in doomed]
        kept = sorted({record.tag for record in records if record.path not in paths})
        print_json({"kept": kept, "removed" if yes else "would_remove": paths})
    elif not yes:
        _print(records, doomed, directory)


def _is_linked(record: CheckpointRecord, directory: str) -> bool:
    """Whether a link in the folder leads to the checkpoint: it is at home elsewhere, or under another name."""
    inside = os.path.relpath(record.path, os.path.abspath(directory))
    return os.path.realpath(record.path) != os.path.normpath(os.path.join(os.path.realpath(directory), inside))


def _by_folder(records: list[CheckpointRecord]) -> list[list[CheckpointRecord]]:
    series: dict[str, list[CheckpointRecord]] = {}
    for record in records:
        series.setdefault(os.path.dirname(record.path), []).append(record)
    return list(series.values())


def _doomed(policy: RetentionPolicy, series: list[CheckpointRecord]) -> list[CheckpointRecord]:
    kept = policy.survivors(series)
    return [record for record in in_order(series) if record.tag not in kept and not record.is_latest]


def _print(records: list[CheckpointRecord], doomed: list[CheckpointRecord], directory: str) -> None:
    if not doomed:
        click.echo(f"nothing to remove: all {len(records)} checkpoints stay")
        return
    print_rows([["would remove", size_text(one.nbytes), os.path.relpath(one.path, directory)] for one in doomed])
    total = sum(record.nbytes for record in doomed)
    click.echo(f"{len(doomed)} of {len(records)} checkpoints, {size_text(total)}: add --yes to remove them")
