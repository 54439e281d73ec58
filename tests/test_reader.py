"""Loading by content: our files, those of torch.save and of safetensors, and what goes wrong on the way."""

from __future__ import annotations

import argparse
import errno
import os
import pathlib
import pickle
import sys
import types
from typing import Any

import pytest
import safetensors.torch
import torch

from datastates.errors import CheckpointNotFoundError, CorruptCheckpointError, ForeignObjectError
from datastates.formats import format_for, plan
from datastates.reader import load
from datastates.state import capture_host, default_is_eager
from formats.images import image_of

STATE = {"w": torch.arange(2000.0).view(40, 50), "n": 3, 1: "one"}


def write(path: pathlib.Path, kind: str, state: Any = STATE) -> None:
    path.write_bytes(image_of(plan(state, kind, capture_host, default_is_eager(100))))


def assert_state(loaded: Any) -> None:
    assert loaded.keys() == STATE.keys()
    assert torch.equal(loaded["w"], STATE["w"])
    assert (loaded["n"], loaded[1]) == (3, "one")


@pytest.mark.parametrize("name", ["x", "x.pt", "x.safetensors", "mp_rank_00_model_states.pt"])
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_content_counts_not_the_name(tmp_path: pathlib.Path, name: str, kind: str) -> None:
    write(tmp_path / name, kind)
    assert_state(load(tmp_path / name))
    assert_state(load(str(tmp_path / name), "cpu", weights_only=True))


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_files_of_torch_save(tmp_path: pathlib.Path, is_zip: bool, name: str) -> None:
    torch.save(STATE, tmp_path / name, _use_new_zipfile_serialization=is_zip)
    assert_state(load(tmp_path / name))
    assert load(tmp_path / name, "meta")["w"].is_meta


def test_files_of_safetensors(tmp_path: pathlib.Path) -> None:
    safetensors.torch.save_file({"a.b": STATE["w"], "c": torch.tensor(1)}, tmp_path / "x.safetensors")
    loaded = load(tmp_path / "x.safetensors")
    assert loaded.keys() == {"a.b", "c"}
    assert torch.equal(loaded["a.b"], STATE["w"])
    assert load(tmp_path / "x.safetensors", "meta")["c"].is_meta


def test_empty_file_of_safetensors(tmp_path: pathlib.Path) -> None:
    safetensors.torch.save_file({}, tmp_path / "x.safetensors")
    assert load(tmp_path / "x.safetensors") == {}


def test_missing_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no file .*absent\.pt"):
        load(tmp_path / "absent.pt")


def test_directory(tmp_path: pathlib.Path) -> None:
    with pytest.raises(IsADirectoryError, match=r"expected a file; datastates\.load_latest loads") as caught:
        load(tmp_path)
    assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_weights_only_refuses_objects(tmp_path: pathlib.Path, kind: str) -> None:
    write(tmp_path / "x", kind, {"w": torch.ones(1), "args": argparse.Namespace(a=1)})
    assert load(tmp_path / "x", weights_only=False)["args"].a == 1
    with pytest.raises(pickle.UnpicklingError, match="Namespace"):
        load(tmp_path / "x")  # nothing runs unasked


@pytest.fixture
def absent_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``absent_class(write)``: writes something with an object of a module that is gone afterwards."""

    def during(write_with: Any) -> None:
        module = types.ModuleType("absentee")
        kind = type("Arguments", (), {"__module__": "absentee"})
        module.Arguments = kind
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "absentee", module)
            write_with(kind())

    return during


def test_sound_file_of_an_absent_class_is_not_called_corrupt(tmp_path: pathlib.Path, absent_class: Any) -> None:
    absent_class(lambda made: write(tmp_path / "x.pt", "torch", {"args": made}))
    with pytest.raises(ModuleNotFoundError, match="absentee"):
        load(tmp_path / "x.pt", weights_only=False)
    with pytest.raises(ForeignObjectError, match=r"args holds absentee\.Arguments") as caught:
        load(tmp_path / "x.pt")
    assert (caught.value.fqn, caught.value.class_name) == ("args", "absentee.Arguments")


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_errors_of_map_location_pass_through(tmp_path: pathlib.Path, kind: str) -> None:
    write(tmp_path / "x", kind)

    def fail(storage: torch.UntypedStorage, location: str) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        load(tmp_path / "x", fail)
    with pytest.raises(RuntimeError, match="nowhere"):
        load(tmp_path / "x", "nowhere")


def test_short_reads_are_continued(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x", "safetensors")
    original, sizes = os.preadv, []

    def short(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        count = original(descriptor, [buffers[0][:700]], offset, flags)
        sizes.append(count)
        return count

    monkeypatch.setattr(os, "preadv", short)
    assert_state(load(tmp_path / "x"))
    assert len(sizes) > 10


def test_a_file_that_shrinks_while_it_is_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x", "safetensors")
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset, flags=0: 0)
    with pytest.raises(CorruptCheckpointError, match="the file ends at 0, expected") as caught:
        load(tmp_path / "x")
    assert caught.value.offset == 0


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_an_error_of_the_device_is_told_with_path_and_offset(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write(tmp_path / "x", kind)
    original = os.preadv

    def broken(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if len(buffers[0]) >= STATE["w"].numel() * 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match=rf"at \d+ of {tmp_path / 'x'}.*Input/output error") as caught:
        load(tmp_path / "x")
    assert caught.value.errno == errno.EIO


def test_no_descriptor_is_left_open(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "x", "safetensors")
    (tmp_path / "bad").write_bytes(b"bad" * 10)
    before = len(os.listdir("/proc/self/fd"))
    load(tmp_path / "x")
    with pytest.raises(CorruptCheckpointError):
        load(tmp_path / "bad")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("path", "configured", "expected"),
    [
        ("a/b.pt", None, "torch"),
        ("a/b.safetensors", None, "safetensors"),
        ("a/b.safetensors", "torch", "safetensors"),
        ("a/b.pt", "safetensors", "safetensors"),
        ("a/b.pt", "torch", "torch"),
    ],
)
def test_format_for(path: str, configured: str | None, expected: str) -> None:
    assert format_for(path, configured) == expected
