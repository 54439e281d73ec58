"""``datastates trace``: what each rank of a run did when, for Perfetto."""

from __future__ import annotations

import click

from datastates.cli.console import path_text, printable
from datastates.trace import write_trace


@click.command()
@click.argument("records", type=click.Path())
@click.option("-o", "--out", type=click.Path(dir_okay=False), default="trace.json", show_default=True, help="The file.")
def command(records: str, out: str) -> None:
    """Write what each rank of a run did when as a trace, to be opened in ui.perfetto.dev or chrome://tracing.

    RECORDS is the folder that events_dir names in the section datastates_ckpt, one file of it, or a folder of
    checkpoints that has it as "events". Shows steps, what held them back, saves, staging and flushing slab by slab,
    commits and carrying to other tiers, for each rank, on one time line as far as the clocks of the hosts agree. Where
    OUT ends in .gz it is compressed.
    """
    num_records = write_trace(records, out)
    click.echo(f"{printable(path_text(out))}: {num_records} records; open it in https://ui.perfetto.dev")
