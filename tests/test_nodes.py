"""Parts of nodes without any job: their records, who reads them, and the way from parts to the whole."""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from datastates import load_latest
from datastates.attempt import Attempt
from datastates.attempt_folder import complete_manifests
from datastates.attempt_names import AttemptNames
from datastates.catalog import list_checkpoints
from datastates.checkpoint_engine import check_committed
from datastates.checksum import crc32
from datastates.cli.main import main
from datastates.commit import roll_forward
from datastates.config import CheckpointConfig
from datastates.errors import (
    CheckpointNotFoundError,
    ClosedError,
    CommitError,
    ConfigError,
    CorruptCheckpointError,
    StorageError,
)
from datastates.flusher.work import CommitResult, running_future
from datastates.integrity import verify
from datastates.manifest import (
    ABORTED_NAME,
    FileRecord,
    Manifest,
    attempt_directory,
    commit_path,
    read_causes,
    read_commit,
    read_manifest,
    write_manifest,
)
from datastates.node_parts import Node, NodePart, ranges_of
from datastates.nodes import following
from datastates.nodes.agreement import Agreement, agree_on_whole
from datastates.nodes.following import Following, Store
from datastates.nodes.grouping import Nodes
from datastates.partial_names import partial_path
from datastates.recovery import Recovery, recover
from datastates.saver import Saver
from datastates.tiers.first_tier import is_current
from datastates.whole_records import WHOLE_NAME, is_whole_part, mark_whole, unmark_whole

NODES = (Node("a", (0, 1)), Node("b", (2, 3)))
PARTS = NodePart(0, NODES), NodePart(1, NODES)
RUN, OLDER = "run-00000000-0001", "older-00000000-0001"
SECONDS = 30.0


def make_part(directory: Path, part: NodePart, attempt: str = RUN, commit: bool = True) -> Path:
    """A node's part of a checkpoint, as its flushers leave it."""
    folder = attempt_directory(str(directory), attempt)
    os.makedirs(folder, exist_ok=True)
    manifests = []
    for rank in part.ranks:
        data = b"%d" % rank * 100
        Path(partial_path(str(directory / f"file-{rank}.pt"), attempt)).write_bytes(data)
        record = FileRecord(f"file-{rank}.pt", len(data), 4096, (crc32(data),))
        manifest = Manifest(attempt, rank, part.world_size, directory.name, (record,), 1.0, None, part)
        write_manifest(str(directory), manifest)
        manifests.append((manifest, crc32(manifest.to_bytes())))
    if commit:
        roll_forward(str(directory), manifests, directory.name)
    return directory


# ----------------------------------------------------------------------------------------------- records


@given(st.sets(st.integers(0, 50), min_size=1))
def test_ranges_name_each_rank_once(ranks):
    fields = {"index": 0, "nodes": [{"name": "a", "ranks": ranges_of(range(51))}]}
    assert NodePart.from_fields(fields).ranks == tuple(range(51))
    rest = [rank for rank in range(51) if rank not in ranks]
    nodes = (Node("a", tuple(sorted(ranks))), *([Node("b", tuple(rest))] if rest else []))
    part = NodePart(0, nodes)
    assert NodePart.from_fields(json.loads(json.dumps(part.to_fields()))) == part
    assert part.world_size == 51


@pytest.mark.parametrize(
    ("index", "nodes"),
    [
        (2, NODES),
        (-1, NODES),
        (0, (Node("a", (0, 2)),)),
        (0, (Node("a", (0,)), Node("b", (0,)))),
        (0, (Node("a", ()),)),
    ],
)
def test_what_is_no_part_of_a_job_is_refused(index, nodes):
    with pytest.raises(ValueError, match="is no part of a job"):
        NodePart(index, nodes)


def test_the_records_say_whose_part_it_is_and_an_older_release_refuses_them(tmp_path):
    directory = str(make_part(tmp_path / "step1", PARTS[1]))
    record = read_commit(directory)
    assert record.node == PARTS[1]
    assert record.ranks == (2, 3)
    assert record.world_size == 4
    assert read_manifest(directory, record.attempt, 2)[0].node == PARTS[1]
    assert json.loads(Path(commit_path(directory)).read_bytes())["version"] == 2  # older releases know version 1 only
    assert verify(directory) == []


@pytest.mark.parametrize(
    "change",
    [{"node": None}, {"node": {"index": 5, "nodes": []}}, {"world_size": 2}, {"manifest_crc32": ["00000000"]}],
)
def test_a_damaged_record_of_a_part_is_told(tmp_path, change):
    path = Path(commit_path(str(make_part(tmp_path / "step1", PARTS[0]))))
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    with pytest.raises(CorruptCheckpointError, match=r"commit\.json"):
        read_commit(str(tmp_path / "step1"))


@pytest.mark.leaves_partial_files
def test_a_cut_commit_of_a_part_is_finished_from_the_ranks_of_the_node_alone(tmp_path):
    directory = str(make_part(tmp_path / "step1", PARTS[1], commit=False))
    assert [manifest.rank for manifest, _ in complete_manifests(directory, "run-00000000-0001")] == [2, 3]
    assert recover(directory) is Recovery.ROLLED_FORWARD
    assert read_commit(directory).node == PARTS[1]
    other = make_part(tmp_path / "step2", PARTS[1], commit=False)
    os.unlink(other / ".datastates" / "run-00000000-0001" / "rank-00002.json")
    assert complete_manifests(str(other), "run-00000000-0001") is None
    record = list_checkpoints(other)[0]
    assert record.problem == "not committed: of 2 ranks on node 1 (b) the parts of 1 are missing: 2"


# ---------------------------------------------------------------------------------------------- readers


def test_a_part_is_loaded_only_once_it_is_known_to_be_whole(tmp_path):
    directory = make_part(tmp_path / "step1", PARTS[1])
    with pytest.raises(CheckpointNotFoundError, match=r"part of node 1 of 2: whether the other nodes have theirs"):
        load_latest(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="is not loaded: part of node 1 of 2"):
        check_committed(str(directory / "file-2.pt"))
    assert not is_whole_part(str(directory))
    mark_whole(str(directory), "run-00000000-0001")
    assert is_whole_part(str(directory))
    check_committed(str(directory / "file-2.pt"))
    assert list_checkpoints(tmp_path)[0].is_complete
    (directory / ".datastates" / WHOLE_NAME).write_bytes(b"{")
    assert not is_whole_part(str(directory))
    mark_whole(str(directory), "run-00000000-0001")
    make_part(directory, PARTS[1], "run-00000000-0002")  # another save: what was known is of the one before
    assert not is_whole_part(str(directory))
    unmark_whole(str(directory))
    unmark_whole(str(directory))


def test_a_part_is_not_carried_to_other_tiers(tmp_path):
    directory = make_part(tmp_path / "step1", PARTS[0])
    mark_whole(str(directory), "run-00000000-0001")
    assert not is_current(str(directory), "run-00000000-0001")


def test_commands_say_whose_part_it_is(tmp_path):
    directory = make_part(tmp_path / "step1", PARTS[1])
    listed = CliRunner().invoke(main, ["ls", str(tmp_path), "--json"])
    assert json.loads(listed.output)[0]["part"] == "part of node 1 of 2"
    assert not json.loads(listed.output)[0]["is_complete"]
    mark_whole(str(directory), "run-00000000-0001")
    assert "complete, part of node 1 of 2" in CliRunner().invoke(main, ["ls", str(tmp_path)]).output
    verified = CliRunner().invoke(main, ["verify", str(directory)], env={"COLUMNS": "300"})
    assert verified.exit_code == 0, verified.output
    assert "part of node 1 of 2" in verified.output
    (directory / "file-3.pt").unlink()
    verified = CliRunner().invoke(main, ["verify", str(directory)], env={"COLUMNS": "300"})
    assert verified.exit_code != 0
    assert "file-3.pt" in verified.output


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="a node's part alone is not carried on"):
        CheckpointConfig(host_cache_bytes=2**26, shared_directory=False, tiers=["/a", "/b"])
    with pytest.raises(ConfigError, match="DataStatesWriter needs one"):
        CheckpointConfig(host_cache_bytes=2**26, shared_directory=False).require_shared_directory("DataStatesWriter")


# ------------------------------------------------------------------------------- from parts to the whole


class Ranks:
    """The first ranks of both nodes, and the second of node 1, in this process, over one store."""

    def __init__(self, folder: Path, timeout: float = SECONDS) -> None:
        self.store = distributed.HashStore()
        self.folders = [folder / "a", folder / "b"]
        numbers = ((0, 0), (1, 2), (1, 3))
        self.following = [Following(PARTS[node], rank, lambda: self.store, timeout) for node, rank in numbers]
        self.attempts = [self.attempt("step1", node) for node, _ in numbers]

    def attempt(self, tag: str, node: int) -> Attempt:
        directory = make_part(self.folders[node] / tag, PARTS[node])
        return Attempt("run-00000000-0001", str(directory), str(directory), tag, update_latest=True)

    def follow(self, number: int, part: Future[CommitResult]) -> Future[CommitResult]:
        return self.following[number].follow(self.attempts[number], part)

    def close(self) -> None:
        for one in self.following:
            one.close(SECONDS)


@contextmanager
def ranks_in(folder: Path, timeout: float = SECONDS):
    ranks = Ranks(folder, timeout)
    try:
        yield ranks
    finally:
        ranks.close()


def done(error: BaseException | None = None) -> Future[CommitResult]:
    future = running_future(CommitResult)
    if error is None:
        future.set_result(CommitResult("run-00000000-0001", "path", "step1", 1, 1))
    else:
        future.set_exception(error)
    return future


def test_it_is_whole_when_the_last_node_has_committed(tmp_path):
    with ranks_in(tmp_path) as ranks:
        late = running_future(CommitResult)
        wholes = [ranks.follow(0, done()), ranks.follow(1, late), ranks.follow(2, done())]
        ranks.store.wait(["run-00000000-0001/part/0"])
        assert not any(whole.done() for whole in wholes)
        assert not is_whole_part(ranks.attempts[0].path)
        late.set_result(done().result())
        assert [whole.result(SECONDS).nbytes for whole in wholes] == [1, 1, 1]
        assert all(is_whole_part(attempt.path) for attempt in ranks.attempts)
        assert [(folder / "latest").read_text() for folder in ranks.folders] == ["step1", "step1"]


def test_a_failed_part_is_told_on_all_nodes_at_once(tmp_path):
    with ranks_in(tmp_path) as ranks:
        error = StorageError("the disk is full")
        wholes = [ranks.follow(0, done()), ranks.follow(1, done(error)), ranks.follow(2, done())]
        assert wholes[1].exception(SECONDS) is error
        for number in (0, 2):
            found = wholes[number].exception(SECONDS)
            assert isinstance(found, CommitError)
            assert "step1 is not whole: node 1 (b): the disk is full" in str(found)
            assert found.ranks == {2: "the disk is full"}
        assert not any((folder / "latest").exists() for folder in ranks.folders)


def test_what_fails_while_node_zero_looks_is_not_called_whole(tmp_path):
    with ranks_in(tmp_path) as ranks:
        store = ranks.store

        class Looking:
            set, get = store.set, store.get
            has_looked = False

            def check(self, keys):
                found = store.check(keys)
                if keys[0].endswith("/failed") and not self.has_looked:
                    self.has_looked = True  # the other node's answer comes after this very look
                    ranks.store = store
                    ranks.follow(1, done(StorageError("the disk is full"))).exception(SECONDS)
                    store.wait(["run-00000000-0001/known/1"])
                return found

        ranks.store = Looking()
        found = ranks.follow(0, done()).exception(SECONDS)
        assert "node 1 (b): the disk is full" in str(found)


def test_all_ranks_of_a_node_name_the_node_that_has_failed(tmp_path):
    with ranks_in(tmp_path) as ranks:
        ranks.following[0].give_up(ranks.attempts[0], CommitError("pinned"))
        found = [ranks.follow(number, done()).exception(SECONDS) for number in (1, 2)]
        assert [str(error).partition(": ")[2] for error in found] == ["node 0 (a): pinned"] * 2


def test_who_gives_up_is_not_waited_for(tmp_path):
    with ranks_in(tmp_path) as ranks:
        ranks.following[0].give_up(ranks.attempts[0], CommitError("pinned"))
        assert "node 0 (a): pinned" in str(ranks.follow(1, done()).exception(SECONDS))


def test_a_node_that_does_not_come_is_named(tmp_path):
    with ranks_in(tmp_path, timeout=0.2) as ranks:
        found = ranks.follow(0, done()).exception(SECONDS)
        assert "node 1 (b): it has not committed its part within 0.2 s" in str(found)


def test_a_node_zero_that_does_not_answer_is_not_waited_for(tmp_path):
    with ranks_in(tmp_path, timeout=0.2) as ranks:
        found = ranks.follow(1, done()).exception(SECONDS)
        assert "whether all nodes have committed is not known within 0.2 s; this node's part is committed" in str(found)


def test_a_store_that_is_gone_is_told(tmp_path):
    with ranks_in(tmp_path) as ranks:

        class Gone:
            def check(self, *_):
                raise distributed.DistNetworkError("connection reset")

            set = get = check

        ranks.store = Gone()
        found = ranks.follow(1, done()).exception(SECONDS)
        assert isinstance(found, CommitError)
        assert "the job's store, which rank 0 keeps, cannot be reached: connection reset" in str(found)


class Stuck:
    """A store that the network has cut off: calls end when it comes back."""

    def __init__(self, store: distributed.Store) -> None:
        self.store, self.is_back = store, threading.Event()

    def check(self, keys):
        assert self.is_back.wait(SECONDS)
        return self.store.check(keys)

    def set(self, key, value):
        assert self.is_back.wait(SECONDS)
        self.store.set(key, value)

    def get(self, key):
        return self.store.get(key)


def test_a_store_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "ANSWER_SECONDS", 0.05)
    with ranks_in(tmp_path, timeout=0.05) as ranks:
        ranks.store, store = (stuck := Stuck(ranks.store)), ranks.store
        found = ranks.follow(1, done()).exception(SECONDS)
        assert "has not answered within 0.05 s; this node's part is committed, the next start" in str(found)
        error = StorageError("the disk is full")
        ranks.attempts[1] = ranks.attempt("step2", 1)
        assert ranks.follow(1, done(error)).exception(SECONDS) is error
        stuck.is_back.set()
        store.wait(["run-00000000-0001/failed"])  # the other node hears of it, though late


def test_close_does_not_wait_for_a_store_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "ANSWER_SECONDS", 0.05)
    with ranks_in(tmp_path) as ranks:
        ranks.store = (stuck := Stuck(ranks.store))
        wholes = ranks.follow(1, done()), ranks.follow(2, done())
        ranks.following[1].close()
        ranks.following[2].close(3600.0)
        assert [type(whole.exception(0)) for whole in wholes] == [ClosedError] * 2
        stuck.is_back.set()


def test_what_cannot_be_put_on_record_is_told_to_the_ranks_of_the_node(tmp_path):
    with ranks_in(tmp_path) as ranks:
        os.mkdir(Path(ranks.attempts[1].path) / ".datastates" / WHOLE_NAME)
        wholes = [ranks.follow(number, done()) for number in range(3)]
        assert wholes[0].exception(SECONDS) is None
        assert isinstance(wholes[1].exception(SECONDS), StorageError)
        assert WHOLE_NAME in str(wholes[2].exception(SECONDS))
        os.rmdir(Path(ranks.attempts[1].path) / ".datastates" / WHOLE_NAME)
        first = ranks.attempts[1].path
        ranks.attempts = [ranks.attempt("step2", node) for node in (0, 1, 1)]
        assert ranks.follow(1, done()).exception(SECONDS) is None
        assert is_whole_part(first)  # it is recorded with the next one


def test_close_ends_the_thread_and_what_is_open(tmp_path):
    with ranks_in(tmp_path) as ranks:
        whole = ranks.follow(0, done())
        ranks.close()
        assert isinstance(whole.exception(SECONDS), ClosedError)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("datastates-nodes")]
        assert isinstance(ranks.follow(0, done()).exception(0), ClosedError)


def test_a_rank_tells_that_its_node_fails_where_the_first_one_is_gone(tmp_path):
    with ranks_in(tmp_path) as ranks:
        error = CommitError("rank 2: the trainer ended before its part was complete")
        assert ranks.follow(2, done(error)).exception(SECONDS) is error
        found = ranks.follow(0, done()).exception(SECONDS)
        assert "node 1 (b): rank 2: the trainer ended before its part was complete" in str(found)


def test_what_a_node_does_not_wait_for_any_more_is_whole_on_none(tmp_path):
    with ranks_in(tmp_path) as ranks:
        hasty = Following(PARTS[1], 2, lambda: ranks.store, 0.05)
        try:
            found = hasty.follow(ranks.attempts[1], done()).exception(SECONDS)
            assert "is not known within 0.05 s" in str(found)
            late = ranks.follow(0, done()).exception(SECONDS)
            assert "step1 is not whole: node 1 (b)" in str(late) and "is not known within 0.05 s" in str(late)
            assert not (ranks.folders[0] / "latest").exists()
        finally:
            hasty.close(SECONDS)


def test_a_rank_that_cannot_tell_what_is_there_tells_the_others(tmp_path):
    store = distributed.HashStore()

    class Stored(Nodes):
        def store(self) -> Store:
            return store

    directory = tmp_path / "step1"
    (directory / ".datastates" / "commit.json").mkdir(parents=True)  # it cannot be read
    config = CheckpointConfig(host_cache_bytes=2**24, pin_host_cache=False, shared_directory=False)
    saver = Saver(config, rank=0, world_size=4, run_id="run", nodes=Stored(OneRank(0, 4), PARTS[0], "run"))
    try:
        with pytest.raises(StorageError, match="cannot read"):
            saver.begin(str(directory), "step1", update_latest=True)
        attempt = AttemptNames("run", 0).of_checkpoint("step1")
        store.wait([f"{attempt}/failed"])
        assert "cannot read" in store.get(f"{attempt}/failed").decode()
    finally:
        saver.close(SECONDS)
    assert "cannot read" in read_causes(str(directory), attempt, ABORTED_NAME)[0]


# ----------------------------------------------------------------------------------- what nodes find at a start


class OneRank:
    """What a rank of several, each a thread of this process, knows of them all."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier | None = None, shared: Any = None) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._shared = barrier, shared

    def gather(self, value: object) -> list[object]:
        self._shared[self.rank] = value
        self._barrier.wait()
        found = [self._shared[rank] for rank in range(self.size)]
        self._barrier.wait()
        return found


def agreed(folders: list[Path]) -> Agreement:
    """What the nodes whose disks these are find out together, each a thread with one rank."""
    nodes = tuple(Node("abcd"[index], (index,)) for index in range(len(folders)))
    barrier = threading.Barrier(len(folders), timeout=SECONDS)
    shared: dict[int, object] = {}

    def agree(index: int) -> Agreement:
        return agree_on_whole(
            Nodes(OneRank(index, len(folders), barrier, shared), NodePart(index, nodes), "run"), str(folders[index])
        )

    with ThreadPoolExecutor(len(folders)) as pool:
        results = list(pool.map(agree, range(len(folders))))
    assert all(found == results[0] for found in results)
    return results[0]


def test_a_disk_with_the_part_of_another_save_is_not_taken_for_a_part_of_the_whole(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder, part in zip(folders, (*PARTS, PARTS[1]), strict=True):
        make_part(folder / "step1", part, OLDER if folder == folders[2] else RUN)
    mark_whole(str(folders[2] / "step1"), OLDER)
    assert agreed(folders).whole == {"step1"}
    assert [is_whole_part(str(folder / "step1")) for folder in folders] == [True, True, False]


def test_parts_of_two_saves_under_one_name_are_no_whole(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder, part, attempt in zip(folders, PARTS, (RUN, OLDER), strict=True):
        mark_whole(str(make_part(folder / "step1", part, attempt)), attempt)
    found = agreed(folders)
    assert found.whole == frozenset()
    assert "has the part of another save" in found.missing["step1"]
    assert not any(is_whole_part(str(folder / "step1")) for folder in folders)
    shutil.rmtree(folders[1])
    make_part(folders[1] / "step1", PARTS[1], RUN)
    assert agreed(folders) == Agreement(frozenset({"step1"}), {})
    assert all(is_whole_part(str(folder / "step1")) for folder in folders)
