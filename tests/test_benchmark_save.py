"""The benchmark measures what it says, and its table holds the right numbers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "save.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("benchmark_save", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_table_has_medians_ranges_and_ratios(bench):
    rows = [
        bench.Row("torch.save", [bench.Sample(s, None, s) for s in (1.0, 4.0, 2.0)]),
        bench.Row("datastates", [bench.Sample(0.01, 0.2, s) for s in (0.5, 0.25, 1.0)]),
        bench.Row("raw O_DIRECT", [bench.Sample(None, None, 0.4)]),
    ]
    lines = bench.table(rows, 2**30).splitlines()
    assert lines[2:] == [
        "| torch.save | 2 (1 to 4) |  | 2 (1 to 4) | 0.50 | 1/1 | 1.00 x |",
        "| datastates | 0.01 (0.01 to 0.01) | 0.2 (0.2 to 0.2) | 0.5 (0.25 to 1) | 2.00 | 1/200 | 4.00 x |",
        "| raw O_DIRECT |  |  | 0.4 (0.4 to 0.4) | 2.50 |  | 5.00 x |",
    ]
    assert {line.count("|") for line in lines} == {8}


def test_rounds_interleave_and_the_first_does_not_count(bench, tmp_path):
    order = []

    def method(name):
        def save(path):
            assert not path.exists(), "the file of the save before is deleted"
            path.touch()
            order.append(name)
            return bench.Sample(None, None, float(len(order)))

        return save

    rows = bench.measure({name: method(name) for name in "abc"}, tmp_path, repeat=2)
    assert "".join(order) == "abcbcacab"
    assert {row.method: row.values("durable_seconds") for row in rows} == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


def test_tmpfs_is_refused(bench, small_disk, capsys):
    folder = small_disk(1 << 20)
    assert bench.file_system(folder) == ("tmpfs", "tmpfs")
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--dir", str(folder)])
    assert "is on a tmpfs: nothing is durable there" in capsys.readouterr().err


def test_a_file_with_another_state_is_refused(bench, tmp_path):
    state = bench.make_state(8000)
    torch.save(state, tmp_path / "a.pt")
    bench.check_saved(tmp_path / "a.pt", state)
    state["layers.3.weight"][0] += 1
    with pytest.raises(SystemExit, match="not the state that was saved"):
        bench.check_saved(tmp_path / "a.pt", state)


def test_the_whole_benchmark_runs_and_cleans_up(bench, tmp_path, capsys):
    folder = tmp_path / "bench"
    if bench.file_system(tmp_path)[0] in ("tmpfs", "ramfs"):
        pytest.skip("the benchmark refuses tmpfs, and the temporary folder is on one")
    arguments = ["--gib", "0.03", "--repeat", "1", "--host-cache-size", "0.0625", "--dir", str(folder)]
    bench.main([*arguments, "--json", str(tmp_path / "out" / "save.json")])
    assert list(folder.iterdir()) == []
    found = json.loads((tmp_path / "out" / "save.json").read_text())
    assert [row["method"] for row in found["rows"]] == ["torch.save", "datastates", "raw O_DIRECT"]
    assert found["nbytes"] == 32212240
    (sample,) = found["rows"][1]["samples"]
    assert 0 < sample["blocked_seconds"] <= sample["staged_seconds"] <= sample["durable_seconds"]
    assert "| datastates |" in capsys.readouterr().out
