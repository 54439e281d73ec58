"""``datastates doctor``: what is wrong with a config or a machine, before the training starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from datastates.cli.console import MAX_GIB, Amount, json_option, print_json, print_rows
from datastates.cli.exit_codes import NEGATIVE, SUCCESS
from datastates.config import GIB, SECTION, CheckpointConfig
from datastates.doctor.disk import MEASURED_BYTES, disk_findings, measure_disk, room_findings
from datastates.doctor.engine_choice import engine_findings, read_config, settings_of
from datastates.doctor.findings import Finding, Severity
from datastates.doctor.installation import find_deepspeed, installation_findings, version_of
from datastates.doctor.machine import Machine, memory_findings
from datastates.doctor.pace import Load, interval_finding, pace_findings, state_nbytes
from datastates.doctor.records import record_findings

MAX_PARAMS = 10**15
"""A thousand times the largest models."""

_COLOURS = {Severity.GOOD: "green", Severity.WARNING: "yellow", Severity.WRONG: "bold red"}

_NEEDS = (
    ("save_interval", ["step_seconds"]),
    ("step_seconds", ["params", "state_gb"]),
    ("params", ["directory"]),
    ("state_gb", ["directory"]),
)
"""Options that say nothing without one of others."""


@click.command()
@click.argument("ds_config", required=False, type=click.Path())
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes on this machine.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Machines of the job.")
@click.option(
    "--directory", type=click.Path(), help="Folder for checkpoints: measure its disk by a short write of up to 1 GiB."
)
@click.option(
    "--params", type=Amount(1, MAX_PARAMS), help="Parameters of the model (7e9), for the size of a checkpoint."
)
@click.option("--state-gb", type=Amount(0, MAX_GIB, min_open=True), help="Size of a checkpoint of the whole job, GiB.")
@click.option("--step-seconds", type=Amount(0, min_open=True), help="How long a training step takes.")
@click.option("--save-interval", type=click.IntRange(1), help="Steps between saves, to be judged.")
@click.option("--events", type=click.Path(), help="Records of a run (events_dir): judge by what was measured in it.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, ds_config: str | None, **options: Any) -> None:
    """Say which checkpoint engine will be active, and whether this machine suits the settings.

    With DS_CONFIG, the JSON file of a DeepSpeed config: which engine DeepSpeed would use and why, what is wrong in the
    section datastates_ckpt, whether the host caches of all ranks fit. With --directory: what its disk can do. With
    --params or --state-gb as well: which interval between saves is sustainable, and which cache hides a save. With
    --events: the same by what a run has measured.

    Ends with exit code 1 when something is wrong; warnings do not count.
    """
    if options["params"] and options["state_gb"]:
        raise click.UsageError("--params and --state-gb exclude each other")
    for option, needed in _NEEDS:
        if options[option] and not any(options[name] for name in needed):
            raise click.UsageError(f"{_flag(option)} needs {' or '.join(map(_flag, needed))}")
    findings = list(_diagnose(ds_config, **options))
    if as_json:
        print_json([asdict(finding) | {"severity": finding.severity.value} for finding in findings])
    else:
        _print(findings)
    ctx.exit(NEGATIVE if any(finding.severity is Severity.WRONG for finding in findings) else SUCCESS)


def _diagnose(
    ds_config: str | None,
    *,
    ranks: int,
    nodes: int,
    directory: str | None,
    params: float | None,
    state_gb: float | None,
    step_seconds: float | None,
    save_interval: int | None,
    events: str | None,
) -> Iterator[Finding]:
    config = read_config(ds_config) if ds_config is not None else {}
    deepspeed = find_deepspeed()
    yield from installation_findings(deepspeed, version_of("torch"), version_of("isal"))
    settings = settings_of(config) if SECTION in config else None
    if ds_config is not None:
        yield from engine_findings(config, deepspeed)
    if settings is not None:
        yield from memory_findings(settings, ranks, Machine.now())
    if events is not None:
        yield from record_findings(events)
    if directory is None:
        return
    measured = measure_disk(directory, num_writers=_num_writers(settings) * ranks, max_nbytes=MEASURED_BYTES)
    yield from disk_findings(measured)
    nbytes = state_nbytes(int(params), config) if params else int((state_gb or 0) * GIB)
    if not nbytes:
        return
    load = Load(nbytes, ranks, nodes)
    rate = measured.nbytes_per_second
    yield from room_findings(measured, load.node_nbytes)
    yield from pace_findings(load, rate, settings.host_cache_bytes if settings else None, step_seconds)
    if save_interval is not None and step_seconds is not None:
        yield interval_finding(load, rate, step_seconds, save_interval)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _num_writers(settings: CheckpointConfig | None) -> int:
    return CheckpointConfig.num_writers if settings is None else settings.num_writers


def _print(findings: list[Finding]) -> None:
    rows = []
    for finding in findings:
        text = Text(finding.message)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style="dim")
        rows.append([Text(finding.severity.value, style=_COLOURS[finding.severity]), Text(finding.subject), text])
    print_rows(rows)
