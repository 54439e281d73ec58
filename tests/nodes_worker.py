"""What the ranks of jobs do whose nodes share no directory; `test_nodes_jobs` starts them, two ranks per node."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it at its first step: once for all that are forked
from torch import distributed

import datastates
from checkpointer_worker import LOG, raised
from datastates import Checkpointer
from datastates.catalog import list_checkpoints
from datastates.errors import CommitError, ConfigError, DataStatesError, MismatchError, StateError, TopologyError
from datastates.manifest import commit_path
from datastates.nodes import following
from integrations.fork_server import announce

RANKS_PER_NODE = 2
RANK, NODE = 0, 0  # set by each rank
_NEW_NAMESPACES = 0x00020000, 0x40000000  # CLONE_NEWNS, CLONE_NEWNET of sched.h
SECONDS = 30.0


def enter(place: str) -> Path:
    """Become a rank of a job in its place; gives the directory of its node.

    Args:
        place: JSON: ``folder``, ``address`` of rank 0's store, ``interface`` of the network, ``holders``: processes in
            whose namespaces the nodes are (none: all on this one), ``names`` of the nodes there.
    """
    global RANK, NODE
    wanted = json.loads(place)
    RANK = int(os.environ["RANK"])
    num_ranks = int(os.environ["WORLD_SIZE"])
    NODE = RANK * len(wanted["holders"] or wanted["names"]) // num_ranks
    threading.excepthook = lambda args: (sys.__excepthook__(*args[:3]), os._exit(3))
    os.environ["GLOO_SOCKET_IFNAME"] = wanted["interface"]
    directory = Path(wanted["folder"]) / "run"
    if wanted["holders"]:
        libc = ctypes.CDLL(None, use_errno=True)
        for kind, flag in zip(("mnt", "net"), _NEW_NAMESPACES, strict=True):
            with open(f"/proc/{wanted['holders'][NODE]}/ns/{kind}", "rb") as namespace:
                assert libc.setns(namespace.fileno(), flag) == 0, os.strerror(ctypes.get_errno())
    else:
        os.environ["DATASTATES_NODE_NAME"] = wanted["names"][NODE]
        directory = Path(wanted["folder"]) / wanted["names"][NODE] / "run"
    distributed.init_process_group("gloo", f"tcp://{wanted['address']}", rank=RANK, world_size=num_ranks)
    return directory


def make(directory: Path, **options: Any) -> Checkpointer:
    settings = {"host_cache_gb": 2**-7, "pin_host_cache": False, "commit_timeout_seconds": SECONDS, **options}
    return Checkpointer(directory, shared_directory=False, replicated={"model"}, **settings)


def state(step: int) -> dict[str, Any]:
    """Replicated tensors, more than a rank's share, and what each rank has for itself."""
    model = {f"layer{index}": torch.full((1000,), float(step + index)) for index in range(5)}
    return {"model": model, "own": torch.full((10,), float(100 * RANK + step))}


def is_state(found: Any, step: int) -> bool:
    expected = state(step)
    return bool(torch.equal(found["own"], expected["own"])) and all(
        torch.equal(found["model"][name], tensor) for name, tensor in expected["model"].items()
    )


def until(claim: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not claim():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.005)


def stop_flusher(checkpointer: Checkpointer, number: int) -> None:
    """Stop or continue the flusher of a rank of node 1; all ranks are here before and after."""
    distributed.barrier()
    if NODE == 1:
        os.kill(checkpointer._saver.flusher_pid, number)
    distributed.barrier()


def be_killed(place: str) -> None:
    """One is whole; of the next node 0 commits its part, and its ranks are killed before node 1 has its own."""
    directory = enter(place)
    checkpointer = make(directory)
    checkpointer.save(10, state(10), block=True)
    assert (directory / "latest").read_text() == "step10"
    stop_flusher(checkpointer, signal.SIGSTOP)
    handle = checkpointer.save(20, state(20))
    checkpointer.wait_staged()
    if NODE == 0:
        until((directory / "step20" / ".datastates" / "commit.json").exists)
        assert not handle.committed.done()
        assert (directory / "latest").read_text() == "step10"
        record = list_checkpoints(directory / "step20")[0]
        assert record.problem.startswith("part of node 0 of 2: whether the other nodes have theirs"), record.problem
        assert checkpointer.steps() == [10]
    distributed.barrier()
    announce(f"{os.getpid()} {checkpointer._saver.flusher_pid}")
    if NODE == 0:
        signal.pause()  # until it is killed
    error = handle.committed.exception(SECONDS)
    assert isinstance(error, CommitError), error
    assert "this node's part is committed, the next start finds out" in str(error), error
    raised(CommitError, checkpointer.close)
    os._exit(0)  # there is nobody left to take leave of


def be_cut_off(place: str) -> None:
    """The network between the nodes goes for good while node 1 commits its part."""
    directory = enter(place)
    following.ANSWER_SECONDS = following.OWN_NODE_SECONDS = 0.5
    checkpointer = make(directory, commit_timeout_seconds=1.0)
    checkpointer.save(10, state(10), block=True)
    stop_flusher(checkpointer, signal.SIGSTOP)
    handle = checkpointer.save(20, state(20))
    checkpointer.wait_staged()
    announce(str(checkpointer._saver.flusher_pid))
    error = handle.committed.exception(SECONDS)
    told = (
        "node 1 ("
        if NODE == 0
        else "the job's store, which rank 0 keeps, has not answered within 1 s; this node's part"
    )
    assert told in str(error), error
    assert (directory / "latest").read_text() == "step10"
    raised(CommitError, checkpointer.close)
    if RANK == 0:
        until((directory.parent / "all-have-ended").exists)  # as long as there is a store, it is the network's fault
    os._exit(0)


def resume(place: str, step: int, then: int) -> None:
    """Load the newest, which is that of a step; save another."""
    directory = enter(place)
    with make(directory) as checkpointer:
        target = {"model": state(0)["model"], "own": torch.zeros(10)}
        assert checkpointer.resume(target) == step
        assert is_state(target, step)
        assert (directory / "latest").read_text() == f"step{step}"
        checkpointer.save(then, state(then), block=True)
        assert (directory / "latest").read_text() == f"step{then}"
        assert datastates.load_latest(directory).tag == f"step{then}"
    distributed.barrier()
    print(LOG.text, flush=True)


def save_alone(place: str) -> None:
    """One rank per node: each has all of what is replicated, and that it is the same is compared all the same."""
    with make(enter(place)) as checkpointer:
        other = {**state(1), "model": {"layer0": torch.zeros(2 + RANK)}}
        told = raised(StateError, checkpointer.save, 1, other)
        assert "'model' is declared as replicated, and is not the same on all ranks" in told, told
        distributed.barrier()
        checkpointer.save(2, state(2), block=True)
        found = checkpointer.load_latest()
        assert found is not None
        assert is_state(found.state, 2)
        assert set(torch.load(Path(found.path) / f"rank-{RANK:05d}.pt")["model"]) == set(state(2)["model"])
        distributed.barrier()


def find_nothing(place: str) -> None:
    with make(enter(place)) as checkpointer:
        print(raised(FileNotFoundError, checkpointer.resume, state(0)), flush=True)
        distributed.barrier()


def act(place: str) -> None:
    """What does not end a job, one case after another."""
    directory = enter(place)
    for case in (
        replicated_entries_are_whole_on_each_node,
        each_node_keeps_the_last_ones,
        a_slow_node_loses_one_checkpoint,
        a_failing_rank_is_told_on_all_nodes,
        what_is_whole_is_not_replaced,
        the_youngest_is_named_where_a_clock_was_set_back,
        directories_must_be_those_of_nodes,
        engines_save_parts,
    ):
        distributed.barrier()
        case(directory.with_name(case.__name__))
        print(f"ok {case.__name__}", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def replicated_entries_are_whole_on_each_node(directory: Path) -> None:
    with make(directory) as checkpointer:
        checkpointer.save(1, state(1), block=True)
        own = [2 * NODE, 2 * NODE + 1]
        names = {path.name for path in (directory / "step1").glob("*.pt")}
        assert names == {"checkpoint.pt", *(f"rank-{rank:05d}.pt" for rank in own)}, names
        parts = [torch.load(directory / "step1" / f"rank-{rank:05d}.pt")["model"] for rank in own]
        there = [{name for name, value in part.items() if value is not None} for part in parts]
        assert there[0] | there[1] == set(state(1)["model"]), there
        assert not there[0] & there[1], there
        found = checkpointer.load_latest()
        assert found is not None
        assert is_state(found.state, 1)
        told = raised(MismatchError, checkpointer.load_latest, {"modle": 0})
        assert "modle" in told, told


def each_node_keeps_the_last_ones(directory: Path) -> None:
    with make(directory, keep_last=2) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, state(step), block=True)
            distributed.barrier()
        assert checkpointer.steps() == [3, 4], checkpointer.steps()


def a_slow_node_loses_one_checkpoint(directory: Path) -> None:
    with make(directory, keep_last=1, commit_timeout_seconds=1.0) as checkpointer:
        checkpointer.save(1, state(1), block=True)
        stop_flusher(checkpointer, signal.SIGSTOP)
        handle = checkpointer.save(2, state(2))
        if NODE == 0:
            told = str(handle.committed.exception(SECONDS))
            assert "step2 is not whole: node 1 (b): it has not committed its part within 1 s" in told, told
            assert checkpointer.steps() == [1]
        stop_flusher(checkpointer, signal.SIGCONT)
        assert "node 1 (b): it has not committed" in str(handle.committed.exception(SECONDS))
        assert checkpointer.stats.num_lost == 1
        distributed.barrier()
        checkpointer.save(3, state(3))
        checkpointer.wait()
        distributed.barrier()
        assert checkpointer.steps() == [3], checkpointer.steps()
        assert not (directory / "step2").exists()  # a part of what is not whole is in the way once a younger one is


def a_failing_rank_is_told_on_all_nodes(directory: Path) -> None:
    with make(directory) as checkpointer:
        checkpointer.save(1, state(1), block=True)
        if RANK == 3:
            raised(DataStatesError, checkpointer.save, 2, {**state(2), "own": lambda: None})
        else:
            error = checkpointer.save(2, state(2)).committed.exception(SECONDS)
            assert isinstance(error, CommitError), error
            assert "StateError" in str(error), error
            assert NODE == 1 or "node 1 (b)" in str(error), error
        distributed.barrier()
        checkpointer.save(3, state(3), block=True)
        distributed.barrier()
        assert checkpointer.steps() == [1, 3]


def what_is_whole_is_not_replaced(directory: Path) -> None:
    with make(directory) as checkpointer:
        checkpointer.save(1, state(1), block=True)
        distributed.barrier()
        error = checkpointer.save(1, state(2)).committed.exception(SECONDS)
        assert "step1 is whole on all nodes, and is not replaced" in str(error), error
        found = checkpointer.load(1)
        assert is_state(found.state, 1)
        checkpointer.save(2, state(2), block=True)
        distributed.barrier()


def the_youngest_is_named_where_a_clock_was_set_back(directory: Path) -> None:
    with make(directory) as checkpointer:
        checkpointer.save(1, state(1), block=True)
        distributed.barrier()
        record = Path(commit_path(str(directory / "step1")))
        if RANK == 2:
            fields = json.loads(record.read_bytes())
            record.write_text(json.dumps(fields | {"committed_at": fields["committed_at"] + 10**6}))
    with make(directory) as checkpointer:
        checkpointer.save(2, state(2), block=True)
        distributed.barrier()
        if RANK == 2:  # as it is where the node has died before it knew
            (directory / "step2" / ".datastates" / "whole.json").unlink()
            (directory / "latest").write_text("step1")
    distributed.barrier()
    with make(directory):
        assert (directory / "latest").read_text() == "step2"
        distributed.barrier()


def directories_must_be_those_of_nodes(directory: Path) -> None:
    told = raised(ConfigError, make, directory.parent.parent / "common")
    assert "node 0 (a) and node 1 (b) see the same" in told or "node 1 (b) and node 0 (a) see the same" in told, told
    if RANK % 2 == 0:
        (directory / "of-rank-0").mkdir(parents=True)
        (directory / "of-rank-0" / ".datastates-node-killed-0").touch()
    told = raised(ConfigError, make, directory / f"of-rank-{RANK % 2}")
    assert "does not see the" in told, told
    distributed.barrier()
    assert not list(directory.glob("*/.datastates-*"))
    if RANK == 3:
        del os.environ["DATASTATES_NODE_NAME"]
    told = raised(ConfigError, make, directory)
    assert "DATASTATES_NODE_NAME is set, but not on ranks 3" in told, told
    os.environ["DATASTATES_NODE_NAME"] = "ab"[NODE]


def engines_save_parts(directory: Path) -> None:
    section = {"host_cache_size": 2**-7, "pin_host_cache": False, "shared_directory": False}
    with datastates.CheckpointEngine(section) as engine:
        name = f"own_{RANK}.pt"
        with engine.checkpoint(str(directory / "global_step1"), "global_step1"):
            engine.save({"w": torch.full((3,), float(RANK))}, str(directory / "global_step1" / name))
        engine.wait(persist=True)
        assert (directory / "latest").read_text() == "global_step1"
        assert engine.load(str(directory / "global_step1" / name))["w"][0] == RANK
        told = raised(TopologyError, engine.load, str(directory / "global_step1" / f"own_{(RANK + 2) % 4}.pt"))
        assert f"is the part of node {NODE} of 2, with the files of ranks {2 * NODE}-{2 * NODE + 1}" in told, told
        assert "it was saved on node 0 (a), node 1 (b)" in told, told
