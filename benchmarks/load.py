"""How fast does a file come back: datastates against the loaders of torch and safetensors, and against the bare disk.

    python benchmarks/load.py --gib 1 --repeat 5 --dir /scratch

Every method loads the same state, in turns: in each repetition all methods once, in another order each time, after one
round that does not count. What a method finds depends on the one before it: memory that was in use a moment ago is had
faster, on a virtual machine several times. Each load runs in a process forked for it, so that its memory is fresh and
its peak is its own. Cold: the pages of the file are dropped from the cache before; warm: the file has just been read.
What a method maps is copied to memory of its own within the time, because a mapped tensor has not been loaded yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import safetensors.torch
import torch
from save import GIB, file_system, machine, make_state

import datastates
from datastates import reading

BLOCK_BYTES = 16 << 20
BASELINE = "raw O_DIRECT, 8 threads"
SHOWN = 1 << 20
SUFFIXES = (".pt", ".safetensors")

Load = Callable[[str], object]


@dataclass(frozen=True)
class Method:
    """One way to load; ``suffix`` says which file, ``is_raw`` that nothing is loaded but bytes."""

    name: str
    suffix: str
    load: Load
    is_raw: bool = False


@dataclass(frozen=True)
class Sample:
    """Seconds, and the most memory that the process had beyond what it had before, in bytes."""

    seconds: float
    peak_nbytes: int


def raw_one(path: str) -> object:
    """One thread, large blocks, memory as the system gives it."""
    nbytes = os.path.getsize(path)
    memory = mmap.mmap(-1, reading.page_ceil(nbytes))
    _read_direct(path, memory, range(0, nbytes, BLOCK_BYTES), BLOCK_BYTES, 1)
    return memory


def raw_many(path: str) -> object:
    """As many threads, blocks and large pages as `datastates.reading` uses, and nothing else."""
    nbytes = os.path.getsize(path)
    memory = reading.fresh_memory(reading.page_ceil(nbytes))
    _read_direct(path, memory, range(0, nbytes, reading.TILE_BYTES), reading.TILE_BYTES, reading.NUM_THREADS)
    return memory


def _read_direct(path: str, memory: mmap.mmap, begins: range, block_bytes: int, num_threads: int) -> None:
    descriptor, view = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC), memoryview(memory)
    expected = os.path.getsize(path)
    try:
        with ThreadPoolExecutor(num_threads) as executor:

            def read(begin: int) -> int:
                return os.preadv(descriptor, [view[begin : begin + block_bytes]], begin)

            if sum(executor.map(read, begins)) != expected:
                raise OSError(f"{path}: a read came back short")
    finally:
        os.close(descriptor)


def materialised(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def by_fastsafetensors(path: str) -> object:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: [path]})
    buffer = loader.copy_files_to_device()
    return {name: buffer.get_tensor(name).clone() for name in buffer.key_to_rank_lidx}


def by_runai(path: str) -> object:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def into_existing(path: str) -> object:
    """The targets have their memory already, which is what `into` is for; see `_child`."""
    return datastates.load(path, into=_targets, check=False)


_targets: dict[str, torch.Tensor] = {}


def methods() -> list[Method]:
    found = [
        Method("raw O_DIRECT, 1 thread", ".pt", raw_one, is_raw=True),
        Method(BASELINE, ".pt", raw_many, is_raw=True),
        Method(BASELINE, ".safetensors", raw_many, is_raw=True),
        Method("datastates.load", ".pt", datastates.load),
        Method("datastates.load, check=False", ".pt", lambda path: datastates.load(path, check=False)),
        Method("datastates.load, into=, check=False", ".pt", into_existing),
        Method("torch.load", ".pt", lambda path: torch.load(path, weights_only=True)),
        Method(
            "torch.load, mmap, copied", ".pt", lambda path: materialised(torch.load(path, mmap=True, weights_only=True))
        ),
        Method("datastates.load", ".safetensors", datastates.load),
        Method(
            "safetensors.load_file, copied",
            ".safetensors",
            lambda path: materialised(safetensors.torch.load_file(path)),
        ),
    ]
    if importlib.util.find_spec("fastsafetensors"):
        found.append(Method("fastsafetensors, copied", ".safetensors", by_fastsafetensors))
    if importlib.util.find_spec("runai_model_streamer"):
        found.append(Method("runai-model-streamer, copied", ".safetensors", by_runai))
    return found


def run_once(method: Method, path: Path, is_cold: bool) -> Sample:
    """One load in a process of its own, when the page cache holds the file, or nothing of any of these files."""
    for suffix in SUFFIXES:
        set_cache(path.with_suffix(suffix), is_cold or suffix != path.suffix)
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(method, str(path), send))
    process.start()
    send.close()
    try:
        answer = receive.recv()
    except EOFError:
        raise SystemExit(f"{method.name}: the process ended without an answer") from None
    finally:
        process.join()
    if isinstance(answer, str):
        raise SystemExit(f"{method.name}: {answer}")
    return Sample(*answer)


def _child(method: Method, path: str, send: Connection) -> None:
    try:
        if method.load is into_existing:  # memory of this process: writing to the parent's would copy its pages
            _targets.update({name: torch.ones_like(tensor) for name, tensor in _targets.items()})
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
        begin = time.perf_counter()
        state = method.load(path)
        seconds = time.perf_counter() - begin
        send.send((seconds, _memory("VmHWM") - before))
        if not method.is_raw and method.load is not into_existing:
            check_loaded(state)
    except BaseException as error:  # noqa: BLE001  # the parent says it
        send.send(f"{type(error).__name__}: {error}")
    finally:
        send.close()
        os._exit(0)


def check_loaded(state: object) -> None:
    if not isinstance(state, dict) or not state:
        raise TypeError(f"a {type(state).__name__} was loaded")


def _memory(field: str) -> int:
    """Source: proc_pid_status(5)."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def set_cache(path: Path, is_cold: bool) -> None:
    """Drop the file's pages, or read all of them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        if is_cold:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(descriptor, BLOCK_BYTES):
                pass
    finally:
        os.close(descriptor)


def measure(found: list[Method], folder: Path, repeat: int) -> dict[tuple[str, str, bool], list[Sample]]:
    """One round that does not count, then ``repeat`` rounds of all methods in turns, cold and warm."""
    samples: dict[tuple[str, str, bool], list[Sample]] = {}
    cases = [(method, is_cold) for is_cold in (True, False) for method in found]
    for turn in range(repeat + 1):
        random.Random(turn).shuffle(cases)
        for method, is_cold in cases:
            if method.is_raw and not is_cold:
                continue
            sample = run_once(method, folder / f"state{method.suffix}", is_cold)
            if turn:
                samples.setdefault((method.name, method.suffix, is_cold), []).append(sample)
            heat = "cold" if is_cold else "warm"
            print(f"  round {turn}, {heat}: {method.name} ({method.suffix}) {sample.seconds:.2f} s", file=sys.stderr)
    return samples


def table(samples: dict[tuple[str, str, bool], list[Sample]], nbytes: int) -> str:
    """Markdown: medians with minimum and maximum."""
    bases = {  # each file for itself: where on the disk a file lies makes a difference
        suffix: statistics.median(one.seconds for one in found)
        for (name, suffix, _), found in samples.items()
        if name == BASELINE
    }
    lines = [
        "| method | file | cold, s | cold, GiB/s | share of the disk | warm, s | peak beyond the state, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, suffix in dict.fromkeys((method.name, method.suffix) for method in methods()):
        cold, warm = samples[name, suffix, True], samples.get((name, suffix, False), [])
        median = statistics.median(one.seconds for one in cold)
        extra = statistics.median(one.peak_nbytes for one in cold) - (0 if "into=" in name else nbytes)
        cells = [name, suffix, _spread(cold), f"{nbytes / GIB / median:.2f}", f"{bases[suffix] / median:.0%}"]
        lines.append(f"| {' | '.join([*cells, _spread(warm), f'{extra / SHOWN:.0f}'])} |")
    return "\n".join(lines)


def _spread(samples: list[Sample]) -> str:
    seconds = [one.seconds for one in samples]
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})" if seconds else ""


def write_files(folder: Path, state: dict[str, torch.Tensor]) -> None:
    with datastates.CheckpointEngine({"host_cache_size": 0.5}, rank=0) as engine:
        for suffix in SUFFIXES:
            engine.save(state, str(folder / f"state{suffix}"))
            engine.wait(persist=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="datastates.load against other loaders and the bare disk")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state in GiB (default: 1)")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write; made if missing; no tmpfs")
    parser.add_argument("--repeat", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--json", type=Path, help="also write all samples to this file")
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    if file_system(options.dir)[0] in ("tmpfs", "ramfs"):
        parser.error(f"{options.dir} is in memory: name a folder on a disk with --dir")
    nbytes = int(options.gib * GIB) // 80 * 80
    state = make_state(nbytes)
    try:
        write_files(options.dir, state)
        _targets.update(state)
        samples = measure(methods(), options.dir, options.repeat)
    finally:
        for suffix in SUFFIXES:
            (options.dir / f"state{suffix}").unlink(missing_ok=True)
    print(table(samples, nbytes))
    about = machine(options.dir)
    print(f"\n{nbytes / GIB:.2f} GiB, {options.repeat} rounds, median (minimum to maximum).")
    print("; ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items()))
    if options.json:
        rows = [
            {"method": name, "file": suffix, "cold": is_cold, "seconds": [one.seconds for one in found]}
            for (name, suffix, is_cold), found in samples.items()
        ]
        options.json.write_text(json.dumps({"machine": about, "nbytes": nbytes, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
