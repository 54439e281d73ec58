"""Damaged files, each named after the one thing that is wrong: every one is refused with what and where."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from images import image_of

from datastates.errors import CorruptCheckpointError
from datastates.formats import plan
from datastates.reader import load
from datastates.state import capture_host, default_is_eager

STATE = {"a": torch.arange(4, dtype=torch.float32), "b": [torch.arange(3, dtype=torch.int8), "text"]}


def good(kind: str) -> bytes:
    return image_of(plan(STATE, kind, capture_host, default_is_eager(0)))


def header_of(data: bytes) -> dict[str, Any]:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(data: bytes, header: dict[str, Any] | bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def entry_changed(**changes: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        header = header_of(data)
        header["a"].update(changes)
        return with_header(data, header)

    return change


def tree_changed(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        header = header_of(data)
        tree = json.loads(header["__metadata__"]["datastates"])
        change(tree)
        header["__metadata__"]["datastates"] = json.dumps(tree)
        return with_header(data, header)

    return apply


def name_twice(data: bytes) -> bytes:
    text = json.dumps(header_of(data))
    return with_header(data, ('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' + text[1:]).encode())


def metadata_changed(value: object) -> Callable[[bytes], bytes]:
    return lambda data: with_header(data, header_of(data) | {"__metadata__": value})


SAFETENSORS = {
    "empty-file": (lambda data: b"", "at least 8 bytes, found 0"),
    "length-cut": (lambda data: data[:5], "at least 8 bytes, found 5"),
    "length-beyond-the-file": (lambda data: (10**6).to_bytes(8, "little") + data[8:], "for a header of 1000000"),
    "length-beyond-the-limit": (lambda data: (2**63).to_bytes(8, "little") + data[8:], "at most 100000000 bytes"),
    "header-cut": (lambda data: data[:100], "found 100 bytes"),
    "header-not-json": (lambda data: with_header(data, b"{nonsense"), "valid JSON"),
    "header-not-utf8": (lambda data: with_header(data, b'{"\xff":1}'), "valid JSON in UTF-8"),
    "header-too-deep": (lambda data: with_header(data, b'{"a":' + b"[" * 200_000), "valid JSON"),
    "header-is-a-list": (lambda data: with_header(data, b"[1, 2]"), "begins with '{'"),
    "name-twice": (name_twice, "'a' twice"),
    "one-byte-missing": (lambda data: data[:-1], r"\(1 missing\)"),
    "a-page-missing": (lambda data: data[:4096], r"missing\)"),
    "seven-bytes-too-many": (lambda data: data + b"1234567", r"\(7 left over\)"),
    "offsets-leave-a-hole": (entry_changed(data_offsets=[1, 17]), "begin at"),
    "offsets-in-reverse": (entry_changed(data_offsets=[16, 0]), "in order"),
    "offsets-of-one": (entry_changed(data_offsets=[0]), "in order"),
    "offsets-of-text": (entry_changed(data_offsets=["0", "16"]), "in order"),
    "offsets-beyond-the-file": (entry_changed(data_offsets=[0, 10**9], shape=[250_000_000]), "begin at|missing"),
    "shape-too-large": (entry_changed(shape=[5]), "20 bytes for F32 of shape .5., found 16"),
    "shape-overflows": (entry_changed(shape=[2**62, 2**62]), "bytes for F32"),
    "shape-negative": (entry_changed(shape=[-4]), "sizes of zero or more"),
    "shape-of-booleans": (entry_changed(shape=[True]), "sizes of zero or more"),
    "dtype-unknown": (entry_changed(dtype="F33"), "'F33'"),
    "dtype-a-list": (entry_changed(dtype=["F32"]), "a name of safetensors"),
    "entry-has-more": (entry_changed(extra=1), "dtype, shape and data_offsets"),
    "entry-is-a-number": (lambda data: with_header(data, header_of(data) | {"a": 1}), "dtype, shape and data_offsets"),
    "metadata-of-numbers": (metadata_changed({"x": 1}), "an object of strings"),
    "metadata-a-list": (metadata_changed([]), "an object of strings"),
    "tree-not-json": (metadata_changed({"datastates": "{"}), "tree of the state is malformed"),
    "tree-a-number": (metadata_changed({"datastates": "5"}), "tree of the state is malformed"),
    "tree-of-the-future": (tree_changed(lambda tree: tree.update(version=99)), "version 99, this datastates reads 1"),
    "tree-elsewhere": (
        metadata_changed({"datastates": '{"version":1,"tensor":"no"}'}),
        "tree of the state is malformed",
    ),
    "tree-without-root": (tree_changed(lambda tree: tree.pop("root")), "tree of the state is malformed"),
    "tree-of-unknown-nodes": (tree_changed(lambda tree: tree.update(root={"alien": 1})), "malformed"),
    "tree-node-of-two": (tree_changed(lambda tree: tree.update(root={"int": "1", "str": "x"})), "2 members"),
    "tree-tensor-out-of-range": (tree_changed(lambda tree: tree.update(root={"tensor": 7})), "malformed"),
    "tree-tensor-unnamed": (tree_changed(lambda tree: tree["tensors"][0].update(name="no")), "malformed"),
    "tree-tensor-of-other-size": (
        tree_changed(lambda tree: tree["tensors"][0].update(shape=[5])),
        "the tree expects 20",
    ),
    "tree-dtype-unknown": (tree_changed(lambda tree: tree["tensors"][0].update(dtype="float33")), "no dtype named"),
    "tree-dtype-a-function": (tree_changed(lambda tree: tree["tensors"][0].update(dtype="load")), "no dtype named"),
    "tree-sparse-index-out-of-range": (
        tree_changed(lambda tree: tree.update(root={"sparse": ["sparse_coo", {"tensor": 1}, 1, {"size": [1]}, True]})),
        "malformed",
    ),
    "tree-factory-unknown": (tree_changed(lambda tree: tree.update(root={"defaultdict": ["exec", []]})), "malformed"),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(tmp_path: pathlib.Path, name: str) -> None:
    damage, message = SAFETENSORS[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(damage(good("safetensors")))
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        load(path)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)


def _pickle_lost(data: bytes) -> bytes:
    return data.replace(b"archive/data.pkl", b"archive/lost.pkl")


def _pickle_damaged(data: bytes) -> bytes:
    begin = data.index(b"\x80\x02}")
    return data[: begin + 2] + b"\xff" + data[begin + 3 :]


TORCH = {
    "empty-file": (lambda data: b"", "0 bytes .* neither"),
    "garbage": (lambda data: b"garbage" * 100, "neither a torch.save file nor safetensors"),
    "one-byte-missing": (lambda data: data[:-1], "incomplete"),
    "half-missing": (lambda data: data[: len(data) // 2], "incomplete"),
    "only-the-magic": (lambda data: data[:4], "within its 4 bytes"),
    "seven-bytes-too-many": (lambda data: data + b"1234567", "7 bytes too many"),
    "bytes-lost-in-the-middle": (lambda data: data[:500] + data[600:], "bytes are missing"),
    "bytes-added-in-the-middle": (
        lambda data: data[:500] + bytes(64) + data[500:],
        "bytes are missing .* or were added",
    ),
    "pickle-lost": (_pickle_lost, "no entry data.pkl"),
    "pickle-damaged": (_pickle_damaged, "checksum of its entry 'data.pkl'"),
}


@pytest.mark.parametrize("name", TORCH)
def test_torch(tmp_path: pathlib.Path, name: str) -> None:
    damage, message = TORCH[name]
    path = tmp_path / "x.pt"
    path.write_bytes(damage(good("torch")))
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        load(path)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("nbytes", [0, 20, 60, 300])
def test_torch_file_of_the_old_kind_that_was_cut(tmp_path: pathlib.Path, nbytes: int) -> None:
    path = tmp_path / "old.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:nbytes])
    with pytest.raises(CorruptCheckpointError, match=re.escape(str(path))):
        load(path)


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_every_truncation_is_refused(tmp_path: pathlib.Path, kind: str) -> None:
    data = good(kind)
    path = tmp_path / f"x.{kind}"
    for nbytes in range(0, len(data), max(len(data) // 60, 1)):
        path.write_bytes(data[:nbytes])
        with pytest.raises(CorruptCheckpointError):
            load(path)
