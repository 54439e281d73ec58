"""How long does conversion to the universal layout take, and how much memory: datastates against DeepSpeed's converter.

    python benchmarks/convert.py --gib 2 --repeat 3 --dir /scratch

Both convert the same checkpoint of ZeRO, made up in the shape of a transformer, as commands of their own, in turns: in
each repetition both once, after the pages of the checkpoint were dropped from the cache, the first round not counted.
Measured are the seconds until the command ends, then until all is on the disk (datastates ends only then), and the peak
of all processes' memory and of the space taken in the result's folder, sampled while it runs.

datastates         ``datastates convert --to universal CHECKPOINT OUT``
ds_to_universal    ``python ds_to_universal.py --inject_missing_state``, with its default numbers of workers

The results are compared tensor by tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.tensor_fragment import fragment_address

GIB = 2**30
STATES = ("fp32", "exp_avg", "exp_avg_sq")
BASELINE, OURS = "ds_to_universal", "datastates"
SAMPLE_SECONDS = 0.2


@dataclass(frozen=True)
class Sample:
    """One conversion."""

    seconds: float
    durable_seconds: float
    memory_mib: float
    space_mib: float


@dataclass
class Row:
    """All conversions of one method."""

    method: str
    samples: list[Sample] = field(default_factory=list)

    def values(self, name: str) -> list[float]:
        return [getattr(sample, name) for sample in self.samples]


def shapes_of(nbytes: int, hidden: int) -> OrderedDict[str, torch.Size]:
    """The parameters of a transformer whose weights and moments take about ``nbytes`` in fp32."""
    layer = {
        "input_layernorm.weight": (hidden,),
        "input_layernorm.bias": (hidden,),
        "attention.query_key_value.weight": (3 * hidden, hidden),
        "attention.query_key_value.bias": (3 * hidden,),
        "attention.dense.weight": (hidden, hidden),
        "attention.dense.bias": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "post_attention_layernorm.bias": (hidden,),
        "mlp.dense_h_to_4h.weight": (4 * hidden, hidden),
        "mlp.dense_h_to_4h.bias": (4 * hidden,),
        "mlp.dense_4h_to_h.weight": (hidden, 4 * hidden),
        "mlp.dense_4h_to_h.bias": (hidden,),
    }
    shapes = OrderedDict({"embedding.weight": torch.Size((8192, hidden))})
    per_layer = sum(torch.Size(shape).numel() for shape in layer.values())
    for index in range(max(1, nbytes // (4 * len(STATES)) // per_layer)):
        shapes.update({f"layers.{index}.{name}": torch.Size(shape) for name, shape in layer.items()})
    return shapes


def make_checkpoint(folder: Path, shapes: OrderedDict[str, torch.Size], stage: int, num_ranks: int) -> int:
    """Write the files that DeepSpeed would, in the layout of the stage; returns their bytes."""
    folder.mkdir(parents=True)
    common = {"dp_world_size": num_ranks, "mp_world_size": 1, "param_shapes": [shapes], "ds_version": "0.19.8"}
    common |= {"checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_config": {}, "buffer_names": []}
    total = sum(shape.numel() for shape in shapes.values())
    size = -(-total // num_ranks)
    for rank in range(num_ranks):
        generator = torch.Generator().manual_seed(rank)
        if stage == 3:
            size = sum(-(-shape.numel() // num_ranks) for shape in shapes.values())
        flats = {key: torch.rand(size, generator=generator) for key in STATES}
        moments = {key: flats[key] for key in STATES[1:]}
        base = {"state": {0: {"step": torch.tensor(7.0), **moments}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        shared = {"zero_stage": stage, "loss_scaler": None, "ds_version": "0.19.8"}
        if stage == 3:
            optimizer = {**shared, "optimizer_state_dict": base, "fp32_flat_groups": [flats["fp32"]]}
            model = {**common, "module": {name: torch.empty(0) for name in shapes}}
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        else:
            mapping = OrderedDict(_fragments(shapes, rank * size, (rank + 1) * size))
            optimizer = {**shared, "base_optimizer_state": base, "single_partition_of_fp32_groups": [flats["fp32"]]}
            optimizer |= {"param_slice_mappings": [mapping], "group_paddings": [0], "partition_count": [num_ranks]}
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    if stage < 3:
        module = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        torch.save({**common, "module": module}, folder / "mp_rank_00_model_states.pt")
    os.sync()
    return sum(path.stat().st_size for path in folder.iterdir())


def _fragments(shapes: OrderedDict[str, torch.Size], begin: int, end: int) -> Iterator[tuple[str, fragment_address]]:
    position = 0
    for name, shape in shapes.items():
        first, last = max(position, begin), min(position + shape.numel(), end)
        if first < last:
            yield name, fragment_address(numel=last - first, start=first - begin)
        position += shape.numel()


def commands(checkpoint: Path, folder: Path) -> dict[str, tuple[list[str], Path]]:
    """Command and result of each method."""
    ours, theirs = folder / OURS, folder / BASELINE
    stock = [sys.executable, ds_to_universal.__file__, "--input_folder", checkpoint, "--output_folder", theirs]
    return {
        BASELINE: ([*map(str, stock), "--inject_missing_state"], theirs),
        OURS: ([sys.executable, "-m", "datastates", "convert", "--to", "universal", str(checkpoint), str(ours)], ours),
    }


def convert(command: list[str], out: Path) -> Sample:
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        memory = space = 0
        while process.poll() is None:
            memory = max(memory, sum(_memory_of(pid) for pid in _tree(process.pid)))
            space = max(space, _space_of(out.parent, out.name))
            time.sleep(SAMPLE_SECONDS)
        ended = time.perf_counter()
        error = process.stderr.read() if process.stderr else ""
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}\n{error}")
    os.sync()
    durable = time.perf_counter()
    return Sample(ended - begin, durable - begin, memory / 2**20, max(space, _space_of(out.parent, out.name)) / 2**20)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended
        return
    for child in children:
        yield from _tree(child)


def _memory_of(pid: int) -> int:
    """Bytes in memory that are this process's share (PSS). Source: proc_pid_smaps(5)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _space_of(folder: Path, name: str) -> int:
    """Bytes in the result's folder, or the hidden one where it is made."""
    total = 0
    for top in folder.glob(f"*{name}*"):
        for directory, _, files in os.walk(top):
            for file in files:
                try:
                    total += os.lstat(os.path.join(directory, file)).st_size
                except FileNotFoundError:
                    continue
    return total


def measure(checkpoint: Path, folder: Path, repeat: int) -> list[Row]:
    """One warm-up round, then ``repeat`` rounds of both methods in turns."""
    methods = commands(checkpoint, folder)
    rows = {name: Row(name) for name in methods}
    for turn in range(repeat + 1):
        names = list(methods) if turn % 2 else list(reversed(methods))
        for name in names:
            command, out = methods[name]
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            _forget(checkpoint)
            sample = convert(command, out)
            if turn:
                rows[name].samples.append(sample)
            print(f"  {f'round {turn}' if turn else 'warm-up'}: {name} {sample.seconds:.2f} s", file=sys.stderr)
    return list(rows.values())


def _forget(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def check_equal(ours: Path, theirs: Path) -> int:
    """Both hold the same tensors; returns how many."""
    names = sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*.pt"))
    if names != sorted(str(path.relative_to(ours)) for path in ours.rglob("*.pt")):
        raise SystemExit(f"{ours} and {theirs} hold different files")
    return sum(
        _check_same(*(torch.load(top / name, weights_only=False, mmap=True) for top in (ours, theirs)), name)
        for name in names
    )


def _check_same(found: Any, expected: Any, name: str) -> int:
    if isinstance(expected, torch.Tensor):
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            raise SystemExit(f"{name} differs")
        return 1
    if isinstance(expected, dict):
        if list(map(str, sorted(found, key=str))) != list(map(str, sorted(expected, key=str))):
            raise SystemExit(f"{name} has other keys")
        return sum(_check_same(found[key], expected[key], f"{name}.{key}") for key in expected)
    if isinstance(expected, (list, tuple)):
        return sum(_check_same(a, b, name) for a, b in zip(found, expected, strict=True))
    return 0


def table(rows: list[Row], nbytes: int) -> str:
    """Markdown: medians with minimum and maximum, and ratios to DeepSpeed's converter."""
    heads = ["method", "seconds", "durable, s", "GiB/s", "memory, MiB", "space, MiB", "speed"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    base = next(row for row in rows if row.method == BASELINE)
    for row in rows:
        names = ("seconds", "durable_seconds", "memory_mib", "space_mib")
        seconds, durable, memory, space = (_spread(row.values(name)) for name in names)
        median = statistics.median(row.values("durable_seconds"))
        gain = statistics.median(base.values("durable_seconds")) / median
        cells = [row.method, seconds, durable, f"{nbytes / GIB / median:.2f}", memory, space, f"{gain:.2f} x"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="conversion to the universal layout, against ds_to_universal.py")
    parser.add_argument("--gib", type=float, default=1.0, help="fp32 weights and moments in GiB (default: 1)")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the transformer (default: 1024)")
    parser.add_argument("--stage", type=int, default=1, choices=(1, 2, 3), help="of ZeRO (default: 1)")
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks that saved (default: 4)")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write; made if missing")
    parser.add_argument("--repeat", type=int, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--json", type=Path, help="also write all samples to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    folder = options.dir.resolve() / "convert"
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint = folder / "checkpoint"
    try:
        shapes = shapes_of(int(options.gib * GIB), options.hidden)
        nbytes = make_checkpoint(checkpoint, shapes, options.stage, options.ranks)
        rows = measure(checkpoint, folder, options.repeat)
        num_tensors = check_equal(folder / OURS, folder / BASELINE)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(rows, nbytes))
    print(
        f"\nZeRO {options.stage} of {options.ranks} ranks, {nbytes / GIB:.2f} GiB in {len(shapes)} parameters;"
        f" {options.repeat} rounds, median (minimum to maximum); {num_tensors} tensors equal;"
        f" {len(os.sched_getaffinity(0))} cores."
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
