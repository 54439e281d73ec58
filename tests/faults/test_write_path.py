"""Every system call of the flusher that touches storage fails, in every way that matters, once and for ever.

Each test is one call in one kind of save, and goes through the errors one after the other with one flusher process. The
outcome is always one of two: committed and right, or reported with path, errno, rank and tag. Whatever it is, `latest`
names a complete checkpoint, nothing earlier is harmed, and once the fault is gone the next save of the same process
works and no partial file stays.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from datastates.integrity import verify
from datastates.recovery import clean_leftovers
from faults.write_path import (
    ANY_RANK,
    FATAL,
    LONE_FILE,
    NEW_NAME,
    PARTIAL,
    RANK_0,
    RETRIED,
    SAME_NAME,
    Job,
    LoneJob,
    Point,
    check_error,
)
from flusher.rig import TIMEOUT, Rig, eventually, faulty, partials

COMMIT_TIMEOUT_SECONDS = 1.5  # how long a rank waits for one that cannot even tell that it has failed


@contextlib.contextmanager
def job_of(
    tmp_path: Path, kind: type[Job] = Job, num_ranks: int = 1, faulty_rank: int = 0, tag: str = ""
) -> Iterator[Job]:
    root = tmp_path / "root"
    root.mkdir()
    rules, no_rules = tmp_path / "rules", tmp_path / "no-rules"
    for path in (rules, no_rules):
        path.write_text("[]")
    with contextlib.ExitStack() as stack:
        rigs = []
        for rank in range(num_ranks):
            command = faulty(str(rules if rank == faulty_rank else no_rules))
            timeout = COMMIT_TIMEOUT_SECONDS
            rig = Rig(rank=rank, world_size=num_ranks, commit_timeout_seconds=timeout, command=command)
            rigs.append(stack.enter_context(rig))
        job = kind(root, rigs, faulty_rank, rules, tag)
        assert not any(job.save())
        job.check_committed()
        yield job


def try_all(job: Job, points: Sequence[Point], call: str, num_errors: int = 1) -> None:
    """Try each point of a call with some errors of each kind, once and for ever; over all points each error comes."""
    for number, point in enumerate(points):
        if point.call != call:
            continue
        for code in [*turned(RETRIED, number)[:num_errors], *turned(FATAL, number)[:num_errors]]:
            for times in (1, None):
                if times is None and is_left_out(job, point, code):
                    continue
                try:
                    try_one(job, point, code, times)
                except AssertionError as error:
                    message = f"{point.name}, {code} {'for ever' if times is None else 'once'}: {error}"
                    raise AssertionError(message) from error


def is_left_out(job: Job, point: Point, code: str) -> bool:
    """Of what the other ranks cannot be told, which takes them all their patience, `open` stands for all calls."""
    if (point.call, code) == ("read", "ESTALE"):
        return True  # for a reader the file is not there, as if it had never been written
    return point.is_mute and len(job.rigs) > 1 and (point.call != "open" or code in RETRIED)


def turned(codes: tuple[str, ...], number: int) -> tuple[str, ...]:
    return codes[number % len(codes) :] + codes[: number % len(codes)]


def try_one(job: Job, point: Point, code: str, times: int | None) -> None:
    job.inject(point.rule(code, times))
    errors = job.save()
    is_met, is_lost = job.is_met, any(errors)
    job.heal()
    assert is_met or point.races, "the fault did not happen"
    if is_met and not point.races:
        assert is_lost is not point.is_committed(code, times), errors
    if is_lost:
        number = errno.EBUSY if (point.call, code) == ("flock", "EAGAIN") else getattr(errno, code)
        job.check_reported(errors, number)
        job.check_earlier(point.needs_recovery)
    else:
        job.check_committed()
    check_next(job)


def check_next(job: Job) -> None:
    """The fault is gone: what it left vanishes at the latest with a recovery, and the same process saves again."""
    assert not any(job.save())
    clean_leftovers(str(job.root))
    assert partials(job.root) == []
    job.check_healed()
    job.check_committed()


def calls(points: Sequence[Point]) -> list[str]:
    return sorted({point.call for point in points})


@pytest.mark.parametrize("call", calls(LONE_FILE))
def test_a_lone_file(tmp_path: Path, call: str) -> None:
    with job_of(tmp_path, LoneJob) as job:
        try_all(job, LONE_FILE, call, num_errors=len(FATAL))


@pytest.mark.parametrize("call", calls(NEW_NAME))
def test_a_checkpoint(tmp_path: Path, call: str) -> None:
    with job_of(tmp_path) as job:
        try_all(job, NEW_NAME, call, num_errors=2)


@pytest.mark.parametrize("call", calls(SAME_NAME))
def test_a_checkpoint_that_replaces_another(tmp_path: Path, call: str) -> None:
    with job_of(tmp_path, tag="best-step") as job:
        (job.directory / "f0").chmod(0o646)  # more than the umask allows, so that it has to be set
        try_all(job, SAME_NAME, call)


@pytest.mark.parametrize("call", calls(RANK_0))
def test_rank_0_of_2(tmp_path: Path, call: str) -> None:
    with job_of(tmp_path, num_ranks=2, faulty_rank=0) as job:
        try_all(job, RANK_0, call)


@pytest.mark.parametrize("call", calls(ANY_RANK))
def test_rank_1_of_2(tmp_path: Path, call: str) -> None:
    with job_of(tmp_path, num_ranks=2, faulty_rank=1) as job:
        try_all(job, ANY_RANK, call)


def test_what_was_promised_to_rank_0_is_not_taken_back(tmp_path: Path) -> None:
    """Rank 1 cannot see any more what becomes of its durable part, and must leave it: rank 0 may commit it."""
    with job_of(tmp_path, num_ranks=2, faulty_rank=1) as job:
        directory = job.root / "last-step"
        first, second = job.rigs
        second.save(directory / "f1", b"1", "last-run")
        lost = second.commit(directory, "last-run", "last-step")
        eventually((directory / ".datastates/last-run/rank-00001.json").exists, "rank 1 is durable")
        job.inject({"call": "read", "then": "EIO"})
        check_error(lost.exception(TIMEOUT), errno.EIO, job.root, 1, "last-step")
        job.heal()
        first.save(directory / "f0", b"0", "last-run")
        first.commit(directory, "last-run", "last-step").result(TIMEOUT)
        assert verify(str(directory)) == []
        assert (directory / "f1").read_bytes() == b"1"


@pytest.mark.parametrize("times", [1, None], ids=["once", "for-ever"])
@pytest.mark.parametrize("code", ["EIO", "EACCES", "EINTR", "ESTALE"])
def test_a_partial_file_that_cannot_be_removed_goes_with_the_next_save(
    tmp_path: Path, code: str, times: int | None
) -> None:
    removal = Point("remove", "unlink", PARTIAL)
    with job_of(tmp_path) as job:
        job.inject(Point("write", "pwrite", PARTIAL).rule("EIO", 1), removal.rule(code, times))
        errors = job.save()
        job.check_reported(errors, errno.EIO)
        assert (partials(job.root) != []) is (times is None or code not in RETRIED)
        job.heal()
        assert not any(job.save())
        assert partials(job.root) == []
        job.check_committed()


@pytest.mark.parametrize("only", [PARTIAL, ".rank-00000.json.tmp", ".commit.json.tmp", ".latest.tmp"])
def test_short_writes_are_continued_and_writes_of_nothing_end(tmp_path: Path, only: str) -> None:
    with job_of(tmp_path) as job:
        job.inject({"call": "pwrite", "only": only, "then": "short", "nbytes": 1, "times": 3})
        assert not any(job.save())
        assert job.is_met
        job.check_committed()
        job.inject({"call": "pwrite", "only": only, "then": "zero"})
        job.check_reported(job.save(), errno.EIO)
        job.heal()
        check_next(job)
