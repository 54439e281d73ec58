"""``datastates prune``: remove older checkpoints by hand."""

from __future__ import annotations

import os

import click

from datastates.catalog import CheckpointRecord
from datastates.cli.checkpoints import checkpoints_below
from datastates.cli.console import json_option, print_json, print_rows, size_text
from datastates.errors import CheckpointNotFoundError
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

    Only complete checkpoints are counted and removed. What "latest" names stays, as does what is incomplete: a job may
    be writing it, and what a dead job has left is removed by the next start. A checkpoint that is being removed is
    there whole or not at all.
    """
    records = [record for record in checkpoints_below(directory) if record.is_committed and record.is_complete]
    unknown = set(keep) - {record.tag for record in records}
    if unknown:
        raise CheckpointNotFoundError(f"{directory}: no complete checkpoint is called {', '.join(sorted(unknown))}")
    policy = RetentionPolicy(keep_last=keep_last, keep_every=keep_every, pinned=frozenset(keep))
    kept = policy.survivors(records)
    doomed = [record for record in in_order(records) if record.tag not in kept and not record.is_latest]
    for record in doomed if yes else ():
        remove_checkpoint(record.path)
        if not as_json:
            click.echo(f"removed {os.path.relpath(record.path, directory)}, {size_text(record.nbytes)}")
    if as_json:
        print_json({"kept": sorted(kept), "removed" if yes else "would_remove": [record.path for record in doomed]})
    elif not yes:
        _print(records, doomed, directory)


def _print(records: list[CheckpointRecord], doomed: list[CheckpointRecord], directory: str) -> None:
    if not doomed:
        click.echo(f"nothing to remove: all {len(records)} checkpoints stay")
        return
    print_rows([["would remove", size_text(one.nbytes), os.path.relpath(one.path, directory)] for one in doomed])
    total = sum(record.nbytes for record in doomed)
    click.echo(f"{len(doomed)} of {len(records)} checkpoints, {size_text(total)}: add --yes to remove them")
