"""Nodes that share no directory, in real jobs: two ranks per node, two nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integrations.jobs import ForkServer
from integrations.ranks import free_port

STORE_PORT = 23456  # in namespaces of our own
INTERFACE = "datastates0"


@pytest.fixture(scope="module")
def running_server():
    server = ForkServer("nodes_worker")
    yield server
    server.close()


@pytest.fixture
def server(running_server):
    """Starts jobs; ranks that a test leaves are killed when it ends."""
    yield running_server
    running_server.kill_all()


def on_this_machine(folder: Path, names: str = "ab") -> str:
    """Nodes by name alone, each with a folder of its own."""
    address = f"127.0.0.1:{free_port()}"
    return json.dumps({"folder": str(folder), "address": address, "interface": "lo", "holders": [], "names": names})


def run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[str, dict[int, Path]]]:
    """Two network and mount namespaces: the same path is another directory in each, which the other does not see."""
    disks = {node: folder / f"disk{node}" for node in range(2)}
    local = folder / "local"
    for path in (*disks.values(), local):
        path.mkdir()
    hold = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 600"]
    holders = [subprocess.Popen(hold, stdout=subprocess.PIPE) for _ in disks]
    try:
        for node, holder in enumerate(holders):
            assert holder.stdout is not None
            assert holder.stdout.read(1) == b"\n", "no namespaces"
            inside = ["nsenter", "--target", holder.pid, "--net", "--mount"]
            run(*inside, "mount", "--bind", disks[node], local)
            for disk in disks.values():
                run(*inside, "mount", "-t", "tmpfs", "none", disk)
            run(*inside, "ip", "link", "set", "lo", "up")
        first, second = (holder.pid for holder in holders)
        ends = ["link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second]
        run("nsenter", "--target", first, "--net", "ip", *ends)
        for node, holder in enumerate(holders):
            ip = ["nsenter", "--target", holder.pid, "--net", "ip"]
            run(*ip, "address", "add", f"10.77.0.{node + 1}/24", "dev", INTERFACE)
            run(*ip, "link", "set", INTERFACE, "up")
        place = {"folder": str(local), "address": f"10.77.0.1:{STORE_PORT}", "interface": INTERFACE}
        yield json.dumps({**place, "holders": [first, second], "names": ""}), disks
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()


def why_no_hosts() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]:
        return f"needs {missing[0]}"
    probe = ["unshare", "--net", "--mount", "ip", "link", "add", INTERFACE, "type", "veth"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=30, check=False)
    return f"needs network namespaces: {done.stderr.strip()}" if done.returncode else ""


def kill_between(server: ForkServer, place: str, disks: dict[int, Path], log: Path) -> None:
    """Node 0 dies between its commit and the whole; node 1 commits its part then."""
    job = server.start("nodes_worker:be_killed", place, folder=log, num_ranks=4)
    pids = [tuple(map(int, text.split())) for text in job.wait_announced()]
    for rank in (0, 1):
        os.kill(pids[rank][0], signal.SIGKILL)
    for rank in (2, 3):
        os.kill(pids[rank][1], signal.SIGCONT)
    job._wait_ended(60)
    assert job.statuses == {0: -9, 1: -9, 2: 0, 3: 0}, job.log()
    for disk in disks.values():
        assert (disk / "run" / "step20" / ".datastates" / "commit.json").exists()
        assert not (disk / "run" / "step20" / ".datastates" / "whole.json").exists()
        assert (disk / "run" / "latest").read_text() == "step10"


def test_two_hosts_without_a_directory_in_common(server, tmp_path):
    if reason := why_no_hosts():
        pytest.skip(reason)
    with two_hosts(tmp_path) as (place, disks):
        kill_between(server, place, disks, tmp_path / "killed")
        server.start("nodes_worker:resume", place, 20, 30, folder=tmp_path / "resumed", num_ranks=4).wait()
        assert sorted(path.name for path in (disks[1] / "run" / "step30").glob("rank*")) == [
            "rank-00002.pt",
            "rank-00003.pt",
        ]
        shutil.rmtree(disks[1] / "run" / "step30")
        output = server.start("nodes_worker:resume", place, 20, 40, folder=tmp_path / "lost", num_ranks=4).wait()
        host = os.uname().nodename
        assert output.count(f"step30 is not loaded: node 1 ({host}) has no part of it\n") == 4, output
        assert output.count("step20 is taken\n") == 4, output


def test_nodes_that_are_cut_off_from_each_other_do_not_wait_for_ever(server, tmp_path):
    if reason := why_no_hosts():
        pytest.skip(reason)
    with two_hosts(tmp_path) as (place, disks):
        job = server.start("nodes_worker:be_cut_off", place, folder=tmp_path / "cut", num_ranks=4)
        flushers = [int(text) for text in job.wait_announced()]
        link = ["nsenter", "--target", json.loads(place)["holders"][1], "--net", "ip", "link", "set", INTERFACE]
        run(*link, "down")
        for flusher in flushers[2:]:
            os.kill(flusher, signal.SIGCONT)
        while len(job.statuses) < 3:
            server.listen(60)
        (disks[0] / "all-have-ended").touch()
        job.wait()
        run(*link, "up")
        server.start("nodes_worker:resume", place, 20, 30, folder=tmp_path / "resumed", num_ranks=4).wait()


def test_ranks_act_as_nodes(server, tmp_path):
    output = server.start("nodes_worker:act", on_this_machine(tmp_path), folder=tmp_path, num_ranks=4).wait(100)
    assert output.count("ok engines_save_parts") == 4, output


def test_one_rank_per_node(server, tmp_path):
    place = on_this_machine(tmp_path)
    server.start("nodes_worker:save_alone", place, folder=tmp_path, num_ranks=2).wait()


def test_a_lost_disk_and_exchanged_nodes_are_told(server, tmp_path):
    def resume(log, step, then, names="ab"):
        place = on_this_machine(tmp_path, names)
        return server.start("nodes_worker:resume", place, step, then, folder=tmp_path / log, num_ranks=4)

    disks = {node: tmp_path / name for node, name in enumerate("ab")}
    kill_between(server, on_this_machine(tmp_path), disks, tmp_path / "killed")
    resume("resumed", 20, 30).wait()
    output = resume("exchanged", 30, 40, "ba").wait(expect=1)
    told = "step30: ranks 0-1 run on node 0 (b), which has the files of ranks 2-3; those of rank 0 are in the part of"
    assert output.count(f"{told} node 0 (a): start each rank where its files are") == 4, output
    place = on_this_machine(tmp_path, "abc")
    output = server.start("nodes_worker:resume", place, 30, 40, folder=tmp_path / "more", num_ranks=6).wait(expect=1)
    assert output.count("step30: node 2 (c) has no part of it, it was saved on node 0 (a), node 1 (b)") == 6, output
    shutil.rmtree(disks[1])
    place = on_this_machine(tmp_path)
    output = server.start("nodes_worker:find_nothing", place, folder=tmp_path / "nothing", num_ranks=4).wait()
    for step in (10, 20, 30):
        assert output.count(f"step{step}: node 1 (b) has no part of it") >= 4, output
    assert not (disks[0] / "run" / "step30" / ".datastates" / "whole.json").exists()
