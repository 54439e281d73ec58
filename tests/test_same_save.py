"""What reads a checkpoint file by file says so when it is saved again or removed meanwhile, and leaves nothing half."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from datastates import differences, reader
from datastates.checkpoint_engine import CheckpointEngine
from datastates.cli import main
from datastates.cli import verify as verify_command
from datastates.conversion import (
    convert_to_distributed,
    convert_to_huggingface,
    convert_to_safetensors,
    convert_to_torch,
    convert_to_weights,
    same_state,
)
from datastates.errors import StorageError
from datastates.same_save import SameSave

CONVERSIONS: dict[str, Callable[..., Any]] = {
    "safetensors": convert_to_safetensors,
    "torch": convert_to_torch,
    "dcp": convert_to_distributed,
    "hf": convert_to_huggingface,
    "fp32": convert_to_weights,
}


def save(folder: pathlib.Path, value: float, num_files: int = 1) -> None:
    with CheckpointEngine({"host_cache_size": 0.01}, rank=0) as engine:
        with engine.checkpoint(str(folder), folder.name):
            for index in range(num_files):
                engine.save({"w": torch.full((300,), value)}, str(folder / f"{index}.pt"))
        engine.wait(persist=True)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    save(tmp_path / "step", 1.0)
    return tmp_path / "step"


def after_first_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, event: Callable[[], None]) -> None:
    original, calls = getattr(owner, name), 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        found = original(*arguments, **named)
        if calls == 1:
            event()
        return found

    monkeypatch.setattr(owner, name, call)


def is_stale(error: StorageError) -> bool:
    return error.errno == errno.ESTALE and "was saved again or removed" in str(error)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_of_a_checkpoint_that_is_saved_again(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "hf":
        (folder / "config.json").write_text("{}", encoding="utf-8")
    after_first_call(monkeypatch, reader, "verify", lambda: save(folder, 2.0))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(StorageError) as caught:
        CONVERSIONS[name](folder, tmp_path / ("out.pt" if name == "fp32" else "out"))
    assert is_stale(caught.value) and caught.value.path == str(folder)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.pt").exists()
    CONVERSIONS[name](folder, tmp_path / ("out.pt" if name == "fp32" else "out"))
    assert set(before) < set(os.listdir(tmp_path))


@pytest.mark.leaves_partial_files  # the next conversion clears away what is not of its sources
def test_files_of_two_saves_are_not_converted_together(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is sound; together they are no state of any step."""
    folder = tmp_path / "step"
    save(folder, 1.0, 3)
    after_first_call(monkeypatch, same_state, "load_checked", lambda: save(folder, 2.0, 3))
    with pytest.raises(StorageError) as caught:
        convert_to_safetensors(folder, tmp_path / "out", num_workers=1)
    assert is_stale(caught.value) and not (tmp_path / "out").exists()


def test_nor_are_they_compared(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", 1.0, 3)
    save(tmp_path / "b", 1.0, 3)
    after_first_call(monkeypatch, differences, "list_file", lambda: save(tmp_path / "b", 2.0, 3))
    files = [{f"{i}.pt": str(tmp_path / one / f"{i}.pt") for i in range(3)} for one in "ab"]
    with pytest.raises(StorageError) as caught:
        list(differences.differences_of(*files))
    assert is_stale(caught.value)


def test_a_comparison_that_fails_because_of_it_says_so(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", 1.0)
    save(tmp_path / "b", 1.0)
    after_first_call(monkeypatch, differences, "list_file", lambda: shutil.rmtree(tmp_path / "b"))
    found = CliRunner().invoke(main, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert found.exit_code == 9 and "was saved again or removed" in found.output and found.stdout == ""


def test_one_file_that_is_verified_meanwhile_is_not_called_damaged(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_first_call(monkeypatch, verify_command, "record_of", lambda: save(folder, 2.0))
    found = CliRunner().invoke(main, ["verify", str(folder / "0.pt")])
    assert found.exit_code == 9 and "was saved again or removed" in found.output
    assert json.loads(CliRunner().invoke(main, ["verify", "--json", str(folder / "0.pt")]).stdout)[0]["is_sound"]


def test_what_has_no_record_is_not_watched(tmp_path: pathlib.Path) -> None:
    torch.save({}, tmp_path / "x.pt")
    with SameSave([str(tmp_path), str(tmp_path / "x.pt"), str(tmp_path / "absent" / "y.pt")]) as same:
        torch.save({"a": 1}, tmp_path / "x.pt")
        same.check()


def test_a_failure_of_the_body_stays_what_it_is_where_nothing_has_changed(folder: pathlib.Path) -> None:
    with pytest.raises(KeyError), SameSave([str(folder)]):
        raise KeyError("x")
