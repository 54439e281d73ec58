"""``datastates diff``: what differs between two checkpoints, or two files."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from datastates.cli.checkpoints import find_checkpoint
from datastates.cli.console import byte_progress, json_option, print_json, print_rows
from datastates.cli.exit_codes import NEGATIVE, SUCCESS
from datastates.differences import Difference, Kind, differences_of
from datastates.errors import CheckpointNotFoundError

_COLOURS = {Kind.ADDED: "green", Kind.REMOVED: "red"}


@click.command()
@click.argument("old", type=click.Path())
@click.argument("new", type=click.Path())
@json_option
@click.pass_context
def command(ctx: click.Context, /, old: str, new: str, as_json: bool) -> None:
    """Compare OLD and NEW: two checkpoints, file by file, or two single files of torch or safetensors.

    Says what was added, removed, reshaped, given another dtype or changed; of changed tensors how many elements, and
    the largest and the mean difference. Compares to the last bit. Takes a few hundred MiB of memory, or twice the
    largest tensor. Ends with exit code 1 when anything differs.
    """
    before, after = _files(old), _files(new)
    if not os.path.isdir(old) and not os.path.isdir(new):
        before, after = {"": old}, {"": new}
    total = sum(os.path.getsize(after[name]) for name in before.keys() & after.keys())
    with byte_progress("comparing", total, quiet=as_json) as advance:
        found = list(differences_of(before, after, advance))
    if as_json:
        print_json([_plain(one) for one in found])
    else:
        _print(found)
    ctx.exit(NEGATIVE if found else SUCCESS)


def _files(path: str) -> dict[str, str]:
    if not os.path.exists(path):
        raise CheckpointNotFoundError(f"there is no file or folder {path}")
    if not os.path.isdir(path):
        return {os.path.basename(path): path}
    record = find_checkpoint(path)
    return {name: os.path.join(record.path, name) for name in record.file_nbytes}


def _plain(one: Difference) -> dict[str, Any]:
    return asdict(one) | {"kind": one.kind.value}


def _print(found: list[Difference]) -> None:
    if not found:
        click.echo("equal to the last bit")
        return
    print_rows([_row(one) for one in found])
    counts = Counter(one.kind for one in found)
    click.echo(", ".join(f"{counts[kind]} {kind.value}" for kind in Kind if counts[kind]))


def _row(one: Difference) -> list[str | Text]:
    name = ": ".join(part for part in (one.file, one.fqn) if part)
    if one.max_difference is None:
        what = " → ".join(part for part in (one.old, one.new) if part)
    else:
        forms = one.old if one.old == one.new else f"{one.old} → {one.new}"
        what = f"{forms}, {one.num_changed} of {one.num_elements} elements"
        what += f", max {one.max_difference:.6g}, mean {one.mean_difference:.6g}"
    return [Text(one.kind.value, style=_COLOURS.get(one.kind, "yellow")), name, what]
