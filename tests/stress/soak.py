"""Saves, deletes and fails by the thousand, and looks at whether anything grows.

One rank with its flusher, in a process of its own: ``python -m stress.soak FOLDER NUM_SAVES [SMALL_DISK]`` prints
the `Report` as JSON. Old checkpoints are deleted as a job with retention would; some saves fail on purpose.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from datastates import CheckpointEngine
from datastates.errors import CommitError, DataStatesError, StorageError

NUM_KEPT = 3
FAIL_EVERY = 5
NUM_SAMPLES = 12
SECTION = {"host_cache_size": 4 / 1024, "slab_bytes": 1 << 20, "commit_timeout_seconds": 60.0}
LIMITS = {
    "descriptors": 0,
    "threads": 0,
    "children": 0,
    "mappings": 4,  # the allocator's
    "pss_kib": 8 * 1024,  # two states of the largest size: what is free is not given back at once
    "blocks": 500,
    "flusher_descriptors": 0,
    "flusher_threads": 0,
    "flusher_mappings": 4,
    "flusher_pss_kib": 1024,
    "files": 0,
}
"""By how much each may grow from the middle of a run to its end."""

BLOCKS_PER_SAVE = 4
"""The names of settled attempts are remembered, so that none is used twice: some 100 bytes each."""

_COUNTS = (20_000, 300_000, 90_001, 500_003, 17)  # elements of the tensor of a state; alternate from save to save
_SMALL_DISK_FILL_BYTES = 64 << 10  # left free there


@dataclass(frozen=True)
class Sample:
    """What trainer and flusher hold after so many saves, all of them settled.

    Attributes:
        blocks: of Python's allocator in the trainer: grows by one with every object that is kept.
        files: on disk, folders included.
    """

    num_saves: int
    descriptors: int
    threads: int
    children: int
    mappings: int
    pss_kib: int
    blocks: int
    flusher_descriptors: int
    flusher_threads: int
    flusher_mappings: int
    flusher_pss_kib: int
    files: int


@dataclass
class Report:
    """The samples, and how the saves ended."""

    samples: list[Sample] = field(default_factory=list)
    committed: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    def drift(self) -> dict[str, int]:
        """Growth of everything sampled, once warm: the least of the last third of the run against the middle third."""
        third = len(self.samples) // 3
        middle, last = self.samples[third : 2 * third], self.samples[2 * third :]
        return {
            name: min(getattr(sample, name) for sample in last) - min(getattr(sample, name) for sample in middle)
            for name in LIMITS
        }

    def excess(self) -> dict[str, int]:
        """What has grown by more than its limit."""
        num_saves = self.samples[-1].num_saves - self.samples[-1 - len(self.samples) // 3].num_saves
        drift = self.drift()
        return {
            name: drift[name]
            for name, limit in LIMITS.items()
            if drift[name] > limit + (BLOCKS_PER_SAVE * num_saves if name == "blocks" else 0)
        }

    @classmethod
    def from_json(cls, text: str) -> Report:
        fields = json.loads(text)
        return cls(**fields | {"samples": [Sample(**sample) for sample in fields["samples"]]})


class Soak:
    """One engine and the saves made through it."""

    def __init__(self, folder: Path, small_disk: Path | None) -> None:
        self.report = Report()
        self._folder = folder
        self._engine = CheckpointEngine(SECTION)
        self._kept: list[Path] = []
        self._aborted: list[Path] = []
        (folder / "file").touch()
        self._faults: list[tuple[str, type[DataStatesError], Callable[[int], None]]] = [
            ("under a file", StorageError, self._under_a_file),
            ("a lone file under a file", StorageError, self._lone_under_a_file),
            ("an exception inside", CommitError, self._exception_inside),
        ]
        if small_disk is not None:
            ballast = max(shutil.disk_usage(small_disk).free - _SMALL_DISK_FILL_BYTES, 0)
            (small_disk / "ballast").write_bytes(bytes(ballast))
            self._small_disk = small_disk
            self._faults.append(("a full disk", StorageError, self._full_disk))

    def run(self, num_saves: int) -> None:
        for number in range(num_saves):
            if number % FAIL_EVERY == FAIL_EVERY - 1:
                self._fail(number)
            else:
                self._save(number)
            if (number + 1) % (num_saves // NUM_SAMPLES) == 0:
                self._settle()
                self.report.samples.append(self._sample(number + 1))
        self._settle()
        self._engine.close()

    def _save(self, number: int) -> None:
        """Save a checkpoint and, every other time, a lone file; wait for storage only now and then."""
        directory = self._folder / f"step{number}"
        with self._engine.checkpoint(str(directory), directory.name):
            for part in range(1 + number % 2):
                self._engine.save(state_of(number + part), str(directory / f"{part}.pt"))
        if number % 2:
            self._engine.save(state_of(number), str(self._folder / "lone.pt"))
        self._engine.wait()
        self._kept.append(directory)
        if len(self._kept) > NUM_KEPT + 4:
            self._settle()

    def _settle(self) -> None:
        """Wait until all is committed, then delete old checkpoints."""
        try:
            self._engine.wait(persist=True)
        except DataStatesError as error:
            self.report.unexpected.append(repr(error))
        for directory in self._aborted[:-1]:  # in the last one the flusher may still write why
            shutil.rmtree(directory)
        del self._aborted[:-1]
        for directory in self._kept[:-NUM_KEPT]:
            self.report.committed += (directory / ".datastates" / "commit.json").exists()
            shutil.rmtree(directory)
        del self._kept[:-NUM_KEPT]

    def _fail(self, number: int) -> None:
        """A save that must fail, and say so with the right error."""
        self._settle()
        name, expected, fault = self._faults[number // FAIL_EVERY % len(self._faults)]
        try:
            fault(number)
            self._engine.wait(persist=True)
        except expected:
            self.report.failed[name] = self.report.failed.get(name, 0) + 1
        except DataStatesError as error:
            self.report.unexpected.append(f"{name}: {error!r}")
        else:
            self.report.unexpected.append(f"{name}: no error")

    def _under_a_file(self, number: int) -> None:
        self._save_in(self._folder / "file" / f"step{number}", number)

    def _lone_under_a_file(self, number: int) -> None:
        self._engine.save(state_of(number), str(self._folder / "file" / "lone.pt"))

    def _exception_inside(self, number: int) -> None:
        directory = self._folder / f"aborted{number}"
        self._aborted.append(directory)
        try:
            with self._engine.checkpoint(str(directory), directory.name):
                self._engine.save(state_of(number), str(directory / "0.pt"))
                raise _UsersMistakeError
        except _UsersMistakeError:
            raise CommitError("aborted as asked") from None

    def _full_disk(self, number: int) -> None:
        self._save_in(self._small_disk / f"step{number}", 1)

    def _save_in(self, directory: Path, number: int) -> None:
        with self._engine.checkpoint(str(directory), directory.name):
            self._engine.save(state_of(number), str(directory / "0.pt"))
        try:
            self._engine.wait(persist=True)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _sample(self, num_saves: int) -> Sample:
        gc.collect()
        flusher = self._engine.saver.flusher_pid
        return Sample(
            num_saves=num_saves,
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            children=len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
            mappings=_count_lines("self", "maps"),
            pss_kib=_pss_kib("self"),
            blocks=sys.getallocatedblocks(),
            flusher_descriptors=len(os.listdir(f"/proc/{flusher}/fd")),
            flusher_threads=len(os.listdir(f"/proc/{flusher}/task")),
            flusher_mappings=_count_lines(str(flusher), "maps"),
            flusher_pss_kib=_pss_kib(str(flusher)),
            files=sum(1 for _ in self._folder.rglob("*")),
        )


class _UsersMistakeError(Exception):
    """Raised inside a checkpoint."""


def state_of(number: int) -> dict[str, Any]:
    return {"weight": torch.full((_COUNTS[number % len(_COUNTS)],), float(number)), "step": number, "lr": 0.1}


def _count_lines(pid: str, name: str) -> int:
    return Path("/proc", pid, name).read_bytes().count(b"\n")


def _pss_kib(pid: str) -> int:
    """Memory of a process, what it shares counted in proportion."""
    for line in Path("/proc", pid, "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise ValueError(f"/proc/{pid}/smaps_rollup has no Pss")


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    folder, num_saves = Path(arguments[0]), int(arguments[1])
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(folder, Path(arguments[2]) if len(arguments) > 2 else None)
    soak.run(num_saves)
    print(json.dumps(asdict(soak.report)))


if __name__ == "__main__":
    main(sys.argv[1:])
