"""Checkpoints against what ``torch.save`` wrote of the same moment, where datastates cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from integrations.deepspeed_worker import assert_equal


def compare_folders(found: str, expected: str, mmap: bool = True) -> None:
    """Every file of a checkpoint, to the last bit; the expected ones may lie in folders of the ranks.

    Args:
        found: the checkpoint's folder.
        expected: the folder with what ``torch.save`` wrote.
        mmap: load each file a second time, mapped.
    """
    forget_datastates()
    paths = {path.name: path for path in sorted(Path(expected).rglob("*")) if path.is_file()}
    names = {path.name for path in Path(found).glob("*.pt")}
    assert names == set(paths), f"{sorted(names)}, expected {sorted(paths)}"
    num_tensors = 0
    for name, path in paths.items():
        state = torch.load(path, map_location="cpu", weights_only=False)
        for is_mapped in (False, True) if mmap else (False,):
            loaded = torch.load(Path(found, name), map_location="cpu", weights_only=False, mmap=is_mapped)
            num_tensors += assert_equal(loaded, state, name)
    assert num_tensors > 5


def compare_runs(folder: str) -> None:
    """What `deepspeed_runs.save_and_wait` has left: its first save, and its second if that was completed."""
    place = Path(folder)
    tags = ["first", "second"] if list((place / "second").glob("*.pt")) else ["first"]
    for tag in tags:
        compare_folders(str(place / tag), str(place / "expected" / tag), mmap=tag == "first")
        compare_side_files(place / tag, place / "expected side files" / tag)


def compare_side_files(found: Path, expected: Path) -> None:
    """Every file in folders of the checkpoint, byte for byte."""
    names = {path.relative_to(expected) for path in expected.rglob("*") if path.is_file()}
    assert {path.relative_to(found) for path in found.glob("offloaded_tensors/*/*")} == names
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), f"{name}: bytes differ"


def forget_datastates() -> None:
    """From here on this process is one in which the package is not installed."""
    for name in [*sys.modules, "datastates"]:
        if name.partition(".")[0] == "datastates":
            sys.modules[name] = None  # type: ignore[assignment]
