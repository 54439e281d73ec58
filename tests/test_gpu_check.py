"""The GPU check runs here at tiny size, says so, and fails where it must."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    yield importlib.import_module("check")
    for name in ("check", "steps", "tables", "ways", "model"):
        sys.modules.pop(name, None)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(ROOT / "scripts" / "gpu_check"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_whole_check_runs_at_tiny_size_and_writes_what_it_found(tmp_path):
    done = run(
        "--simulate", "--steps", "link,matmul,training,loads", "--out", tmp_path / "out", "--dir", tmp_path / "dir"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (document,) = (tmp_path / "out").glob("*.md")
    (found,) = (json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json"))
    assert list(found["steps"]) == ["link", "matmul", "training", "loads"]
    assert set(found["steps"]["training"]["found"]["ways"]) == {"torch.save + fsync", "DCP async, pinned", "datastates"}
    assert "**Simulated on the CPU" in document.read_text()
    assert document.read_text().strip() in done.stdout
    assert list((tmp_path / "dir").iterdir()) == []


def test_without_an_accelerator_it_says_so_in_one_line(check, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check.torch.accelerator, "is_available", lambda: False)
    assert check.main(["--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "finds no accelerator" in line and "--simulate" in line
    assert not (tmp_path / "out").exists()


def test_a_step_that_fails_or_hangs_does_not_hide_the_others(check, tmp_path, capsys, monkeypatch):
    def failing(settings):
        raise RuntimeError("device on fire")

    def hanging(settings):
        time.sleep(600)

    def dying(settings):
        os._exit(7)

    def good(settings):
        return {"x": 1}

    limits = {failing: 60.0, hanging: 0.3, dying: 60.0, good: 60.0}
    monkeypatch.setattr(check.steps, "ALL", {step.__name__: (step, limit) for step, limit in limits.items()})
    monkeypatch.setattr(check, "MIN_SECONDS", 0.1)
    assert check.main(["--simulate", "--out", str(tmp_path), "--steps", "failing,hanging,dying,good"]) == 1
    (found,) = (json.loads(path.read_text())["steps"] for path in tmp_path.glob("*.json"))
    assert "device on fire" in found["failing"]["error"]
    assert found["hanging"]["error"] == "not done within 0 s"
    assert found["dying"]["error"] == "its process ended with status 7 and no result"
    assert found["good"]["found"] == {"x": 1}
    assert "**Failed after" in capsys.readouterr().out


def test_an_unknown_step_is_named(check, capsys):
    with pytest.raises(SystemExit):
        check.parse(["--steps", "link,speed"])
    assert "unknown steps speed" in capsys.readouterr().err


def test_the_steps_together_take_less_than_eight_minutes(check):
    assert sum(seconds for _, seconds in check.steps.ALL.values()) <= check.LIMIT_SECONDS < 8 * 60
