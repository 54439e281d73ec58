"""The benchmark of conversions makes checkpoints that both converters take, and its table holds the right numbers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from datastates.universal import convert_to_universal

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "convert.py"


@pytest.fixture(scope="module")
def bench():
    pytest.importorskip("deepspeed")
    spec = importlib.util.spec_from_file_location("benchmark_convert", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_checkpoint_is_one_of_its_stage(bench, stage, tmp_path):
    shapes = bench.shapes_of(1, 8)
    nbytes = bench.make_checkpoint(tmp_path / "checkpoint", shapes, stage, 3)
    assert nbytes == sum(path.stat().st_size for path in (tmp_path / "checkpoint").iterdir())
    convert_to_universal(tmp_path / "checkpoint", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out" / "zero").iterdir() if path.is_dir()} == set(shapes)
    assert bench.check_equal(tmp_path / "out", tmp_path / "out") > 3 * len(shapes)


def test_results_that_differ_are_seen(bench, tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        torch.save({"param": torch.tensor([value])}, tmp_path / name / "fp32.pt")
    with pytest.raises(SystemExit, match="differs"):
        bench.check_equal(tmp_path / "a", tmp_path / "b")


def test_table_has_medians_ranges_and_ratios(bench):
    rows = [
        bench.Row("ds_to_universal", [bench.Sample(s, s, 1000.0, 200.0) for s in (8.0, 4.0, 6.0)]),
        bench.Row("datastates", [bench.Sample(s, s, 100.0, 100.0) for s in (2.0, 1.0, 4.0)]),
    ]
    lines = bench.table(rows, 2**30).splitlines()
    assert lines[2:] == [
        "| ds_to_universal | 6 (4 to 8) | 6 (4 to 8) | 0.17 | 1e+03 (1e+03 to 1e+03) | 200 (200 to 200) | 1.00 x |",
        "| datastates | 2 (1 to 4) | 2 (1 to 4) | 0.50 | 100 (100 to 100) | 100 (100 to 100) | 3.00 x |",
    ]
