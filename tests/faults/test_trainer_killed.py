"""SIGKILL of the trainer: what was handed over commits, anything else leaves no trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastates.integrity import verify
from datastates.manifest import read_commit
from flusher.rig import SLAB, Rig, eventually, image_of, partials

IMAGE = image_of(6 * SLAB + 9)
TRAINER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from flusher.rig import Rig, SLAB, eventually, image_of
directory, how = Path(sys.argv[2]), sys.argv[3].split("+")
image = image_of(6 * SLAB + 9)
rig = Rig(num_slabs=8)
def tell(text):
    os.write(1, text.encode() + b"\\n")
file = rig.open(directory / "s2" / "f", image, "run-2")
if "forked" in how:
    child = os.fork()
    if child == 0:
        os.close(1)
        while True:
            signal.pause()
    tell(f"child {child}")
if "commit-first" in how:
    rig.commit(directory / "s2", "run-2", tag="s2")
rig.send(file, image, 0, 4 if "partial" in how else 7)
if "commit-last" in how:
    rig.commit(directory / "s2", "run-2", tag="s2")
if "partial" in how:
    eventually(lambda: sum(event["event"] == "flush" for event in rig.events) == 4, "the slabs are written")
tell(f"flusher {rig.client.pid}")
if "exit" in how:
    sys.exit(0)
if "die" in how:
    os._exit(3)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def children() -> Iterator[list[int]]:
    """Processes that the trainer left behind on purpose."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: has_ended(pid), "the child ends")


def run_trainer(tmp_path: Path, how: str, children: list[int]) -> None:
    """Commit ``s1``, then run the trainer above until it and its flusher have ended."""
    with Rig() as rig:
        rig.checkpoint(tmp_path / "s1", {"f": b"old"}, "run-1")
    arguments = [sys.executable, "-c", TRAINER, str(Path(__file__).parents[1]), str(tmp_path), how]
    flusher = 0
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        for line in trainer.stdout:
            name, pid = line.split()
            if name == b"child":
                children.append(int(pid))
            else:
                flusher = int(pid)
    assert flusher
    eventually(lambda: has_ended(flusher), "the flusher ends")


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    "how", ["commit-first", "commit-last", "commit-last+forked", "commit-last+exit", "commit-last+die"]
)
def test_after_all_was_handed_over(tmp_path: Path, children: list[int], how: str) -> None:
    run_trainer(tmp_path, how, children)
    assert (tmp_path / "s2" / "f").read_bytes() == IMAGE
    assert (tmp_path / "latest").read_text() == "s2"
    assert verify(str(tmp_path / "s2")) == []


@pytest.mark.parametrize("how", ["partial", "commit-first+partial", "commit-first+partial+forked", "no-commit"])
def test_before_all_was_handed_over(tmp_path: Path, children: list[int], how: str) -> None:
    run_trainer(tmp_path, how, children)
    assert partials(tmp_path) == []
    assert not (tmp_path / "s2" / "f").exists()
    assert read_commit(str(tmp_path / "s2")) is None
    assert (tmp_path / "latest").read_text() == "s1"
    assert verify(str(tmp_path / "s1")) == []
    if how.startswith("commit-first"):
        manifest = tmp_path / "s2" / ".datastates" / "run-2" / "rank-00000.json"
        assert "the trainer ended" in json.loads(manifest.read_text())["failed"]["message"]


def test_saving_again_after_that(tmp_path: Path, children: list[int]) -> None:
    run_trainer(tmp_path, "commit-first+partial", children)
    with Rig() as rig:
        rig.checkpoint(tmp_path / "s2", {"f": IMAGE}, "again-2")
    assert verify(str(tmp_path / "s2")) == []
    assert sorted(os.listdir(tmp_path / "s2" / ".datastates")) == ["again-2", "commit.json"]


UNREAD = """
import os, select, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from flusher.rig import Rig, SLAB, eventually, image_of
directory, image = Path(sys.argv[2]), image_of(6 * SLAB + 9)
rig = Rig(num_slabs=8)
rig.client._supervisor._receive = lambda: True  # the answers stay where they are
file = rig.save(directory / "s2" / "f", image, "run-2")
answers = rig.client._supervisor._socket
eventually(lambda: select.select([answers], [], [], 0)[0], "a slab is written")
os.kill(rig.client.pid, signal.SIGSTOP)
rig.commit(directory / "s2", "run-2", tag="s2")
os.write(1, str(rig.client.pid).encode())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_with_answers_unread_and_requests_unread(tmp_path: Path, children: list[int]) -> None:
    """The kernel then tells the flusher of a reset before it hands out what the trainer had sent."""
    tests = str(Path(__file__).resolve().parent.parent)
    output = tmp_path / "pid"
    with output.open("wb") as file:
        command = [sys.executable, "-c", UNREAD, tests, str(tmp_path)]
        assert subprocess.run(command, stdout=file, timeout=60).returncode == -signal.SIGKILL
    children.append(int(output.read_text()))
    os.kill(children[0], signal.SIGCONT)
    eventually(lambda: has_ended(children[0]), "the flusher has ended")
    children.clear()
    assert read_commit(str(tmp_path / "s2")) is not None
    assert verify(str(tmp_path / "s2")) == []
    assert (tmp_path / "s2" / "f").read_bytes() == IMAGE
