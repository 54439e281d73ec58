"""Several ranks, each with a flusher of its own, commit one checkpoint together or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastates.errors import CommitError, StorageError
from datastates.integrity import verify
from datastates.manifest import committed_files, read_commit
from datastates.recovery import Recovery, recover
from flusher.rig import SLAB, TIMEOUT, Rig, eventually, faulty, image_of, partials

IMAGES = [image_of(3 * SLAB + rank, rank) for rank in range(2)]


@contextlib.contextmanager
def ranks(*options: dict[str, object], world_size: int = 2) -> Iterator[list[Rig]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Rig(rank=rank, world_size=world_size, **(options[rank] if options else {})))
            for rank in range(world_size)
        ]


def test_both_parts_make_a_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "s1"
    with ranks() as rigs:
        rigs[0].save(directory / "f0", IMAGES[0])
        first = rigs[0].commit(directory)
        late = rigs[1].open(directory / "sub" / "f1", IMAGES[1])
        second = rigs[1].commit(directory)
        manifest = directory / ".datastates" / "a-1" / "rank-00000.json"
        eventually(manifest.exists, "rank 0 is durable")
        assert not first.done() and not (tmp_path / "latest").exists()
        eventually(lambda: len(partials(directory)) == 2, "rank 1 has begun")
        assert not (directory / "f0").exists()
        rigs[1].send(late, IMAGES[1])
        results = [future.result(TIMEOUT) for future in (first, second)]
    assert results[0] == results[1]
    assert results[0].nbytes == sum(map(len, IMAGES)) and results[0].num_files == 2
    assert (directory / "f0").read_bytes() == IMAGES[0]
    assert (directory / "sub" / "f1").read_bytes() == IMAGES[1]
    assert set(committed_files(str(directory))) == {"f0", "sub/f1"}
    assert (tmp_path / "latest").read_bytes() == b"step"
    assert verify(str(directory)) == []


def test_a_rank_without_files(tmp_path: Path) -> None:
    with ranks() as rigs:
        rigs[1].save(tmp_path / "s1" / "f", IMAGES[1])
        futures = [rig.commit(tmp_path / "s1", latest=False) for rig in rigs]
        assert {future.result(TIMEOUT).num_files for future in futures} == {1}
    assert verify(str(tmp_path / "s1")) == []
    assert not (tmp_path / "latest").exists()


def test_a_failed_rank_is_named(tmp_path: Path) -> None:
    rule = {"call": "fsync", "then": "EIO", "only": "", "first": 1, "times": 1}
    with ranks({}, {"command": faulty(json.dumps([rule]))}) as rigs:
        for rank, rig in enumerate(rigs):
            rig.save(tmp_path / "s1" / f"f{rank}", IMAGES[rank])
        futures = [rig.commit(tmp_path / "s1") for rig in rigs]
        assert isinstance(futures[1].exception(TIMEOUT), StorageError)
        error = futures[0].exception(TIMEOUT)
        assert isinstance(error, CommitError)
        assert list(error.ranks) == [1] and "Input/output error" in str(error)
    assert partials(tmp_path) == [] and not (tmp_path / "latest").exists()


def test_an_abort_of_one_rank_reaches_the_other(tmp_path: Path) -> None:
    with ranks() as rigs:
        rigs[1].save(tmp_path / "s1" / "f1", IMAGES[1])
        waiting = rigs[1].commit(tmp_path / "s1")
        eventually((tmp_path / "s1" / ".datastates" / "a-1" / "rank-00001.json").exists, "rank 1 is durable")
        rigs[0].client.abort("a-1", "torn", str(tmp_path / "s1"))
        error = waiting.exception(TIMEOUT)
        assert isinstance(error, CommitError) and error.ranks == {0: "torn"}
    assert partials(tmp_path) == []


@pytest.mark.parametrize("failing", [1, 2])
def test_nobody_waits_for_a_first_rank_that_has_not_come_once_another_has_failed(tmp_path: Path, failing: int) -> None:
    directory, waiting = tmp_path / "s1", 3 - failing
    with ranks(world_size=3) as rigs:
        rigs[waiting].save(directory / "f", IMAGES[0])
        futures = [rigs[waiting].commit(directory)]
        eventually((directory / f".datastates/a-1/rank-0000{waiting}.json").exists, "the rank has promised its part")
        rigs[failing].client.abort("a-1", "its planner raised", str(directory))
        assert isinstance(error := futures[0].exception(TIMEOUT), CommitError)
        assert error.ranks == {failing: "its planner raised"}
        assert f"rank {failing}: its planner raised" in str(error)
        late = rigs[0].commit(directory).exception(TIMEOUT)
        assert isinstance(late, CommitError) and late.ranks == {failing: "its planner raised"}
    assert partials(tmp_path) == [] and recover(str(directory)) is Recovery.CLEANED


def test_ranks_that_fail_at_the_same_time_leave_one_whole_reason(tmp_path: Path) -> None:
    directory, failing = tmp_path / "s1", range(1, 6)
    with ranks(world_size=6) as rigs:
        for number in range(20):
            attempt = f"a-{number}"
            for rank in failing:
                rigs[rank].client.abort(attempt, f"rank {rank} fails", str(directory))
            told = [rigs[rank].client.publish(attempt).exception(TIMEOUT) for rank in failing]
            assert [str(error) for error in told] == [f"attempt {attempt} was aborted: rank {r} fails" for r in failing]
            error = rigs[0].commit(directory, attempt).exception(TIMEOUT)
            assert isinstance(error, CommitError) and list(error.ranks.values()) == [
                f"rank {r} fails" for r in error.ranks
            ]
        assert not list(directory.rglob(".*.tmp"))


@pytest.mark.parametrize("has_file", [False, True])
def test_a_trainer_that_ends_before_its_part_is_complete_is_told_to_the_others_at_once(
    tmp_path: Path, has_file: bool
) -> None:
    directory = tmp_path / "s1"
    with ranks() as rigs:
        rigs[0].save(directory / "f0", IMAGES[0])
        waiting = rigs[0].commit(directory)
        rigs[1].client.begin("a-1", str(directory))
        if has_file:
            rigs[1].send(rigs[1].open(directory / "f1", IMAGES[1]), IMAGES[1], 0, 1)
        rigs[1].client.close(TIMEOUT)
        error = waiting.exception(TIMEOUT)
        assert isinstance(error, CommitError)
        assert error.ranks == {1: "the trainer ended before its part was complete"}
    assert partials(tmp_path) == []


def test_another_flusher_knows_of_a_checkpoint_that_was_begun(tmp_path: Path) -> None:
    directory = tmp_path / "s1"
    with ranks() as rigs:
        rigs[0].save(directory / "f0", IMAGES[0])
        waiting = rigs[0].commit(directory)
        file = rigs[1].open(directory / "f1", IMAGES[1])
        rigs[1].client.begin("a-1", str(directory))
        first = rigs[1].client.pid
        os.kill(first, signal.SIGKILL)
        rigs[1].send(file, IMAGES[1], 0, 1)
        eventually(lambda: rigs[1].client.pid not in (0, first), "there is another flusher")
        rigs[1].client.close(TIMEOUT)
        assert isinstance(error := waiting.exception(TIMEOUT), CommitError)
        assert list(error.ranks) == [1]


def test_a_rank_alone_leaves_no_record_of_what_it_has_not_completed(tmp_path: Path) -> None:
    with Rig() as rig:
        rig.client.begin("a-1", str(tmp_path / "s1"))
    assert not (tmp_path / "s1").exists()


def test_a_promised_part_is_not_taken_back(tmp_path: Path) -> None:
    with ranks() as rigs:
        file = rigs[0].open(tmp_path / "s1" / "f0", IMAGES[0])
        rigs[1].save(tmp_path / "s1" / "f1", IMAGES[1])
        futures = [rig.commit(tmp_path / "s1") for rig in rigs]
        eventually((tmp_path / "s1" / ".datastates" / "a-1" / "rank-00001.json").exists, "rank 1 is durable")
        rigs[1].client.abort("a-1", "too late")
        rigs[0].send(file, IMAGES[0])
        for future in futures:
            future.result(TIMEOUT)
    assert verify(str(tmp_path / "s1")) == []


def test_a_missing_rank_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with ranks({"commit_timeout_seconds": 0.05}, {}) as rigs:
        rigs[0].save(tmp_path / "s1" / "f0", IMAGES[0])
        error = rigs[0].commit(tmp_path / "s1").exception(TIMEOUT)
        assert isinstance(error, CommitError) and list(error.ranks) == [1]
        assert partials(tmp_path) == []
        rigs[1].save(tmp_path / "s1" / "f1", IMAGES[1])
        late = rigs[1].commit(tmp_path / "s1").exception(TIMEOUT)
        assert isinstance(late, CommitError) and "within 0.05 s" in str(late)
    assert partials(tmp_path) == []


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_rank_does_not_wait_for_others_in_a_folder_that_is_gone(tmp_path: Path, waiting: int) -> None:
    with ranks() as rigs:
        rigs[waiting].save(tmp_path / "s1" / "f", IMAGES[0])
        future = rigs[waiting].commit(tmp_path / "s1")
        promise = tmp_path / "s1" / ".datastates" / "a-1" / f"rank-{waiting:05d}.json"
        eventually(promise.exists, "the rank has promised its part")
        shutil.rmtree(tmp_path / "s1")
        error = future.exception(TIMEOUT)
        assert isinstance(error, StorageError) and error.errno == errno.ENOENT
        assert f"{tmp_path}/s1 was removed" in str(error)
        assert not (tmp_path / "s1").exists()
        rigs[waiting].save(tmp_path / "s2" / "f", IMAGES[1], "a-2")
        rigs[1 - waiting].commit(tmp_path / "s2", "a-2", "s2")
        assert rigs[waiting].commit(tmp_path / "s2", "a-2", "s2").result(TIMEOUT).num_files == 1


def test_commits_keep_their_order(tmp_path: Path) -> None:
    with Rig() as rig:
        slow = rig.open(tmp_path / "s1" / "f", IMAGES[0], "a-1")
        first = rig.commit(tmp_path / "s1", "a-1", "s1")
        rig.save(tmp_path / "s2" / "f", IMAGES[1], "a-2").durable.result(TIMEOUT)
        second = rig.commit(tmp_path / "s2", "a-2", "s2")
        assert not second.done() and read_commit(str(tmp_path / "s2")) is None
        rig.send(slow, IMAGES[0])
        first.result(TIMEOUT)
        second.result(TIMEOUT)
    assert (tmp_path / "latest").read_text() == "s2"


def test_saving_again_keeps_the_old_checkpoint_until_all_are_durable(tmp_path: Path) -> None:
    directory = tmp_path / "s1"
    with ranks() as rigs:
        for attempt in ("a-1", "a-2"):
            for rank, rig in enumerate(rigs):
                rig.save(directory / f"f{rank}", IMAGES[rank] + attempt.encode(), attempt)
            futures = [rigs[0].commit(directory, attempt)]
            if attempt == "a-2":
                eventually((directory / ".datastates" / "a-2" / "rank-00000.json").exists, "rank 0 is durable")
                assert read_commit(str(directory)).attempt == "a-1"
                assert verify(str(directory)) == []
            futures.append(rigs[1].commit(directory, attempt))
            for future in futures:
                future.result(TIMEOUT)
    assert verify(str(directory)) == []
    assert (directory / "f1").read_bytes() == IMAGES[1] + b"a-2"
    assert read_commit(str(directory)).attempt == "a-2"
    assert "a-2" in os.listdir(directory / ".datastates")
