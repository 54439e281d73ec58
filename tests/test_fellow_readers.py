"""Ranks of one machine that read the same file: the disk reads it once, and nobody waits for anybody."""

from __future__ import annotations

import ast
import errno
import os
import pathlib
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

from datastates import fellow_readers, load, reader
from datastates.fellow_readers import FellowReaders
from datastates.page_cache import cached_nbytes
from datastates.reading import FileReader


@pytest.fixture
def descriptor(tmp_path: pathlib.Path) -> Any:
    (tmp_path / "x").write_bytes(bytes(100_000))
    opened = os.open(tmp_path / "x", os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fellow_readers, "GRACE_SECONDS", 0.0)


@pytest.mark.usefixtures("no_grace")
def test_readers_of_one_file_see_each_other_while_they_read(descriptor: int, tmp_path: pathlib.Path) -> None:
    first = FellowReaders(descriptor, 4)
    assert not first.are_expected()
    others = [FellowReaders(descriptor, 4) for _ in range(3)]
    assert first.are_expected() and all(other.are_expected() for other in others)
    for other in others:
        other.close()
        other.close()
    assert not first.are_expected() and not others[0].are_expected()
    (tmp_path / "y").write_bytes(bytes(100_000))
    with open(tmp_path / "y", "rb") as file:
        elsewhere = FellowReaders(file.fileno(), 4)
    assert not first.are_expected() and not elsewhere.are_expected()
    elsewhere.close()
    first.close()


@pytest.mark.usefixtures("no_grace")
def test_more_readers_than_places(descriptor: int) -> None:
    places = [FellowReaders(descriptor, 2) for _ in range(3)]
    assert [one.are_expected() for one in places] == [True, True, False]
    for one in places:
        one.close()


def test_no_number_of_ranks_makes_looking_for_them_long(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fellow_readers, "GRACE_SECONDS", 0.0)
    alone = FellowReaders(descriptor, 10**12)
    assert not alone.are_expected()
    other = FellowReaders(descriptor, 10**12)
    assert alone.are_expected() and other.are_expected()
    alone.close()
    other.close()


def test_others_are_expected_at_first(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("datastates.fellow_readers.time.monotonic", lambda: now)
    alone = FellowReaders(descriptor, 4)
    now += fellow_readers.GRACE_SECONDS / 2
    assert alone.are_expected()
    now += fellow_readers.GRACE_SECONDS
    assert not alone.are_expected()
    alone.close()


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("number", [errno.EPERM, errno.EMFILE])
def test_where_there_are_no_sockets_everybody_reads_alone(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", refuse)
    alone = FellowReaders(descriptor, 4)
    assert not alone.are_expected()
    alone.close()


CHILD = """
import os, sys
from datastates.fellow_readers import FellowReaders
reader = FellowReaders(os.open(sys.argv[1], os.O_RDONLY), 4)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("no_grace")
def test_who_is_killed_is_forgotten_at_once(descriptor: int, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path / "x")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"here\n"
        mine = FellowReaders(descriptor, 4)
        assert mine.are_expected()
        child.send_signal(signal.SIGKILL)
        child.wait(30)
        assert not mine.are_expected()
        mine.close()


@pytest.mark.parametrize("is_shared", [True, False])
def test_pages_that_others_want_are_left_in_the_page_cache(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(1 << 20)}, path)
    monkeypatch.setattr("datastates.reading.cached_nbytes", lambda *_: 0)
    monkeypatch.setattr(FellowReaders, "are_expected", lambda _self: is_shared)
    used: list[bool] = []
    original = FileReader._exact

    def exact(self: FileReader, descriptor: int, view: memoryview, begin: int, nbytes: int) -> None:
        if nbytes > 1 << 20:
            used.append(descriptor == self._direct)
        original(self, descriptor, view, begin, nbytes)

    monkeypatch.setattr(FileReader, "_exact", exact)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    load(path)
    with FileReader(str(path)) as file:
        has_direct = file._direct >= 0
    assert used and set(used) == {has_direct and not is_shared}


def test_a_rank_alone_asks_nobody(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.arange(1 << 20)}, tmp_path / "x.pt")
    for name in reader._LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("datastates.reading.FellowReaders", None)
    assert torch.equal(load(tmp_path / "x.pt")["w"], torch.arange(1 << 20))


@pytest.mark.parametrize(("value", "expected"), [("8", 8), ("1", 1), ("x", 1), ("", 1), ("-3", 1)])
def test_how_many_ranks_the_launcher_says(monkeypatch: pytest.MonkeyPatch, value: str, expected: int) -> None:
    for name in reader._LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_SIZE", value)
    assert reader._num_local_ranks() == expected


RANKS = """
import os, signal, sys, torch
from datastates import fellow_readers, load, reading
fellow_readers.GRACE_SECONDS = 60.0  # the ranks of a busy machine may begin far apart
NUM_RANKS = 4

def read_nbytes():
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("read_bytes"))

def drop(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)

def rank(number, is_mortal, path, gate, answers):
    os.read(gate, 1)
    if is_mortal and number == 0:  # ends when it has read a part, and told nobody
        reading.Digests.add = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    before = read_nbytes()
    state = load(path)
    os.write(answers, f"{read_nbytes() - before} {int(state['w'].sum())}\\n".encode())
    os._exit(0)

path = sys.argv[1]
load(sys.argv[2])  # what is imported on the way counts for nobody
for is_mortal in (False, True):
    drop(path)
    (gate, opened), (source, answers) = os.pipe(), os.pipe()
    pids = []
    for number in range(NUM_RANKS):
        pids.append(os.fork())
        if pids[-1] == 0:
            rank(number, is_mortal, path, gate, answers)
    os.write(opened, b"x" * NUM_RANKS)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.close(answers)
    print(statuses, os.read(source, 10000).decode().split())
"""


def test_the_disk_reads_it_once_for_all_ranks(tmp_path: pathlib.Path, run_script: Any) -> None:
    """And one that is killed while it reads holds up nobody."""
    path, nbytes = tmp_path / "x.pt", 48 << 20
    torch.save({"w": torch.ones(nbytes, dtype=torch.uint8)}, path)
    torch.save({"a": torch.ones(3)}, tmp_path / "small.pt")
    with FileReader(str(path)) as file:
        has_disk = file._direct >= 0 and not cached_everything(path)
    done = run_script(RANKS, path, tmp_path / "small.pt", env={"LOCAL_WORLD_SIZE": "4"}, timeout=300)
    alive, one_killed = (
        (ast.literal_eval(statuses + "]"), list(map(int, ast.literal_eval(numbers))))
        for statuses, numbers in (line.split("] ") for line in done.stdout.splitlines())
    )
    assert alive[0] == [0, 0, 0, 0] and alive[1][1::2] == [nbytes] * 4
    assert sum(alive[1][::2]) <= 1.1 * path.stat().st_size
    assert sum(alive[1][::2]) >= nbytes or not has_disk
    assert one_killed[0] == [-signal.SIGKILL, 0, 0, 0] and one_killed[1][1::2] == [nbytes] * 3
    assert sum(one_killed[1][::2]) <= 1.1 * path.stat().st_size


def cached_everything(path: pathlib.Path) -> bool:
    """Whether the file system lies in memory: what is dropped from its cache is still there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return cached_nbytes(descriptor, 0, path.stat().st_size) > 0
    finally:
        os.close(descriptor)
