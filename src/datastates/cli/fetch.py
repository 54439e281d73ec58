"""``datastates fetch``: bring a checkpoint from a tier to a local folder."""

from __future__ import annotations

import os

import click

from datastates.cli.console import printable, size_text
from datastates.errors import CheckpointNotFoundError
from datastates.tier_settings import TierSettings
from datastates.tiers.fetching import fetch, placed_in
from datastates.tiers.first_tier import Placed
from datastates.tiers.store import open_store


@click.command()
@click.argument("source")
@click.argument("directory", type=click.Path())
@click.option("--tag", metavar="TAG", help="This checkpoint, rather than the one that latest names.")
def command(source: str, directory: str, tag: str | None) -> None:
    """Bring a checkpoint from SOURCE to DIRECTORY.

    SOURCE holds checkpoints: a place in an object store (s3://bucket/prefix), or a folder. The checkpoint appears in
    DIRECTORY under its own name, whole or not at all, compared with its checksums; "latest" there is left alone. What
    an interrupted call has brought is not brought again. Credentials are taken from the environment.
    """
    tier = TierSettings(source)
    placed = _chosen(tier, tag)
    target = os.path.join(directory, placed.name)
    record = fetch(tier, placed.name, target)
    click.echo(printable(f"{target}: {record.num_files} files, {size_text(record.nbytes)}"))


def _chosen(tier: TierSettings, tag: str | None) -> Placed:
    found = placed_in(tier)
    wanted = tag or open_store(tier, lambda _: None).latest("")
    named = [one for one in found if wanted in (one.tag, one.name)]
    if named:
        return named[-1]
    if wanted is None and found:
        return max(found, key=lambda one: one.created_at)
    there = ", ".join(sorted(one.tag for one in found)) or "none at all"
    what = "no complete checkpoint" if wanted is None else f"no complete checkpoint {wanted!r}"
    raise CheckpointNotFoundError(f"{tier.path} holds {what}; there are {there}")
