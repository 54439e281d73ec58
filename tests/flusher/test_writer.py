"""The order in which the rest of the flusher, and the trainer, learn of a file's end."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path

from datastates.flusher.protocol import Answer, Durable, OpenFile
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
