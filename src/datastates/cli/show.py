"""``datastates show``: the names in a checkpoint, with what stands under them."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import click
from rich.text import Text

from datastates.attempt_folder import has_attempts
from datastates.cli.checkpoints import find_checkpoint
from datastates.cli.console import json_option, path_text, print_json, print_rows, printable, size_text
from datastates.contents.distributed_listing import list_distributed
from datastates.contents.distributed_metadata import METADATA_NAME, SUFFIX
from datastates.contents.listing import FileListing, TensorRecord, ValueRecord, list_file
from datastates.errors import CheckpointNotFoundError


@click.command()
@click.argument("checkpoint", type=click.Path())
@click.option("--match", metavar="PATTERN", help='Only names like this, with * and ?: "module.*.weight".')
@click.option("--tensors", "tensors_only", is_flag=True, help="Leave out what is no tensor.")
@json_option
def command(checkpoint: str, match: str | None, tensors_only: bool, as_json: bool) -> None:
    """Show what CHECKPOINT holds: names, shapes, dtypes, sizes, and the values that are no tensors.

    CHECKPOINT is a checkpoint's folder, a folder whose "latest" names one, or a single file of torch or safetensors,
    whoever wrote it; also a folder of torch.distributed.checkpoint. No tensor is read and no code of the file is run,
    so this works for files that one does not trust, and where the classes in them are not installed.
    """
    listings = [_selected(_listed(path), match, tensors_only) for path in _files(checkpoint)]
    if match is not None and not any(listing.tensors or listing.values for listing in listings):
        raise CheckpointNotFoundError(f"{checkpoint} has no name like {match!r}")
    if as_json:
        print_json([asdict(listing) for listing in listings])
        return
    for listing in listings:
        nbytes = size_text(sum(tensor.nbytes for tensor in listing.tensors))
        count = len(listing.tensors)
        click.echo(printable(f"{path_text(listing.path)}: {count} tensor{'' if count == 1 else 's'}, {nbytes}"))
        print_rows(list(_rows(listing)))


def _files(path: str) -> list[str]:
    """The files to list: of a distributed checkpoint the metadata, which say what lies in the others."""
    if not os.path.isdir(path):
        return [path]
    if os.path.isfile(os.path.join(path, METADATA_NAME)) and not has_attempts(path):
        return [os.path.join(path, METADATA_NAME)]
    record = find_checkpoint(path)
    names = sorted(record.file_nbytes)
    if METADATA_NAME in names:
        names = [name for name in names if not name.endswith(SUFFIX)]
    return [os.path.join(record.path, name) for name in names]


def _listed(path: str) -> FileListing:
    return list_distributed(path) if os.path.basename(path) == METADATA_NAME else list_file(path)


def _selected(listing: FileListing, match: str | None, tensors_only: bool) -> FileListing:
    def is_wanted(record: TensorRecord | ValueRecord) -> bool:
        return match is None or fnmatch.fnmatchcase(record.fqn, match)

    tensors = tuple(filter(is_wanted, listing.tensors))
    values = () if tensors_only else tuple(filter(is_wanted, listing.values))
    return FileListing(listing.path, listing.kind, listing.nbytes, tensors, values)


@dataclass
class _Node:
    """A part of a dotted name, with what stands under it; the leaf that has just this name, if there is one."""

    children: dict[str, _Node] = field(default_factory=dict)
    leaf: TensorRecord | ValueRecord | None = None
    nbytes: int = 0


def _rows(listing: FileListing) -> Iterator[list[str | Text]]:
    """The tree of names, one row per name: as the state has them, tensors and values of one container together."""
    root = _Node()
    records: list[TensorRecord | ValueRecord] = [*listing.tensors, *listing.values]
    for record in records:
        node, nbytes = root, record.nbytes if isinstance(record, TensorRecord) else 0
        node.nbytes += nbytes
        for part in record.fqn.split("."):
            node = node.children.setdefault(part, _Node())
            node.nbytes += nbytes
        node.leaf = record
    yield from _below(root, 1)


def _below(node: _Node, depth: int) -> Iterator[list[str | Text]]:
    for name, child in node.children.items():
        while child.leaf is None and len(child.children) == 1:  # one line for names that do not branch
            part, child = next(iter(child.children.items()))
            name = f"{name}.{part}"
        yield _row("  " * depth + name, child)
        yield from _below(child, depth + 1)


def _row(name: str, node: _Node) -> list[str | Text]:
    leaf = node.leaf
    if isinstance(leaf, TensorRecord):
        return [name, leaf.dtype, str(list(leaf.shape)), size_text(leaf.nbytes)]
    if isinstance(leaf, ValueRecord):
        return [name, Text(leaf.class_name, style="dim"), "", leaf.text]
    return [Text(name, style="bold"), "", "", size_text(node.nbytes) if node.nbytes else ""]
