"""SIGKILL of the flusher process at named points: the save still commits, byte for byte."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import zlib
from pathlib import Path

import pytest

from datastates.errors import FlusherDiedError, WaitTimeoutError
from datastates.integrity import verify
from datastates.manifest import read_commit
from datastates.plan import Seal
from flusher.rig import SLAB, TIMEOUT, Rig, eventually, faulty, image_of, partials

IMAGE = image_of(9 * SLAB + 5)


@pytest.mark.parametrize(
    "rule",
    [
        {"call": "pwrite", "then": "kill", "first": 0},
        {"call": "pwrite", "then": "killafter", "first": 3},
        {"call": "pwrite", "then": "kill", "first": 9},
        {"call": "ftruncate", "then": "kill", "first": 1},
        {"call": "posix_fallocate", "then": "killafter"},
        {"call": "fsync", "then": "kill", "first": 0},
        {"call": "mkdir", "then": "killafter", "first": 1},
        {"call": "replace", "then": "kill", "first": 0},  # the rank's manifest
        {"call": "replace", "then": "killafter", "first": 0},
        {"call": "replace", "then": "killafter", "first": 1},  # the staged record
        {"call": "unlink", "then": "killafter", "only": "commit.json"},
        {"call": "replace", "then": "killafter", "only": "f.bin", "first": 1},  # one of two files is renamed
        {"call": "replace", "then": "kill", "only": ".datastates/commit.json"},
        {"call": "replace", "then": "killafter", "only": ".datastates/commit.json"},
        {"call": "replace", "then": "kill", "only": "latest"},
    ],
    ids=lambda rule: "-".join(str(value) for value in rule.values()).replace("/", "_"),
)
def test_at_a_named_point(tmp_path: Path, rule: dict[str, object]) -> None:
    directory = tmp_path / "s1"
    with Rig() as rig:
        rig.checkpoint(directory, {"f.bin": b"old", "g.bin": b"old"}, "run-0")
    rule = rule | {"once": str(tmp_path / "killed")}
    if rule.get("only") == "f.bin":
        rule["first"] = 0
    sealed = bytearray(IMAGE)
    struct.pack_into("<I", sealed, len(IMAGE) - 4, zlib.crc32(IMAGE[5 : 8 * SLAB]))
    with Rig(command=faulty(json.dumps([rule]))) as rig:
        rig.save(directory / "f.bin", IMAGE, "run-1", (Seal(len(IMAGE) - 4, 5, 8 * SLAB),))
        rig.save(directory / "sub" / "g.bin", b"new", "run-1")
        result = rig.commit(directory, "run-1", tag="s1").result(TIMEOUT)
        rig.wait_all_free()
    assert (tmp_path / "killed").exists(), "the fault did not happen"
    assert result.nbytes == len(IMAGE) + 3
    assert (directory / "f.bin").read_bytes() == bytes(sealed)
    assert verify(str(directory)) == []
    assert read_commit(str(directory)).attempt == "run-1"
    assert (tmp_path / "latest").read_text() == "s1"
    assert partials(tmp_path) == []
    assert sorted(os.listdir(directory / ".datastates")) == ["commit.json", "run-1"]


def test_while_the_trainer_is_still_staging(tmp_path: Path) -> None:
    with Rig(num_slabs=3) as rig:
        file = rig.open(tmp_path / "f", IMAGE)
        published = rig.client.publish("a-1")
        for index in range(10):
            rig.send_slab(file, IMAGE, index)
            if index % 3 == 1:
                pid = rig.client.pid
                if pid:
                    os.kill(pid, signal.SIGKILL)
        published.result(TIMEOUT)
        rig.wait_all_free()
    assert (tmp_path / "f").read_bytes() == IMAGE


def test_a_durable_file_waits_for_its_commit(tmp_path: Path) -> None:
    with Rig() as rig:
        rig.save(tmp_path / "s1" / "f", IMAGE).durable.result(TIMEOUT)
        os.kill(rig.client.pid, signal.SIGKILL)
        rig.commit(tmp_path / "s1").result(TIMEOUT)
    assert verify(str(tmp_path / "s1")) == []
    assert (tmp_path / "s1" / "f").read_bytes() == IMAGE


def test_answers_that_it_gave_before_are_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it leaves requests unread, the kernel tells of a reset before it hands out the answers."""
    with Rig() as rig:
        with monkeypatch.context() as patch:
            patch.setattr(rig.client._supervisor, "_receive", lambda: True)  # the answers stay where they are
            outcomes = []
            for name in ("first", "second"):
                rig.save(tmp_path / name, b"lone", name)
                outcomes.append(rig.client.publish(name))
                eventually((tmp_path / name).exists, "it is published")
            os.kill(rig.client.pid, signal.SIGSTOP)
            rig.save(tmp_path / "third", b"lone", "third")
            outcomes.append(rig.client.publish("third"))
            (tmp_path / "first").unlink()  # whoever asks again for what was done finds it gone
            os.kill(rig.client.pid, signal.SIGKILL)
        for outcome in outcomes:
            outcome.result(TIMEOUT)
    assert not (tmp_path / "first").exists()


def test_an_idle_death_starts_nothing_until_the_next_save(tmp_path: Path) -> None:
    with Rig() as rig:
        rig.checkpoint(tmp_path / "s1", {"f": b"1"}, "run-1")
        os.kill(rig.client.pid, signal.SIGKILL)
        eventually(lambda: rig.client.pid == 0, "the death is noticed")
        rig.checkpoint(tmp_path / "s2", {"f": b"2"}, "run-2")
    assert (tmp_path / "latest").read_text() == "s2"


def test_three_deaths_without_progress_end_in_an_error(tmp_path: Path) -> None:
    flag = tmp_path / "healthy"
    code = "import os, sys\nif not os.path.exists(sys.argv[1]): os._exit(9)\n"
    code += "from datastates.flusher.process import main\nmain(sys.argv[2:])"
    with Rig(command=(sys.executable, "-c", code, str(flag))) as rig:
        file = rig.save(tmp_path / "s1" / "f", IMAGE[: 4 * SLAB])
        committed = rig.commit(tmp_path / "s1")
        for future in (committed, file.durable):
            with pytest.raises(FlusherDiedError, match="3 times"):
                future.result(TIMEOUT)
        assert isinstance(file.error, FlusherDiedError)
        rig.wait_all_free()
        flag.touch()
        rig.checkpoint(tmp_path / "s2", {"f": IMAGE}, "a-2")
    assert (tmp_path / "s2" / "f").read_bytes() == IMAGE


def test_a_stopped_flusher_blocks_nothing_but_close(tmp_path: Path) -> None:
    rig = Rig()
    pid = rig.client.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        file = rig.open(tmp_path / "s1" / "f", IMAGE[: 8 * SLAB])
        rig.send(file, IMAGE[: 8 * SLAB])
        committed = rig.commit(tmp_path / "s1")
        for number in range(2000):  # far more than the socket holds
            rig.client.abort(f"b-{number}", "x" * 500)
        with pytest.raises(WaitTimeoutError):
            rig.client.close(0.05)
        assert not committed.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    with rig:
        committed.result(TIMEOUT)
    assert (tmp_path / "s1" / "f").read_bytes() == IMAGE[: 8 * SLAB]


def test_terminated_while_idle(tmp_path: Path) -> None:
    with Rig() as rig:
        rig.checkpoint(tmp_path / "s1", {"f": b"1"}, "run-1")
        os.kill(rig.client.pid, signal.SIGTERM)
        eventually(lambda: rig.client.pid == 0, "it ends when it is idle")
        rig.checkpoint(tmp_path / "s2", {"f": b"2"}, "run-2")


def test_terminated_at_work_finishes_within_its_grace_time(tmp_path: Path) -> None:
    with Rig() as rig:
        rig.checkpoint(tmp_path / "s0", {"f": b"0"}, "run-0")
        pid = rig.client.pid
        file = rig.open(tmp_path / "s1" / "f", IMAGE, "run-1")
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        rig.send(file, IMAGE)
        assert rig.client.pid == pid
        rig.commit(tmp_path / "s1", "run-1").result(TIMEOUT)
        eventually(lambda: rig.client.pid == 0, "it ends when it is idle")


def test_terminated_at_work_gives_up_after_its_grace_time(tmp_path: Path) -> None:
    with Rig(grace_seconds=0.05) as rig:
        file = rig.open(tmp_path / "s1" / "f", IMAGE)
        committed = rig.commit(tmp_path / "s1")
        rig.send(file, IMAGE, 0, 3)
        eventually(lambda: sum(event["event"] == "flush" for event in rig.events) == 3, "three slabs are written")
        os.kill(rig.client.pid, signal.SIGTERM)
        assert "terminated" in str(committed.exception(TIMEOUT))
        rig.send(file, IMAGE, 3)
        rig.wait_all_free()
    assert partials(tmp_path) == []
    assert not (tmp_path / "latest").exists()
