"""``datastates diff`` and the comparison behind it."""

from __future__ import annotations

import copy
import datetime
import json
import math
import os

import numpy
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from datastates import differences
from datastates.checkpoint_engine import CheckpointEngine
from datastates.cli import main
from datastates.differences import Kind, differences_of


def state() -> dict[str, object]:
    weight = torch.arange(6.0).view(2, 3)
    return {
        "model": {"w": weight, "tied": weight, "t": torch.arange(12.0).view(3, 4).t(), "e": torch.empty(0, 3)},
        "half": torch.ones(5, dtype=torch.bfloat16),
        "eight": torch.ones(4).to(torch.float8_e4m3fn),
        "complex": torch.ones(2, dtype=torch.complex64),
        "mask": torch.tensor([True, False]),
        "step": 3,
        1: torch.tensor(1),
    }


def compare(tmp_path, old, new, suffix=".pt"):
    paths = [tmp_path / f"old{suffix}", tmp_path / f"new{suffix}"]
    with CheckpointEngine({"host_cache_size": 2**-8}, rank=0) as engine:
        for path, content in zip(paths, (old, new), strict=True):
            engine.save(content, str(path))
    return list(differences_of({"": str(paths[0])}, {"": str(paths[1])}))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_equal_files_do_not_differ(tmp_path, suffix):
    assert compare(tmp_path, state(), state(), suffix) == []


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_each_kind_of_difference(tmp_path, suffix):
    new = state()
    new["model"]["w"] = new["model"]["tied"] = torch.tensor([[0.0, 1.0, 2.5], [3.0, 3.0, 5.0]])
    new["half"] = torch.ones(6, dtype=torch.bfloat16)
    new["mask"] = torch.tensor([1, 1])
    new["step"] = 4
    new["more"] = torch.zeros(2)
    del new["complex"]
    found = {one.fqn: one for one in compare(tmp_path, state(), new, suffix)}
    assert {fqn: one.kind.value for fqn, one in found.items()} == {
        "model.w": "changed",
        "model.tied": "changed",
        "half": "reshaped",
        "mask": "retyped",
        "step": "changed",
        "more": "added",
        "complex": "removed",
    }
    changed = found["model.tied"]
    assert (changed.num_changed, changed.num_elements) == (2, 6)
    assert (changed.max_difference, changed.mean_difference) == (1.0, 0.25)
    assert (found["half"].old, found["half"].new) == ("bfloat16 [5]", "bfloat16 [6]")
    assert (found["mask"].num_changed, found["mask"].max_difference) == (1, 1.0)
    assert ("3" in found["step"].old, "4" in found["step"].new) == (True, True)


@pytest.mark.parametrize(
    ("old", "new", "largest"),
    [(0.0, -0.0, 0.0), (math.nan, 1.0, math.nan), (math.inf, math.inf, None), (math.inf, -math.inf, math.inf)],
)
def test_the_last_bit_and_numbers_that_are_none(tmp_path, old, new, largest):
    found = compare(tmp_path, {"x": torch.tensor([old, 1.0])}, {"x": torch.tensor([new, 1.0])})
    if largest is None:
        assert found == []
        return
    assert [one.num_changed for one in found] == [1]
    assert found[0].max_difference == largest or math.isnan(largest) == math.isnan(found[0].max_difference)


def test_tensors_of_many_parts_and_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(differences, "PART_BYTES", 1000)
    monkeypatch.setattr(differences, "_BLOCK_ELEMENTS", 7)
    old = {str(n): torch.arange(100 + n, dtype=torch.float64) for n in range(9)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["4"][[3, 50, 103]] += torch.tensor([1.0, -4.0, 0.5], dtype=torch.float64)
    (found,) = compare(tmp_path, old, new)
    assert (found.fqn, found.num_changed, found.max_difference) == ("4", 3, 4.0)
    assert found.mean_difference == pytest.approx(5.5 / 104)


def test_checkpoints_file_by_file(tmp_path):
    with CheckpointEngine({"host_cache_size": 2**-8}, rank=0) as engine:
        for tag, names in (("one", "ab"), ("two", "bc")):
            with engine.checkpoint(str(tmp_path / tag), tag):
                for name in names:
                    engine.save({"w": torch.ones(3)}, str(tmp_path / tag / f"{name}.pt"))
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    result = CliRunner().invoke(main, ["diff", one, two])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "1 removed, 1 added"
    found = json.loads(CliRunner().invoke(main, ["diff", one, two, "--json"]).stdout)
    assert [(entry["kind"], entry["file"]) for entry in found] == [("removed", "a.pt"), ("added", "c.pt")]
    same = CliRunner().invoke(main, ["diff", one, one])
    assert (same.exit_code, same.stdout) == (0, "equal to the last bit\n")


def test_files_of_others_and_of_two_formats(tmp_path):
    tensors = {"a.b": torch.ones(3), "c": torch.zeros(2)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    torch.save({"a": {"b": torch.ones(3)}, "c": torch.ones(2)}, tmp_path / "y.pt")
    result = CliRunner().invoke(main, ["diff", str(tmp_path / "x.safetensors"), str(tmp_path / "y.pt")])
    assert result.exit_code == 1, result.output
    assert "c  float32 [2], 2 of 2 elements, max 1, mean 1" in result.stdout
    missing = CliRunner().invoke(main, ["diff", str(tmp_path / "x.safetensors"), str(tmp_path / "no")])
    assert missing.exit_code not in (0, 1)
    assert "no" in missing.stderr


def test_kinds_are_words():
    assert [kind.value for kind in Kind] == ["removed", "added", "reshaped", "retyped", "changed"]


class Odd:
    def __init__(self, number, tensor):
        self.number, self.tensor, self.itself = number, tensor, self


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x" * 200 + "a", "x" * 200 + "b"),
        (b"x" * 200 + b"a", b"x" * 200 + b"b"),
        (10**9000, 10**9000 + 1),
        (numpy.arange(3), numpy.arange(1, 4)),
        (numpy.arange(50_000), numpy.arange(50_000) + 1),
        (numpy.float32(1), numpy.float32(2)),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
        ({"a", "b"}, {"a", "c"}),
        (bytearray(b"a"), bytearray(b"b")),
        (torch.nn.Linear(1, 1).requires_grad_(False), torch.nn.Linear(1, 1).requires_grad_(False)),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
        (Odd(1, torch.ones(3)), Odd(2, torch.ones(3))),
        (Odd(1, torch.ones(3)), Odd(1, torch.zeros(3))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_differ_wherever_their_content_does(tmp_path, old, new, suffix):
    (found,) = compare(
        tmp_path, {"a": {"value": old}, "t": torch.ones(1)}, {"a": {"value": new}, "t": torch.ones(1)}, suffix
    )
    assert (found.kind, found.fqn) == (Kind.CHANGED, "a.value")
    assert (
        compare(tmp_path, {"more": torch.ones(2), "v": old}, {"more": torch.ones(2), "v": copy.deepcopy(old)}, suffix)
        == []
    )


def test_sets_have_no_order(tmp_path, run_script):
    code = "import sys, torch\ntorch.save({'s': {'a', 'b', 'c', 'd', 'e', 'f'}}, sys.argv[1])"
    paths = [str(tmp_path / f"{seed}.pt") for seed in range(4)]
    for seed, path in enumerate(paths):
        run_script(code, path, env={**os.environ, "PYTHONHASHSEED": str(seed)})
    assert all(list(differences_of({"": paths[0]}, {"": path})) == [] for path in paths[1:])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_names_that_are_there_twice(tmp_path, suffix):
    old = {1: torch.ones(3), "1": torch.ones(3), "a.b": 1, "a": {"b": 2}}
    new = {1: torch.zeros(3), "1": torch.ones(3), "a.b": 3, "a": {"b": 2}}
    assert [(one.fqn, one.kind.value) for one in compare(tmp_path, old, new, suffix)] == [
        ("a.b", "changed"),
        ("1", "changed"),
    ]
    assert compare(tmp_path, old, old, suffix) == []


def test_what_is_not_there_is_named(tmp_path):
    torch.save({}, tmp_path / "a.pt")
    done = CliRunner().invoke(main, ["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")])
    assert (done.exit_code, done.stderr) == (4, f"datastates: there is no file or folder {tmp_path}/b.pt\n")
