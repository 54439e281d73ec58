"""A job that is started, killed and started again over the same folder, and what must hold each time.

After every kill: what the ranks were told is there, `latest` names a complete checkpoint, every byte of every
checkpoint is right and of one moment, nothing is left behind, and the next start saves and commits again.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from stress import aftermath, processes
from stress.attack import JOB_TIMEOUT_SECONDS, Attack, News
from stress.contents import Moment, tag_of
from stress.kills import SPARE_FLUSHERS, SPARE_TRAINERS, Kill, choose
from stress.mortal_flusher import Point
from stress.nursery import Nursery
from stress.trainer import Job

_NUM_STEPS = 9  # of a job that ends by itself, unless it comes to its named point
_MAX_STEPS = 100_000  # of one that is killed
_COMMIT_SECONDS = 3.0
_LOG_BYTES = 4000  # of a log that are shown


@dataclass
class Outcome:
    """What became of one kill.

    Attributes:
        violations: promises that were broken, one sentence each.
        num_killed: processes that got SIGKILL while they were alive; 0: the named point was not reached.
        num_begun: steps that the job had begun to save.
        num_lost: the last of them that are not there.
        num_recovered: folders in which the next start had something to finish or remove.
    """

    kill: Kill
    violations: list[str] = field(default_factory=list)
    num_killed: int = 0
    num_begun: int = 0
    num_lost: int = 0
    num_recovered: int = 0
    seconds: float = 0.0


class Lineage:
    """The starts of one job, one after the other, in `folder`."""

    def __init__(self, folder: str, nursery: Nursery) -> None:
        self.directory = os.path.join(folder, "checkpoints")
        os.makedirs(self.directory)
        self._folder = folder
        self._nursery = nursery
        self._promised = aftermath.Promised()
        self._num_starts = 0

    def go_on(self, kill: Kill) -> Outcome:
        """Start the job, let the kill happen, and look at what is there after it."""
        begin = time.monotonic()
        self._num_starts += 1
        outcome = Outcome(kill)
        job = self._job(kill)
        os.mkdir(job.folder)
        news = News(job.file("news"))
        trainers = self._nursery.start(job)
        with open(job.file("trainers"), "w", encoding="ascii") as file:
            file.write(" ".join(map(str, trainers)))
        try:
            self._attack(kill, job, news, trainers, outcome)
            self._look(kill, job, news, outcome)
        finally:
            processes.kill([*trainers, *processes.flushers(job.mark)])
            news.close()
        if outcome.violations:
            self._promised = aftermath.Promised()  # what is said once is not said again of every later start
            with open(job.file("log"), encoding="utf-8", errors="replace") as log:
                outcome.violations.append(f"{job.file('log')} ends:\n{log.read()[-_LOG_BYTES:]}")
        else:
            shutil.rmtree(job.folder)
        outcome.seconds = time.monotonic() - begin
        return outcome

    def _job(self, kill: Kill) -> Job:
        latest = aftermath.latest_moment(self.directory)
        first_step = 1 if latest is None else latest.step + 1
        folder = os.path.join(self._folder, f"start-{self._num_starts}")
        may_end = kill.way in SPARE_TRAINERS or kill.way.endswith(("point", "request"))
        mark = uuid.uuid4().hex
        point = None
        if kill.way.endswith("point"):
            armed, reached, trainers = (os.path.join(folder, name) for name in ("armed", "reached", "trainers"))
            victims = kill.way.split()[0]
            point = asdict(Point(kill.name, kill.number, kill.is_after, victims, armed, reached, trainers, mark))
        return Job(
            directory=self.directory,
            folder=folder,
            mark=mark,
            num_ranks=kill.num_ranks,
            start=self._num_starts,
            first_step=first_step,
            last_step=first_step + (_NUM_STEPS if may_end else _MAX_STEPS),
            # a flusher that outlives its trainer waits that long for ranks that died before they came so far
            commit_timeout_seconds=JOB_TIMEOUT_SECONDS if kill.way in SPARE_TRAINERS else _COMMIT_SECONDS,
            point=point,
            point_rank=kill.rank,
            request=kill.name if kill.way.endswith("request") else "",
            request_number=kill.number,
            request_rank=kill.rank,
        )

    def _attack(self, kill: Kill, job: Job, news: News, trainers: list[int], outcome: Outcome) -> None:
        """Let it happen, then wait until all ranks have ended."""
        attack = Attack(kill, job, news, trainers)
        attack.happen()
        outcome.num_killed = attack.num_killed
        if not attack.is_ready and kill.way != "at start":
            outcome.violations.append("this start did not commit a checkpoint")
        if not processes.wait_for_end(trainers, JOB_TIMEOUT_SECONDS):
            outcome.violations.append(f"a rank had not ended within {JOB_TIMEOUT_SECONDS:g} s")
            processes.kill(trainers)
        statuses = self._nursery.reap()
        expected = {0 if kill.way in SPARE_TRAINERS else -signal.SIGKILL}
        if kill.way.endswith(("point", "request")):
            expected.add(0)  # of a rank that came to its last step before it was killed
        if not expected.issuperset(statuses):
            outcome.violations.append(f"the ranks ended with {statuses}, expected {expected}")

    def _look(self, kill: Kill, job: Job, news: News, outcome: Outcome) -> None:
        found = outcome.violations
        if kill.is_hasty:
            outcome.num_recovered += aftermath.recover(self.directory, found)
        if not processes.wait_for_end(processes.flushers(job.mark), JOB_TIMEOUT_SECONDS):
            found.append(f"flushers {processes.flushers(job.mark)} outlive the job")
            processes.kill(processes.flushers(job.mark))
        news.take()
        self._note_promises(kill, job, news)
        found.extend(aftermath.problems_before_recovery(self.directory))
        outcome.num_recovered += aftermath.recover(self.directory, found)
        found.extend(aftermath.problems(self.directory, self._promised))
        if kill.way in SPARE_TRAINERS and job.last_step not in news.steps("committed", 0):
            found.append(f"with the flusher the checkpoint of step {job.last_step} was lost")
        begun, latest = news.steps("begun"), aftermath.latest_moment(self.directory)
        outcome.num_begun = len(begun)
        outcome.num_lost = max(max(begun, default=0) - (0 if latest is None else latest.step), 0)
        aftermath.delete_old(self.directory, self._promised)

    def _note_promises(self, kill: Kill, job: Job, news: News) -> None:
        """What a rank was told stays; what all ranks had in their host caches is committed, if the flushers live."""
        for step in news.steps("committed"):
            self._promised.commit(tag_of(step), Moment(job.start, step))
        arrived = news.steps_of_all("staged", job.num_ranks) if kill.way in SPARE_FLUSHERS else set()
        for step in arrived:
            self._promised.commit(tag_of(step), Moment(job.start, step))
        for step in news.steps("committed", 0) | arrived:  # rank 0 moves `latest` before it says so
            self._promised.move_latest(Moment(job.start, step))
        for rank in range(job.num_ranks):
            staged = news.steps("staged", rank) if kill.way in SPARE_FLUSHERS else set()
            for step in news.steps("published", rank) | staged:
                self._promised.publish(rank, Moment(job.start, step))


def run_kills(
    folder: str,
    num_kills: int,
    seed: int,
    ways: list[str] | None = None,
    tell: Callable[[int, Outcome], None] = lambda number, outcome: None,
) -> list[Outcome]:
    """Kill until that many kills have happened; a named point that was not reached does not count.

    Args:
        folder: new; on the storage that is to be tried.
        ways: keys of `kills.WAYS`, in turns; None: any, at random.
        tell: called after each start.

    Returns:
        one outcome per start, also those in which no kill happened.
    """
    chance = random.Random(seed)
    outcomes: list[Outcome] = []
    with Nursery() as nursery:
        lineage = Lineage(folder, nursery)
        while (number := sum(outcome.num_killed > 0 for outcome in outcomes)) < num_kills:
            way = ways[len(outcomes) % len(ways)] if ways else None
            outcomes.append(lineage.go_on(choose(chance, way)))
            tell(number, outcomes[-1])
    return outcomes
