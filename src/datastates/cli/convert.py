"""``datastates convert``: rewrite a checkpoint in another format or layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from types import TracebackType

import click
import torch
from rich.console import Console

from datastates.cli.console import (
    byte_progress,
    duration_text,
    json_option,
    path_text,
    print_json,
    printable,
    size_text,
)
from datastates.conversion import (
    convert_to_distributed,
    convert_to_huggingface,
    convert_to_safetensors,
    convert_to_torch,
    convert_to_weights,
)
from datastates.conversion.huggingface import parse_size
from datastates.universal import Conversion, Progress, convert_to_universal

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class _Options:
    source: str
    out: str
    dtype: torch.dtype | None
    max_shard_size: str
    config: str | None
    key: str | None
    trust: bool
    force: bool
    workers: int | None
    progress: Progress


def _universal(options: _Options) -> Conversion:
    return convert_to_universal(options.source, options.out, num_workers=options.workers, progress=options.progress)


def _same_state(convert: Callable[..., Conversion]) -> Callable[[_Options], Conversion]:
    def run(options: _Options) -> Conversion:
        return convert(
            options.source,
            options.out,
            trust=options.trust,
            force=options.force,
            num_workers=options.workers,
            progress=options.progress,
        )

    return run


def _dcp(options: _Options) -> Conversion:
    return convert_to_distributed(
        options.source, options.out, trust=options.trust, force=options.force, progress=options.progress
    )


def _hf(options: _Options) -> Conversion:
    return convert_to_huggingface(
        options.source,
        options.out,
        dtype=options.dtype,
        max_shard_bytes=parse_size(options.max_shard_size),
        config=options.config,
        key=options.key,
        trust=options.trust,
        force=options.force,
        num_workers=options.workers,
        progress=options.progress,
    )


def _weights(dtype: torch.dtype) -> Callable[[_Options], Conversion]:
    def run(options: _Options) -> Conversion:
        return convert_to_weights(
            options.source,
            options.out,
            dtype,
            key=options.key,
            trust=options.trust,
            force=options.force,
            progress=options.progress,
        )

    return run


_CONVERSIONS: dict[str, Callable[[_Options], Conversion]] = {
    "bf16": _weights(torch.bfloat16),
    "dcp": _dcp,
    "fp32": _weights(torch.float32),
    "hf": _hf,
    "safetensors": _same_state(convert_to_safetensors),
    "torch": _same_state(convert_to_torch),
    "universal": _universal,
}

_ONLY_FOR = {
    "dtype": {"hf"},
    "max_shard_size": {"hf"},
    "config": {"hf"},
    "key": {"bf16", "fp32", "hf"},
    "workers": {"hf", "safetensors", "torch", "universal"},
    "trust": set(_CONVERSIONS) - {"universal"},
    "force": set(_CONVERSIONS) - {"universal"},
}
"""Which options mean something for which layout; elsewhere they are refused."""


@click.command()
@click.argument("source", type=click.Path(exists=True))
@click.argument("out", type=click.Path())
@click.option("--to", "layout", required=True, type=click.Choice(sorted(_CONVERSIONS)), help="See above.")
@click.option("--trust", is_flag=True, help="Load objects, too, by running code of SOURCE. Partitions of ZeRO need it.")
@click.option("--force", is_flag=True, help="Replace what is at OUT.")
@click.option("--dtype", type=click.Choice(sorted(_DTYPES)), help="hf: of the weights; by default as stored.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="hf: of one file.")
@click.option("--config", type=click.Path(), help="hf: the config.json; by default the one beside SOURCE.")
@click.option("--key", help="fp32, bf16, hf: the part of the state that is the weights, as model.weights.")
@click.option("--workers", type=click.IntRange(min=1), help="Threads; by default one per processor, at most 8.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    source: str,
    out: str,
    layout: str,
    trust: bool,
    force: bool,
    dtype: str | None,
    max_shard_size: str,
    config: str | None,
    key: str | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Write SOURCE, which is left alone, in another form as OUT.

    SOURCE is a file of torch or safetensors, the folder of a checkpoint (or one with a latest file in it), a folder of
    Hugging Face, or a directory of torch.distributed.checkpoint.

    \b
    --to torch        the same states as files of torch.save
    --to safetensors  the same states as safetensors files
    --to fp32         the weights alone, of ZeRO put together, in one file (safetensors
                      or torch, by its suffix)
    --to bf16         likewise, as bfloat16
    --to hf           the weights as a folder for from_pretrained
    --to dcp          a directory of torch.distributed.checkpoint
    --to universal    of DeepSpeed: its layout for any number of ranks; runs the pickles in it

    Sources are compared with their checksums, and only plain data is loaded. OUT appears when it is complete and
    durable; a conversion to a folder that was interrupted is gone on with by the same command.
    """
    for name, layouts in _ONLY_FOR.items():
        is_given = ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        if is_given and layout not in layouts:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} means nothing for --to {layout}, only for {', '.join(sorted(layouts))}")
    with _Bar(f"converting to {layout}", quiet=as_json) as bar:
        chosen = None if dtype is None else _DTYPES[dtype]
        options = _Options(source, out, chosen, max_shard_size, config, key, trust, force, workers, bar.show)
        done = _CONVERSIONS[layout](options)
    if as_json:
        print_json(asdict(done))
    else:
        click.echo(printable(_summary(done, layout)))


class _Bar:
    """A progress bar that appears with the first news, when the total is known."""

    def __init__(self, description: str, *, quiet: bool) -> None:
        self._description = description
        self._quiet = quiet or not Console(stderr=True).is_terminal
        self._done = 0
        self._open: AbstractContextManager[object] | None = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.__exit__(kind, error, trace)

    def show(self, done: int, total: int) -> None:
        """Show how much is done; one call at a time."""
        if self._quiet:
            return
        if self._open is None:
            self._open = byte_progress(self._description, total)
            self._advance = self._open.__enter__()
        self._advance(done - self._done)
        self._done = done


def _summary(done: Conversion, layout: str) -> str:
    rate = done.nbytes / done.seconds if done.seconds else 0.0
    kept = f", {done.num_kept} of them finished before" if done.num_kept else ""
    count = f"{_counted(done.num_items, layout)}{kept}, " if os.path.isdir(done.path) else ""
    return (
        f"{path_text(done.path)}: {count}{size_text(done.nbytes)} written in {duration_text(done.seconds)}"
        f" ({size_text(rate)}/s)"
    )


def _counted(num_items: int, layout: str) -> str:
    if layout == "universal":
        return f"{num_items} parameters and files"
    noun = "tensor" if layout == "dcp" else "file"
    return f"{num_items} {noun}{'' if num_items == 1 else 's'}"
