"""``datastates bench``: the figures hang together, and nothing stays behind."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from datastates.bench import bench
from datastates.cli import main
from datastates.cli.exit_codes import exit_code_of
from datastates.config import GIB
from datastates.errors import ConfigError, StorageError


def test_figures_of_a_small_state(tmp_path):
    done: list[int] = []
    result = bench(str(tmp_path), 3 << 20, num_saves=3, progress=done.append)
    assert (result.nbytes, result.num_saves, sum(done)) == (3 << 20, 3, 9 << 20)
    assert 0 < result.blocked_seconds <= result.staged_seconds <= result.durable_seconds < result.sustainable_seconds
    assert os.listdir(tmp_path) == []


def test_text_and_json(tmp_path):
    arguments = ["bench", str(tmp_path), "--state-gb", "0.005", "--saves", "2", "--step-seconds", "1e-9"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "sustainable: save-interval" in result.stdout
    small_cache = [*arguments, "--host-cache-gb", "0.03125", "--json"]
    printed = json.loads(CliRunner().invoke(main, small_cache).stdout)
    assert printed["nbytes"] == int(0.005 * GIB)
    assert printed["nbytes_per_second"] > 0
    assert os.listdir(tmp_path) == []


def test_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="1 saves"):
        bench(str(tmp_path), 1, num_saves=1)
    with pytest.raises(StorageError, match="are free"):
        bench(str(tmp_path), 1 << 60)
    result = CliRunner().invoke(main, ["bench", str(tmp_path / "missing")])
    assert (result.exit_code, result.stdout) == (exit_code_of(StorageError("")), "")
    assert "missing is no folder" in result.stderr
    assert os.listdir(tmp_path) == []


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match="host_cache"):
        bench(str(tmp_path), 1 << 20, section={"host_cach_size": 1})
    assert os.listdir(tmp_path) == []
