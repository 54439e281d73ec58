"""The report of all ways to save, at sizes that tell nothing: that it runs, and finds what is torn."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
MODULES = (
    "bars",
    "checkpointers",
    "loop",
    "plan",
    "plots",
    "ranks",
    "report",
    "save",
    "spare",
    "steady",
    "tables",
    "worker",
)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports modules of the benchmarks as their scripts do, and forgets them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield lambda name: importlib.import_module(name)
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_whole_report_runs_and_is_drawn_again_from_its_file(benchmark: Any, tmp_path: Path) -> None:
    report: ModuleType = benchmark("report")
    sizes = dataclasses.replace(
        report.QUICK, growth_nbytes=(2**20,), growth_tensors=(), real_ranks=(), simulated_ranks=(10,), small_tensors=50
    )
    (tmp_path / "states").mkdir()

    found = report.measure(tmp_path, sizes, ["datastates"])
    (tmp_path / "report.json").write_text(json.dumps(found))
    assert report.main(["--draw", str(tmp_path / "report.json")]) == 0

    text = (tmp_path / "report.md").read_text()
    assert found["missing"] == {}
    assert "### Few large tensors" in text and "| datastates |" in text
    assert found["big"]["datastates"][0]["torn"] == 0
    names = ("bandwidth", "blocked", "growth", "memory", "timeline")
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == [f"{name}.svg" for name in names]


def test_a_way_that_reads_the_state_too_late_is_torn(benchmark: Any, tmp_path: Path) -> None:
    worker, checkpointers = benchmark("worker"), benchmark("checkpointers")

    class Late(checkpointers.TorchSave):  # type: ignore[misc, name-defined]
        def save(self, state: dict[str, torch.Tensor], folder: Path) -> Any:
            return state, folder

        def wait_written(self, handle: Any) -> None:
            torch.save(handle[0], handle[1] / checkpointers.FILE)

    given = {"nbytes": 2**16, "num_tensors": 4, "saves": 1, "pass_seconds": 0.0, "dir": str(tmp_path / "states")}

    assert worker.state_case(Late(0), given)["torn"] == 4
    assert worker.state_case(checkpointers.TorchSave(0), given)["torn"] == 0


@pytest.mark.skipif(importlib.util.find_spec("torchsnapshot") is not None, reason="the package is there")
def test_a_way_whose_package_is_missing_is_named_and_left_out(benchmark: Any, tmp_path: Path) -> None:
    report = benchmark("report")
    bench = report.Bench(tmp_path, report.QUICK)

    assert bench.in_turns("few", "state", ["torchsnapshot"], {"cache_bytes": 0}, 2) == {}

    assert bench.missing == {"torchsnapshot": "No module named 'torchsnapshot'"}
    assert "- torchsnapshot: No module named" in "\n".join(benchmark("tables")._missing(bench.missing))


def test_all_bars_are_measured(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bars: ModuleType = benchmark("bars")

    rows, found = bars.run(tmp_path, bars.QUICK, list(bars.GROUPS))

    assert {row.bar for row in rows} == set("1234567")
    assert found["missing"] == {}
    assert all(row.line().count("|") == 6 for row in rows)
    with pytest.raises(SystemExit):
        bars.main(["--dir", str(tmp_path), "--only", "8"])
    assert "no bar 8; there are 1, 2, 3, 4, 5, 6, 7" in capsys.readouterr().err
