"""One rank of a job that saves through `CheckpointEngine`; the first argument names what it shall do."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import distributed

from datastates.checkpoint_engine import CheckpointEngine
from datastates.errors import CommitError, DataStatesError
from datastates.integrity import verify

RANK = int(os.environ["RANK"])


def make_engine(**settings: object) -> CheckpointEngine:
    return CheckpointEngine(
        {"host_cache_size": 2**-8, "slab_bytes": 1 << 20, "commit_timeout_seconds": 2.0, **settings}
    )


def save(engine: CheckpointEngine, folder: Path, tag: str, value: float = 1.0) -> None:
    with engine.checkpoint(str(folder / tag), tag):
        engine.save({"w": torch.full((1 << 18,), value)}, str(folder / tag / f"rank{RANK}.pt"))


def lost(engine: CheckpointEngine) -> DataStatesError:
    """The failure of what was saved last; the time it takes is bounded by the commit timeout."""
    try:
        engine.wait(persist=True, timeout=30)
    except DataStatesError as error:
        return error
    raise AssertionError("the checkpoint was committed")


def finish(engine: CheckpointEngine, folder: Path, tag: str) -> None:
    """All ranks save once more, and that is committed."""
    distributed.barrier()
    save(engine, folder, tag)
    engine.wait(persist=True, timeout=30)
    distributed.barrier()  # rank 0 writes `latest` after the commit that the others hear of
    assert (folder / "latest").read_text() == tag
    assert verify(str(folder / tag)) == []
    engine.close()
    print("ok", flush=True)


def one_raises(folder: Path) -> None:
    """Rank 1 leaves its block with an exception: rank 0 hears of it long before its time is over."""
    engine = make_engine(commit_timeout_seconds=60.0)
    save(engine, folder, "first")
    engine.wait(persist=True)
    distributed.barrier()
    begin = time.monotonic()
    if RANK == 1:
        try:
            with engine.checkpoint(str(folder / "second"), "second"):
                raise KeyError("out of luck")
        except KeyError:
            pass
    else:
        save(engine, folder, "second")
        error = lost(engine)
        assert isinstance(error, CommitError), error
        assert "out of luck" in error.ranks[1], error.ranks
        assert time.monotonic() - begin < 30
        assert (folder / "latest").read_text() == "first"
    finish(engine, folder, "third")


def one_never_saves(folder: Path) -> None:
    engine = make_engine()
    if RANK == 0:
        save(engine, folder, "first")
        error = lost(engine)
        assert isinstance(error, CommitError), error
        assert list(error.ranks) == [1]
        assert not (folder / "latest").exists()
    finish(engine, folder, "second")


def different_steps(folder: Path) -> None:
    """Both are told which rank saved what instead."""
    engine = make_engine()
    save(engine, folder, f"step{RANK}")
    error = lost(engine)
    if RANK == 0:
        assert isinstance(error, CommitError), error
        assert "step1" in error.ranks[1], error.ranks
    finish(engine, folder, "second")


def one_dies(folder: Path) -> None:
    """Rank 1 is killed inside of its block; rank 0 trains on, hears of it at once, and ends."""
    engine = make_engine(commit_timeout_seconds=600.0)
    distributed.barrier()
    if RANK == 1:
        with engine.checkpoint(str(folder / "first"), "first"):
            os.kill(os.getpid(), signal.SIGKILL)
    save(engine, folder, "first")
    error = lost(engine)
    assert isinstance(error, CommitError), error
    assert error.ranks == {1: "the trainer ended before its part was complete"}, error
    engine.close()
    print("ok", flush=True)
    os._exit(0)  # the process group has lost a rank: it cannot be taken down in order


def policies(folder: Path) -> None:
    """Only rank 0 is busy, both skip: whoever saves, saves on all ranks."""
    engine = make_engine(when_busy="skip", commit_timeout_seconds=60.0)
    save(engine, folder, "first")
    engine.wait(persist=True)
    distributed.barrier()
    flusher = engine.saver.flusher_pid
    if RANK == 0:
        os.kill(flusher, signal.SIGSTOP)
        engine.save({"n": 1}, str(folder / "lone.pt"))
    save(engine, folder, "second")
    if RANK == 0:
        os.kill(flusher, signal.SIGCONT)
    engine.wait(persist=True)
    assert not (folder / "second").exists()
    finish(engine, folder, "third")


if __name__ == "__main__":
    threading.excepthook = lambda args: (sys.__excepthook__(*args[:3]), os._exit(3))
    distributed.init_process_group("gloo")
    globals()[sys.argv[1]](Path(sys.argv[2]))
    distributed.destroy_process_group()
