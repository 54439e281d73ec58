"""What saving costs on this machine: a state of a given size, saved lazily a few times, beside the raw disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch

from datastates.advice import HEADROOM
from datastates.checkpoint_engine import CheckpointEngine
from datastates.config import GIB
from datastates.doctor.disk import DiskMeasurement, measure_disk
from datastates.errors import ConfigError, StorageError
from datastates.figures import figure
from datastates.reading import Progress
from datastates.system_calls import patiently

TENSOR_BYTES = 64 << 20
"""Size of the tensors of the state, as in a model of some billion parameters."""

_FOLDER_PREFIX = ".datastates-bench-"


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Medians over the saves but the first, which pays for fresh memory.

    Attributes:
        nbytes: of the state.
        blocked_seconds: the call of ``save()``.
        staged_seconds: from its begin until the state might be changed; training that computes for so long between
            two optimizer steps never waits.
        durable_seconds: from its begin until the file was durable and visible.
        disk: what the same folder takes from a plain writer.
    """

    nbytes: int
    num_saves: int
    blocked_seconds: float
    staged_seconds: float
    durable_seconds: float
    disk: DiskMeasurement

    @property
    def nbytes_per_second(self) -> float:
        return self.nbytes / self.durable_seconds

    @property
    def sustainable_seconds(self) -> float:
        """Advised interval between two saves: the time until one is durable, and some headroom."""
        return self.durable_seconds * HEADROOM


def bench(
    directory: str,
    nbytes: int,
    *,
    num_saves: int = 4,
    section: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure saving a state of ``nbytes`` under a folder; takes that much memory and twice that room on the disk.

    Files are made in a hidden folder of their own, which is removed whatever happens.

    Args:
        directory: on the disk to measure; it must be there.
        nbytes: size of the state.
        num_saves: how many saves, at least 2.
        section: settings as in ``datastates_ckpt``; None: a host cache of the state's size.
        progress: called with the number of bytes that have become durable since the last call.

    Raises:
        ConfigError: ``nbytes`` or ``num_saves`` is too small.
        StorageError: no such folder, or no room.
    """
    if nbytes < 1 or num_saves < 2:
        raise ConfigError(f"cannot measure {num_saves} saves of {nbytes} bytes: at least 2 saves of 1 byte")
    status = patiently(os.statvfs, directory) if os.path.isdir(directory) else None
    if status is None:
        raise StorageError(f"{directory} is no folder", path=directory)
    free = status.f_bavail * status.f_frsize
    if free < 2 * nbytes:
        raise StorageError(
            f"{directory}: {figure(free / GIB)} GiB are free, {figure(2 * nbytes / GIB)} needed", path=directory
        )
    disk = measure_disk(directory)
    settings = {"host_cache_size": max(nbytes * 1.05 / GIB, 2**-5)} if section is None else section
    state = _state_of(nbytes)
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=directory)
    try:
        with CheckpointEngine(settings, rank=0) as engine:
            engine.wait()
            times = [_save(engine, state, folder, progress, nbytes) for _ in range(num_saves)]
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
    blocked, staged, durable = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return BenchResult(nbytes, num_saves, blocked, staged, durable, disk)


def _state_of(nbytes: int) -> dict[str, torch.Tensor]:
    sizes = [min(TENSOR_BYTES, nbytes - begin) for begin in range(0, nbytes, TENSOR_BYTES)]
    return {f"layer{n}": torch.full((size,), n % 251, dtype=torch.uint8) for n, size in enumerate(sizes)}


def _save(
    engine: CheckpointEngine,
    state: dict[str, torch.Tensor],
    folder: str,
    progress: Progress | None,
    nbytes: int,
) -> tuple[float, float, float]:
    path = os.path.join(folder, "state.pt")
    begin = time.perf_counter()
    engine.save(state, path)
    blocked = time.perf_counter() - begin
    engine.wait()
    staged = time.perf_counter() - begin
    engine.wait(persist=True)
    durable = time.perf_counter() - begin
    os.unlink(path)
    if progress is not None:
        progress(nbytes)
    return blocked, staged, durable
