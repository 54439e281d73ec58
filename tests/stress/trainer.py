"""The life of one rank of a stress job: save after save, telling what has happened."""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from datastates import CheckpointEngine, machinery
from datastates.errors import DataStatesError
from datastates.flusher import supervisor
from datastates.flusher.client import FlusherClient
from stress.contents import LONE, PARTS, Moment, file_name, state_of, tag_of
from stress.mortal_flusher import Point
from stress.processes import MARK

HOST_CACHE_GIB = 4 / 1024
SLAB_BYTES = 1 << 20
SETTLE_EVERY = 4  # ranks have no collectives here; waiting for a commit now and then keeps them together
MORTAL_FLUSHER = Path(__file__).with_name("mortal_flusher.py")


@dataclass(frozen=True)
class Job:
    """One start of a job.

    Attributes:
        directory: where the checkpoints go.
        folder: the job's own, for logs and for files by which its processes know of each other.
        mark: in the environment of its flushers.
        request: a trainer dies before it sends this request of the flusher's protocol, ...
        request_number: ... the how-manieth since the job is ready, ...
        request_rank: ... on this rank.
    """

    directory: str
    folder: str
    mark: str
    num_ranks: int
    start: int
    first_step: int
    last_step: int
    commit_timeout_seconds: float
    point: dict[str, Any] | None = None
    point_rank: int = 0
    request: str = ""
    request_number: int = 1
    request_rank: int = 0

    def file(self, name: str) -> str:
        return os.path.join(self.folder, name)


def run(job: Job, rank: int) -> None:
    """Save until the last step, then close. Ends by an exception only where nothing can be saved."""
    news = os.open(job.file("news"), os.O_WRONLY | os.O_CLOEXEC)
    torch.set_num_threads(1)
    os.environ[MARK] = job.mark
    engine = _make_engine(job, rank)

    def tell(word: str, step: int) -> None:
        os.write(news, f"{word} {rank} {step}\n".encode())

    for step in range(job.first_step, job.last_step + 1):
        tell("begun", step)
        is_first = step == job.first_step
        try:
            engine.saver.raise_failure()  # else entering the checkpoint would, and the other ranks wait for this one
        except DataStatesError as error:
            sys.stderr.write(f"rank {rank} before step {step}: {error!r}\n")
        try:
            _save(job, engine, rank, step, tell)
            if is_first or step % SETTLE_EVERY == 0:
                engine.wait(persist=True)
        except DataStatesError as error:
            sys.stderr.write(f"rank {rank} step {step}: {error!r}\n")
            if is_first:
                raise
        if is_first:
            tell("ready", step)
            if job.request and rank == job.request_rank:
                _die_before_request(job.request, job.request_number)
    try:
        engine.close()
    except DataStatesError as error:
        sys.stderr.write(f"rank {rank} at close: {error!r}\n")
    tell("closed", job.last_step)


def _make_engine(job: Job, rank: int) -> CheckpointEngine:
    if job.point is not None and rank == job.point_rank:
        point = Point(**job.point)
        command = (sys.executable, str(MORTAL_FLUSHER), json.dumps(asdict(point)))
        machinery.FlusherClient = partial(FlusherClient, command=command)  # type: ignore[misc, assignment]
    if job.num_ranks > 1:
        store = f"file://{job.file('store')}"
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=job.num_ranks)
    section = {
        "host_cache_size": HOST_CACHE_GIB,
        "slab_bytes": SLAB_BYTES,
        "commit_timeout_seconds": job.commit_timeout_seconds,
        "close_timeout_seconds": 60.0,
    }
    engine = CheckpointEngine(section, rank)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return engine


def _save(job: Job, engine: CheckpointEngine, rank: int, step: int, tell: Any) -> None:
    moment = Moment(job.start, step)
    tag = tag_of(step)
    folder = os.path.join(job.directory, tag)
    with engine.checkpoint(folder, tag) as attempt:
        for part in PARTS:
            engine.save(state_of(moment, rank, part), os.path.join(folder, file_name(rank, part)))
    attempt.committed.add_done_callback(partial(_tell_outcome, tell, "committed", step))
    lone = os.path.join(job.directory, LONE, file_name(rank, LONE))
    handle = engine.saver.save(state_of(moment, rank, LONE), lone)
    handle.committed.add_done_callback(partial(_tell_outcome, tell, "published", step))
    engine.wait()
    tell("staged", step)


def _tell_outcome(tell: Any, word: str, step: int, done: Future[Any]) -> None:
    tell(word if done.exception() is None else f"not-{word}", step)


def _die_before_request(name: str, number: int) -> None:
    """SIGKILL this process instead of sending the so-manieth request of that name from now on."""
    encode, count = supervisor.encode, 0

    def mortal(message: Any) -> bytes:
        nonlocal count
        count += type(message).__name__ == name
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(message)

    supervisor.encode = mortal  # type: ignore[assignment]
