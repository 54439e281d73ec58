"""``datastates bench``: what saving a state of a given size costs on this machine."""

from __future__ import annotations

import math
from dataclasses import asdict

import click

from datastates.bench import BenchResult, bench
from datastates.cli.console import (
    MAX_GIB,
    Amount,
    byte_progress,
    duration_text,
    json_option,
    print_json,
    print_rows,
    size_text,
)
from datastates.config import GIB


@click.command()
@click.argument("directory", type=click.Path())
@click.option("--state-gb", type=Amount(0, MAX_GIB, min_open=True), default=1.0, show_default=True, help="Size, GiB.")
@click.option("--saves", type=click.IntRange(2), default=4, show_default=True, help="The first is not counted.")
@click.option(
    "--host-cache-gb", type=Amount(0, MAX_GIB, min_open=True), help="Host cache, GiB; by default the state fits."
)
@click.option("--step-seconds", type=Amount(0, min_open=True), help="How long a training step takes.")
@json_option
def command(
    directory: str, state_gb: float, saves: int, host_cache_gb: float | None, step_seconds: float | None, as_json: bool
) -> None:
    """Save a state of a given size lazily to a folder, and say which interval between saves is sustainable.

    Takes that much memory, and room for two such files under DIRECTORY; what is written is removed.
    """
    nbytes = int(state_gb * GIB)
    section = None if host_cache_gb is None else {"host_cache_size": host_cache_gb}
    with byte_progress("saving", nbytes * saves, quiet=as_json) as advance:
        result = bench(directory, nbytes, num_saves=saves, section=section, progress=advance)
    if as_json:
        print_json(_plain(result))
        return
    raw = result.disk.nbytes_per_second
    share = result.nbytes_per_second / raw
    print_rows(
        [
            ["state", f"{size_text(result.nbytes)}, {result.num_saves} saves"],
            ["blocked", f"{duration_text(result.blocked_seconds)} per save"],
            ["staged", f"{duration_text(result.staged_seconds)}: a longer step never waits for copies"],
            ["durable", f"{duration_text(result.durable_seconds)}, {size_text(result.nbytes_per_second)}/s"],
            ["raw disk", f"{size_text(raw)}/s; saving reaches {share:.0%} of it, checksums and fsync included"],
            ["interval", _advice(result, step_seconds)],
        ]
    )


def _advice(result: BenchResult, step_seconds: float | None) -> str:
    text = f"a save every {duration_text(result.sustainable_seconds)} or less often is sustainable"
    if step_seconds is None:
        return text
    return f"{text}: save-interval {max(math.ceil(result.sustainable_seconds / step_seconds), 1)} or more"


def _plain(result: BenchResult) -> dict[str, object]:
    return asdict(result) | {
        "nbytes_per_second": result.nbytes_per_second,
        "sustainable_seconds": result.sustainable_seconds,
        "disk_nbytes_per_second": result.disk.nbytes_per_second,
    }
