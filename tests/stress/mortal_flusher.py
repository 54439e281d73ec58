"""A flusher process that dies at a named point: ``python mortal_flusher.py POINT SETTINGS``.

A point is a system call on storage or an answer to the trainer, by its name, and the how-manieth of them since
the job was armed. Who dies there: the flusher alone, its rank (trainer first), or the whole job.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datastates.flusher import process
from stress import processes

CALLS = ("open", "posix_fallocate", "pwrite", "ftruncate", "fsync", "replace", "unlink", "rmdir", "mkdir")
ANSWERS = ("Written", "Durable", "Settled")
VICTIMS = ("flusher", "rank", "job")

_open, _close = os.open, os.close  # those of `os` get replaced


@dataclass(frozen=True)
class Point:
    """Where a flusher dies, and who with it.

    Attributes:
        name: of a system call or an answer.
        number: of its occurrences, from 1.
        is_after: the call is made first.
        victims: one of `VICTIMS`.
        armed: a path; nothing counts before this file exists.
        reached: a path; made by the flusher that dies, so that no second one does.
        trainers: a path; the file has the ids of all trainers.
        mark: of the job's flushers.
    """

    name: str
    number: int
    is_after: bool
    victims: str
    armed: str
    reached: str
    trainers: str
    mark: str

    def __str__(self) -> str:
        return f"{'after' if self.is_after else 'before'} {self.name} {self.number}, kills {self.victims}"

    def strike(self) -> None:
        """Kill whoever is to die; returns only in a flusher that comes second."""
        try:
            _close(_open(self.reached, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        own = os.getpid()
        if self.victims == "rank":
            processes.kill([os.getppid()])
        elif self.victims == "job":
            with open(self.trainers, encoding="ascii") as file:
                trainers = [int(pid) for pid in file.read().split()]
            processes.kill(trainers)
            processes.kill(pid for pid in processes.flushers(self.mark) if pid != own)
        processes.kill([own])


def mortal(call: Callable[..., Any], point: Point, is_meant: Callable[..., bool]) -> Callable[..., Any]:
    """The call, but it dies when it is its turn."""
    count = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        if not is_meant(*arguments) or not os.path.exists(point.armed):
            return call(*arguments, **options)
        count += 1
        is_turn = count == point.number
        if is_turn and not point.is_after:
            point.strike()
        result = call(*arguments, **options)
        if is_turn and point.is_after:
            point.strike()
        return result

    return wrapped


def arm(point: Point) -> None:
    if point.name in CALLS:
        setattr(os, point.name, mortal(getattr(os, point.name), point, lambda *_: True))
    else:
        send = process.Channel.send
        is_meant = lambda _, message: type(message).__name__ == point.name  # noqa: E731
        process.Channel.send = mortal(send, point, is_meant)  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(Point(**json.loads(sys.argv[1])))
    process.main(sys.argv[2:])
