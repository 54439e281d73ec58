"""A trainer in small: a cache with a slab allocator, and a client of a real flusher process."""

from __future__ import annotations

import mmap
import os
import queue
import random
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from datastates.events import Event, EventLog
from datastates.flusher.client import FlusherClient, FlushFile
from datastates.plan import Seal

SLAB = 64 * 1024
TIMEOUT = 60.0
FAULTY = Path(__file__).with_name("faulty_flusher.py")


class Rig:
    """Owns cache and client; `send` puts slabs of bytes through them, waiting for free memory."""

    def __init__(self, *, num_slabs: int = 8, rank: int = 0, world_size: int = 1, **options: Any) -> None:
        self.nbytes = num_slabs * SLAB
        self.fd = os.memfd_create("cache", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self.memory = mmap.mmap(self.fd, self.nbytes)
        self.free: queue.Queue[int] = queue.Queue()
        for index in range(num_slabs):
            self.free.put(index * SLAB)
        self.num_slabs = num_slabs
        self.events: list[Event] = []
        self.client = FlusherClient(
            self.fd,
            self.nbytes,
            rank=rank,
            world_size=world_size,
            on_slab_free=self.free.put,
            events=EventLog(rank, listener=self.events.append),
            **options,
        )

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.client.close(TIMEOUT)
        self.memory.close()
        os.close(self.fd)

    def open(self, path: Path | str, image: bytes, attempt: str = "a-1", seals: tuple[Seal, ...] = ()) -> FlushFile:
        return self.client.open_file(str(path), len(image), SLAB, seals, attempt)

    def send(self, file: FlushFile, image: bytes, begin: int = 0, end: int | None = None) -> None:
        """Send the slabs ``[begin, end)`` of an image."""
        for index in range(begin, -(-len(image) // SLAB) if end is None else end):
            self.send_slab(file, image, index)

    def send_slab(self, file: FlushFile, image: bytes, index: int) -> None:
        offset = self.free.get(timeout=TIMEOUT)
        piece = image[index * SLAB : (index + 1) * SLAB]
        self.memory[offset : offset + len(piece)] = piece
        self.memory[offset + len(piece) : offset + SLAB] = b"\xee" * (SLAB - len(piece))
        self.client.flush_slab(file, index, offset, len(piece))

    def save(self, path: Path | str, image: bytes, attempt: str = "a-1", seals: tuple[Seal, ...] = ()) -> FlushFile:
        file = self.open(path, image, attempt, seals)
        self.send(file, image)
        return file

    def commit(self, directory: Path, attempt: str = "a-1", tag: str = "step", latest: bool = True) -> Future[Any]:
        return self.client.commit(attempt, str(directory), step_or_tag=tag, update_latest=latest)

    def checkpoint(self, directory: Path, files: dict[str, bytes], attempt: str) -> Any:
        """Save files and commit; blocks until committed."""
        for name, image in files.items():
            self.save(directory / name, image, attempt)
        return self.commit(directory, attempt, tag=directory.name).result(TIMEOUT)

    def wait_all_free(self) -> None:
        offsets = {self.free.get(timeout=TIMEOUT) for _ in range(self.num_slabs)}
        assert len(offsets) == self.num_slabs
        for offset in offsets:
            self.free.put(offset)


def faulty(spec: str) -> tuple[str, ...]:
    """The command of a flusher in which system calls misbehave as the JSON says; see faulty_flusher.py."""
    return (sys.executable, str(FAULTY), spec)


def image_of(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def partials(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob(".*.partial"))


def eventually(condition: Any, what: str) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.005)
