"""The order in which the rest of the flusher, and the trainer, learn of a file's end."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path

from datastates.errors import StorageError
from datastates.flusher.protocol import Answer, Durable, FlushSlab, OpenFile, Written
from datastates.flusher.writer import FileState, IncomingFile, WritePipeline
from flusher.rig import SLAB, TIMEOUT


def spawn(name: str, body: Callable[[], None]) -> None:
    threading.Thread(target=body, name=name, daemon=True).start()


def test_the_trainer_is_told_before_a_file_may_be_published(tmp_path: Path) -> None:
    """Killed in between, the next flusher would look for the partial file of a published one."""
    file = IncomingFile(OpenFile(1, "a-1", str(tmp_path / "f"), 0, SLAB, 0, 0, False, True))
    told: list[tuple[Answer, FileState]] = []
    ended = threading.Event()

    def send(answer: Answer) -> bool:
        told.append((answer, file.state))
        return True

    pipeline = WritePipeline(mmap.mmap(-1, SLAB), send, lambda _: ended.set(), lambda: None, spawn, 1)
    pipeline.start(file)
    assert ended.wait(TIMEOUT)
    assert told == [(Durable(1), FileState.RECEIVING)]
    assert file.state is FileState.DURABLE
    assert file.partial is not None
    file.partial.remove()


def test_written_slabs_are_reported_an_eighth_of_the_cache_at_a_time(tmp_path: Path) -> None:
    """And all of a file's before its end, since the trainer then takes the file for complete."""
    num_slabs = 19
    file = IncomingFile(OpenFile(1, "a-1", str(tmp_path / "f"), num_slabs * SLAB, SLAB, 0, 0, False, True))
    told: list[Answer] = []
    ended = threading.Event()

    def send(answer: Answer) -> bool:
        told.append(answer)
        return True

    pipeline = WritePipeline(mmap.mmap(-1, 64 * SLAB), send, lambda _: ended.set(), lambda: None, spawn, 1)
    pipeline.start(file)
    for index in range(num_slabs):
        pipeline.add(file, FlushSlab(1, index, index * SLAB, SLAB))
    assert ended.wait(TIMEOUT)
    reports = [[slab.index for slab in answer.slabs] for answer in told if isinstance(answer, Written)]
    assert reports == [[*range(8)], [*range(8, 16)], [16, 17, 18]]
    assert told[-1] == Durable(1)
    assert file.partial is not None
    file.partial.remove()


def test_a_small_cache_gets_each_slab_back_at_once(tmp_path: Path) -> None:
    file = IncomingFile(OpenFile(1, "a-1", str(tmp_path / "f"), 2 * SLAB, SLAB, 0, 0, False, True))
    told: list[Answer] = []
    is_told = threading.Event()

    def send(answer: Answer) -> bool:
        told.append(answer)
        is_told.set()
        return True

    pipeline = WritePipeline(mmap.mmap(-1, 4 * SLAB), send, lambda _: None, lambda: None, spawn, 1)
    pipeline.start(file)
    pipeline.add(file, FlushSlab(1, 0, SLAB, SLAB))
    assert is_told.wait(TIMEOUT), "the trainer may be waiting for this very slab"
    assert [[slab.cache_offset for slab in answer.slabs] for answer in told if isinstance(answer, Written)] == [[SLAB]]
    pipeline.fail(file, StorageError("given up"))
