"""The examples of Lightning and of Hugging Face's Trainer, run twice in one process: the second run resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TWICE = """
import runpy, sys
_, script, out, *steps = sys.argv
for number in steps:
    sys.argv = [script, "--out", out, "--steps", number]
    runpy.run_path(script, run_name="__main__")
"""
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("lightning_training.py", "last.ckpt"),
        ("huggingface_trainer.py", "checkpoint-30"),
    ],
)
def test_it_trains_and_resumes(tmp_path, name, kept):
    command = [sys.executable, "-c", TWICE, str(EXAMPLES / name), str(tmp_path / "out"), "20", "30"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.partition(",")[0] for line in done.stdout.splitlines() if line.startswith("step ")] == [
        "step 20",
        "step 30",
    ]
    if name.startswith("lightning"):
        assert done.stderr.count("Restored all states from the checkpoint") == 1
    assert (tmp_path / "out" / kept).exists()
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]
