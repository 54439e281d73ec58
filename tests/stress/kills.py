"""What can be done to a job: which of its processes get SIGKILL, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from stress.mortal_flusher import ANSWERS, CALLS

WAYS = {
    # kill: weight
    "all trainers": 6,
    "one trainer": 4,
    "one flusher": 3,
    "all flushers": 3,
    "one rank": 1,
    "everything": 4,
    "stopped trainers": 2,
    "stopped flushers": 2,
    "stopped everything": 1,
    "at start": 3,
    "trainer at request": 4,
    "flusher at point": 5,
    "rank at point": 1,
    "job at point": 8,
}
"""Who gets SIGKILL, and how often that is tried. *Stopped*: SIGSTOP some time before."""

SPARE_FLUSHERS = ("all trainers", "one trainer", "stopped trainers", "trainer at request")
SPARE_TRAINERS = ("one flusher", "all flushers", "stopped flushers", "flusher at point")
_RARE = ("mkdir", "rmdir", "unlink", "Commit", "Publish")  # a few of them per step at most
_ONLY_RANK_0 = ("replace", "unlink", "rmdir")  # which commits and clears up; the others hardly do any of these
REQUESTS = ("OpenFile", "SealTable", "FlushSlab", "Publish", "Commit")


@dataclass(frozen=True)
class Kill:
    """What is to be done to one start of the job.

    Attributes:
        rank: of the victim, where there is one.
        num_steps: how many more steps are begun before the moment, ...
        delay_seconds: ... and how much later it is.
        lag_seconds: between SIGSTOP and SIGKILL; until the launcher kills the ranks that are left.
        is_hasty: the next start recovers while flushers of this one still work.
        name: of the named point.
        number: of its occurrences, from 1.
    """

    way: str
    num_ranks: int
    rank: int
    num_steps: int
    delay_seconds: float
    lag_seconds: float
    is_hasty: bool
    name: str
    number: int
    is_after: bool

    def __str__(self) -> str:
        if self.way.endswith("point"):
            where = f" {'after' if self.is_after else 'before'} {self.name} {self.number}"
        elif self.way.endswith("request"):
            where = f" {self.name} {self.number}"
        else:
            where = f" {self.num_steps} steps and {self.delay_seconds * 1000:.0f} ms on"
        hasty = ", next start is hasty" if self.is_hasty else ""
        return f"{self.way}{where}, rank {self.rank} of {self.num_ranks}{hasty}"


def choose(chance: random.Random, way: str | None = None, num_ranks: int | None = None) -> Kill:
    """A kill of the given way, or any."""
    way = way or chance.choices(list(WAYS), list(WAYS.values()))[0]
    num_ranks = num_ranks or chance.choice((1, 1, 1, 1, 2, 2, 2, 3, 4))
    name = chance.choice(REQUESTS if way.endswith("request") else (*CALLS, *ANSWERS))
    return Kill(
        way=way,
        num_ranks=num_ranks,
        rank=0 if name in _ONLY_RANK_0 else chance.randrange(num_ranks),
        num_steps=chance.randrange(1, 5),
        delay_seconds=chance.uniform(0, 0.06) if way != "at start" else chance.uniform(0, 0.8),
        lag_seconds=chance.uniform(0, 0.1),
        is_hasty=way in SPARE_FLUSHERS and chance.random() < 0.5,
        name=name,
        number=chance.randrange(1, 4 if name in _RARE else 20),
        is_after=chance.random() < 0.5,
    )
