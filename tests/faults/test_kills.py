"""SIGKILL of trainers and flushers at random moments and named points: the short form of `make stress`."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest

from datastates.flusher import committer, patience
from datastates.flusher.protocol import AttemptFailed, Commit
from datastates.integrity import verify
from datastates.manifest import manifest_path, read_latest
from flusher.rig import SLAB, TIMEOUT, Rig, eventually, image_of
from stress import aftermath
from stress.contents import LONE, PARTS, Moment, file_name, state_of
from stress.kills import WAYS, choose
from stress.lineage import Lineage, Outcome
from stress.nursery import Nursery

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent.parent
IMAGE = image_of(3 * SLAB + 9)


@pytest.mark.timeout(120)
def test_every_way_once(tmp_path: Path) -> None:
    """Each start goes on where the last one was killed; 500 and more of these are in the long form."""
    chance = random.Random(2026)
    with Nursery() as nursery:
        lineage = Lineage(str(tmp_path), nursery)
        outcomes = [lineage.go_on(choose(chance, way, 1 + (number % 6 == 1))) for number, way in enumerate(WAYS)]
    assert {str(outcome.kill): outcome.violations for outcome in outcomes if outcome.violations} == {}
    assert sum(outcome.num_killed > 0 for outcome in outcomes) >= len(WAYS) - 3  # a point may lie behind the end
    assert read_latest(lineage.directory) is not None


def test_a_manifest_is_not_written_again_by_the_next_flusher(tmp_path: Path) -> None:
    """Rank 0 may have read it, and commits with the checksum of its bytes."""
    directory = tmp_path / "s1"
    path = Path(manifest_path(str(directory), "run-1", 1))
    with Rig(rank=0, world_size=2) as first, Rig(rank=1, world_size=2) as second:
        second.save(directory / "f1", IMAGE, "run-1")
        outcome = second.commit(directory, "run-1")
        eventually(path.exists, "rank 1 has promised its part")
        promised = path.read_bytes()
        os.kill(second.client.pid, signal.SIGKILL)
        second.save(tmp_path / "lone", IMAGE, "lone-1")
        second.client.publish("lone-1").result(TIMEOUT)  # so the next flusher has come to it, too
        first.save(directory / "f0", IMAGE, "run-1")
        first.commit(directory, "run-1").result(TIMEOUT)
        outcome.result(TIMEOUT)
    assert path.read_bytes() == promised
    assert verify(str(directory)) == []


def test_flushers_of_a_dead_job_wait_once_for_a_rank_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_LAST_PATIENCE_SECONDS", 0.125)
    answers: SimpleQueue[Any] = SimpleQueue()

    def send(answer: Any) -> bool:
        answers.put(answer)
        return True

    committed: list[str] = []
    flusher = committer.Committer(
        send, lambda: None, committed.append, rank=0, world_size=2, commit_timeout_seconds=0.25
    )
    for number in (1, 2, 3):
        flusher.request(Commit(f"run-{number}", str(tmp_path / f"s{number}"), f"s{number}", True))
    flusher.abandon("the trainer ended", everything=False)
    Thread(target=flusher.run, args=(None,), name="committer", daemon=True).start()
    failures = [answers.get(timeout=TIMEOUT) for _ in range(3)]
    assert [type(failure) for failure in failures] == [AttemptFailed] * 3
    limits = [failure.ranks["1"] for failure in failures]
    assert limits == [f"not durable within {seconds} s" for seconds in (0.25, 0.125, 0.125)]
    assert committed == []


# --- the harness itself can fail


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Two complete checkpoints of two ranks, made without engines, and a lone file."""
    with Rig(rank=0, world_size=2) as first, Rig(rank=1, world_size=2) as second:
        for step in (1, 2):
            directory, attempt = tmp_path / f"step{step}", f"run-{step}"
            outcomes = []
            for rank, rig in enumerate((first, second)):
                for part in PARTS:
                    rig.save(directory / file_name(rank, part), _image(tmp_path, step, rank, part), attempt)
                outcomes.append(rig.commit(directory, attempt, tag=directory.name))
            for outcome in outcomes:
                outcome.result(TIMEOUT)
    (tmp_path / LONE).mkdir()
    (tmp_path / LONE / file_name(0, LONE)).write_bytes(_image(tmp_path, 2, 0, LONE))
    return tmp_path


def _image(folder: Path, step: int, rank: int, part: str) -> bytes:
    torch.save(state_of(Moment(1, step), rank, part), folder / "image")
    image = (folder / "image").read_bytes()
    (folder / "image").unlink()
    return image


def _problems(directory: Path, latest: int = 2, published: int = 2) -> str:
    promised = aftermath.Promised()
    promised.move_latest(Moment(1, latest))
    promised.commit("step1", Moment(1, 1))
    promised.publish(0, Moment(1, published))
    return "\n".join(aftermath.problems(str(directory), promised))


def test_what_is_whole_is_found_whole(checkpoints: Path) -> None:
    assert _problems(checkpoints) == ""
    assert list(aftermath.problems_before_recovery(str(checkpoints))) == []


def test_what_was_promised_and_is_missing_is_found(checkpoints: Path) -> None:
    assert "was committed" in _problems(checkpoints, latest=3)
    assert "was published" in _problems(checkpoints, published=3)
    shutil.rmtree(checkpoints / "step1")
    assert "step1 was committed" in _problems(checkpoints)


def test_a_wrong_byte_is_found(checkpoints: Path) -> None:
    path = checkpoints / "step2" / file_name(1, "model")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert f"{path}" in _problems(checkpoints)


def test_files_of_two_saves_side_by_side_are_found(checkpoints: Path) -> None:
    for part in PARTS:
        state = state_of(Moment(1, 1), 1, part)
        torch.save(state, checkpoints / "step2" / file_name(1, part))
    assert "2 different saves" in _problems(checkpoints)


@pytest.mark.leaves_partial_files
def test_leftovers_are_found(checkpoints: Path) -> None:
    partial = checkpoints / LONE / ".other.partial"
    partial.touch()
    assert f"left behind: {partial}" in _problems(checkpoints)
    partial.unlink()
    (checkpoints / "step9" / ".datastates").mkdir(parents=True)
    (checkpoints / "step9" / "rank0-model.pt").touch()
    assert "not complete and shows the files" in _problems(checkpoints)


def test_latest_that_names_nothing_complete_is_found(checkpoints: Path) -> None:
    (checkpoints / "latest").write_text("step3")
    assert "latest names 'step3', which is not complete" in _problems(checkpoints)
    assert "before recovery" in "".join(aftermath.problems_before_recovery(str(checkpoints)))


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("stress_script", ROOT / "scripts" / "stress.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_counts_kills_and_broken_promises(script: Any) -> None:
    kill = choose(random.Random(1), "all trainers", 2)
    outcomes = [
        Outcome(kill, num_killed=2, num_begun=5),
        Outcome(kill, ["torn"], num_killed=2, num_begun=5, num_lost=3, num_recovered=1),
        Outcome(kill),  # it did not come to a kill
    ]
    lines = script.kill_table(outcomes).splitlines()
    assert lines[2:] == [f"| {name} | 2 | 4 | 1 | 1 | 3 | 1 | 1 |" for name in ("all trainers", "**all**")]


def test_a_broken_promise_is_the_exit_status(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill = choose(random.Random(1), "all trainers", 2)
    found: list[Outcome] = [Outcome(kill, num_killed=1)]
    monkeypatch.setattr(script, "run_kills", lambda *_, **__: found)
    arguments = [
        "--kills",
        "1",
        "--power-losses",
        "0",
        "--saves",
        "0",
        "--tier-kills",
        "0",
        "--dir",
        str(tmp_path / "runs"),
    ]
    arguments += ["--json", str(tmp_path / "figures.json")]
    assert script.main(arguments) == 0
    assert list((tmp_path / "runs").iterdir()) == []
    found.append(Outcome(kill, ["torn"], num_killed=1))
    assert script.main(arguments) == 1
    assert len(list((tmp_path / "runs").iterdir())) == 1, "what is left is kept"
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [outcome["violations"] for outcome in figures["kills"]["outcomes"]] == [[], ["torn"]]


def test_the_same_seed_chooses_the_same_kills() -> None:
    first, second = ([choose(random.Random(7)) for _ in range(3)] for _ in range(2))
    assert first == second
    assert choose(random.Random(8)) != first[0]
