"""How the cost of a checkpoint grows with the number of ranks.

    python benchmarks/ranks.py --dir build/bench

Real ranks: so many processes save parts of one state as one checkpoint; the time from the first ``save()`` to the
commit, and how long ``save()`` blocked. Simulated ranks: the folder that so many ranks would leave, each with one file
and its manifest, made by this process; then what rank 0's flusher does: read all manifests, give all files their names,
write the commit record. That part is serial, and all that grows: ranks otherwise do not wait for each other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from datastates.commit import roll_forward
from datastates.config import CheckpointConfig
from datastates.manifest import FileRecord, Manifest, attempt_directory, manifest_path, read_manifest
from datastates.partial_names import partial_path
from datastates.saver import Saver

NBYTES = 512 * 2**20
SAVES = 5


def real(num_ranks: int, folder: Path) -> dict[str, Any]:
    """Medians over the saves of the slowest rank, in seconds."""
    context = multiprocessing.get_context("spawn")
    barrier, queue, run_id = context.Barrier(num_ranks), context.Queue(), uuid.uuid4().hex[:8]
    arguments = (num_ranks, str(folder), run_id, barrier, queue)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    samples = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    slowest = [[max(values) for values in zip(*save, strict=True)] for save in zip(*samples, strict=True)]
    blocked, committed = (statistics.median(values) for values in zip(*slowest, strict=True))
    return {"ranks": num_ranks, "blocked": blocked, "committed": committed}


def _rank(rank: int, num_ranks: int, folder: str, run_id: str, barrier: Any, queue: Any) -> None:
    nbytes = NBYTES // num_ranks
    state = {str(index): torch.rand(nbytes // 8 // 4) for index in range(8)}
    config = CheckpointConfig(host_cache_bytes=max(nbytes, 2**26), fast_cache_init=False)
    saver = Saver(config, rank=rank, world_size=num_ranks, run_id=run_id)
    samples = []
    for index in range(SAVES + 1):
        barrier.wait()
        begin = time.monotonic()
        directory = f"{folder}/step{index % 2}"
        attempt = saver.begin(directory, f"step{index % 2}", update_latest=True)
        saver.save(state, f"{directory}/rank{rank}.pt", attempt=attempt)
        committed = saver.commit(attempt)
        blocked = time.monotonic() - begin
        committed.result()
        if index > 0:
            samples.append((blocked, time.monotonic() - begin))
    saver.close()
    queue.put(samples)


def simulated(num_ranks: int, folder: Path) -> dict[str, Any]:
    """Seconds that rank 0 spends on so many ranks' parts, by what it does."""
    directory, attempt = folder / f"ranks{num_ranks}", f"{uuid.uuid4().hex[:8]}-0001"
    shutil.rmtree(directory, ignore_errors=True)
    Path(attempt_directory(str(directory), attempt)).mkdir(parents=True)
    for rank in range(num_ranks):
        name = f"rank{rank:05d}.pt"
        Path(partial_path(str(directory / name), attempt)).write_bytes(b"x" * 64)
        files = (FileRecord(name, 64, 2**24, (0,)),)
        manifest = Manifest(attempt, rank, num_ranks, "step1", files, time.time())
        Path(manifest_path(str(directory), attempt, rank)).write_bytes(manifest.to_bytes())
    begin = time.monotonic()
    manifests = [read_manifest(str(directory), attempt, rank) for rank in range(num_ranks)]
    read = time.monotonic()
    roll_forward(str(directory), [found for found in manifests if found is not None], "step1")
    end = time.monotonic()
    shutil.rmtree(directory)
    return {"ranks": num_ranks, "read": read - begin, "commit": end - read}


def measure(folder: Path, real_ranks: list[int], simulated_ranks: list[int]) -> dict[str, Any]:
    return {
        "nbytes": NBYTES,
        "real": [real(count, folder) for count in real_ranks],
        "simulated": [simulated(count, folder) for count in simulated_ranks],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="the cost of a checkpoint by the number of ranks")
    parser.add_argument("--dir", type=Path, default=Path("build/bench"), help="where to write; no tmpfs")
    options = parser.parse_args()
    print(json.dumps(measure(options.dir / "ranks", [1, 2, 4], [10, 100, 1000, 10_000]), indent=2))


if __name__ == "__main__":
    main()
