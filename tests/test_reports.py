"""Cases that users of checkpoint libraries reported, which no other test of ours covers as they were met.

Sources: public issues of the projects named at each test.
"""

from __future__ import annotations

import datetime
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from datastates import integrity, manifest, recovery
from datastates.checkpoint_engine import CheckpointEngine
from datastates.errors import CheckpointNotFoundError

SMALL = {"host_cache_size": 2**-8, "slab_bytes": 1 << 20}


def test_thousands_of_tensors_need_no_descriptor_each(run_script):
    """InternLM/xtuner#1852, pytorch/pytorch#973: one descriptor per tensor handed to another process."""
    code = """
import resource, torch
from datastates import CheckpointEngine
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
state = {str(n): torch.full((10,), float(n)) for n in range(5000)}
with CheckpointEngine({"host_cache_size": 2**-8}, rank=0) as engine:
    engine.save(state, "state.pt")
found = torch.load("state.pt")
assert all(float(found[str(n)][9]) == n for n in range(5000))
"""
    run_script(code)


def test_a_small_dev_shm_does_not_matter(tmp_path):
    """intelligent-machine-learning/dlrover#1046: SIGBUS in a container with 64 MB of /dev/shm."""
    code = """
import torch
from datastates import CheckpointEngine
with CheckpointEngine({"host_cache_size": 0.0625}, rank=0) as engine:
    engine.save({"w": torch.ones(16 << 20)}, "state.pt")
assert float(torch.load("state.pt")["w"].sum()) == 16 << 20
"""
    command = 'mount -t tmpfs -o size=1M tmpfs /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, sys.executable, code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace of its own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def test_relative_paths_mean_where_the_process_was(tmp_path, monkeypatch):
    """Lightning-AI/pytorch-lightning#19294: a pointer with a wrong relative path."""
    monkeypatch.chdir(tmp_path)
    with CheckpointEngine(SMALL, rank=0) as engine:
        with engine.checkpoint("run/step1", "step1"):
            engine.save({"w": torch.ones(1 << 19)}, "run/step1/a.pt")
        (tmp_path / "elsewhere").mkdir()
        os.chdir(tmp_path / "elsewhere")
    assert (tmp_path / "run" / "latest").read_text() == "step1"
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert manifest.read_latest(str(tmp_path / "moved")) == "step1"
    assert integrity.verify(str(tmp_path / "moved" / "step1")) == []


@pytest.mark.parametrize("copy", ["cp -r", "cp -a", "tar"])
def test_a_copy_is_as_complete_as_the_original(tmp_path, copy):
    """google/orbax#394: a finished checkpoint looks temporary on another storage, and is cleaned up."""
    source, target = tmp_path / "source", tmp_path / "target"
    with CheckpointEngine(SMALL, rank=0) as engine:
        with engine.checkpoint(str(source / "step1"), "step1"):
            engine.save({"w": torch.ones(1 << 18)}, str(source / "step1" / "a.pt"))
            engine.save({"w": torch.ones(1 << 18)}, str(source / "step1" / "b.pt"))
        engine.wait(persist=True)
        if copy == "tar":
            target.mkdir()
            subprocess.run(f"tar c -C {source} . | tar x -C {target}", shell=True, check=True)
        else:
            subprocess.run([*copy.split(), str(source), str(target)], check=True)
        assert recovery.clean_leftovers(str(target)) == []
        assert integrity.verify(str(target / "step1")) == []
        assert float(engine.load(str(target / "step1" / "a.pt"))["w"].sum()) == 1 << 18
        (target / "step1" / "b.pt").unlink()
        problems = integrity.check(str(target / "step1"))
        assert [Path(problem.path).name for problem in problems] == ["b.pt"]
        assert recovery.clean_leftovers(str(target)) == []  # what is incomplete is not ours to delete
        assert (target / "step1" / "a.pt").exists()
        shutil.rmtree(target / "step1" / ".datastates")
        (target / "step1" / ".datastates" / "some-attempt").mkdir(parents=True)
        with pytest.raises(CheckpointNotFoundError):
            engine.load(str(target / "step1" / "a.pt"))


def test_numpy_paths_dates_and_nan_in_the_state_are_saved(tmp_path, assert_same_state):
    """huggingface/transformers#10299: numpy scalars among the metrics make the save fail in its middle."""
    state = {
        "loss": np.float32(1.5),
        "n": np.int64(3),
        "t": torch.tensor(2.0),
        "nan": float("nan"),
        "inf": -math.inf,
        "path": Path("x"),
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "array": np.arange(6).reshape(2, 3),
    }
    with CheckpointEngine(SMALL, rank=0) as engine:
        for suffix in ("pt", "safetensors"):
            engine.save(state, str(tmp_path / f"state.{suffix}"))
            found = engine.load(str(tmp_path / f"state.{suffix}"))
            assert math.isnan(found.pop("nan"))
            assert np.array_equal(found.pop("array"), state["array"])
            assert_same_state(found, {key: value for key, value in state.items() if key not in ("nan", "array")})
