"""What a file holds, told without loading it, without torch, and without running anything in it."""

from __future__ import annotations

import argparse
import io
import pathlib
import pickle
import zipfile
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from datastates import list_file
from datastates.cli import main
from datastates.contents.dtypes import ITEMSIZES, SAFETENSORS_TYPES, STORAGE_TYPES
from datastates.contents.stub_pickle import Call, Global, StubStructure, read_pickle
from datastates.contents.subset_pickle import write_pickle
from datastates.contents.walk import leaves, pruned
from datastates.errors import CorruptCheckpointError
from datastates.formats import plan
from datastates.state import capture_host, default_is_eager
from formats.images import image_of

STATE = {
    "model": {
        "w": torch.arange(12.0).view(3, 4),
        "half": torch.ones(5).bfloat16(),
        "f8": torch.ones(2).to(torch.float8_e5m2),
    },
    "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "view": torch.arange(20)[5:9],
    "args": argparse.Namespace(a=1),
    "note": "x" * 200,
    "none": None,
    3: True,
}


def write(path: pathlib.Path, kind: str, state: Any = STATE) -> pathlib.Path:
    if kind == "torch.save":
        torch.save(state, path)
    else:
        path.write_bytes(image_of(plan(state, kind, capture_host, default_is_eager(0))))
    return path


@pytest.mark.parametrize("kind", ["torch", "safetensors", "torch.save"])
def test_tensors_with_their_place(tmp_path: pathlib.Path, kind: str) -> None:
    path = write(tmp_path / "x", kind)
    listing, data = list_file(path), path.read_bytes()
    found = {tensor.fqn: tensor for tensor in listing.tensors}
    assert list(found) == ["model.w", "model.half", "model.f8", "parameter", "view"]
    for name, expected in [
        ("model.w", STATE["model"]["w"]),
        ("view", STATE["view"]),
        ("model.half", STATE["model"]["half"]),
    ]:
        tensor = found[name]
        assert (f"torch.{tensor.dtype}", tensor.shape) == (str(expected.dtype), tuple(expected.shape))
        raw = expected.contiguous().view(torch.uint8).numpy().tobytes()
        assert data[tensor.offset : tensor.offset + tensor.nbytes] == raw
    assert found["model.f8"].dtype == "float8_e5m2"
    assert listing.nbytes == len(data)


@pytest.mark.parametrize("kind", ["torch", "safetensors", "torch.save"])
def test_values_by_their_class(tmp_path: pathlib.Path, kind: str) -> None:
    values = {value.fqn: value for value in list_file(write(tmp_path / "x", kind)).values}
    assert values["args"].class_name.endswith("Namespace")
    assert (values["groups.0.lr"].class_name, values["groups.0.lr"].text) == ("float", "0.1")
    assert values["3"].text == "True" and values["none"].text == "None"
    assert len(values["note"].text) == 80 and values["note"].text.endswith("…")


def test_files_of_others(tmp_path: pathlib.Path) -> None:
    safetensors.torch.save_file({"a.b": torch.ones(2, 3), "c": torch.ones(1).half()}, tmp_path / "x.safetensors")
    listing = list_file(tmp_path / "x.safetensors")
    assert {(one.fqn, one.dtype, one.shape) for one in listing.tensors} == {
        ("a.b", "float32", (2, 3)),
        ("c", "float16", (1,)),
    }
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(pickle.UnpicklingError, match="form of torch before"):
        list_file(tmp_path / "old.pt")


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_neither_torch_nor_the_classes_are_imported(tmp_path: pathlib.Path, run_script: Any, kind: str) -> None:
    path = write(tmp_path / "x", kind)
    code = (
        "import sys\n"
        "from datastates import list_file\n"
        "listing = list_file(sys.argv[1])\n"
        "print(len(listing.tensors), [name for name in ('torch', 'numpy', 'argparse') if name in sys.modules])\n"
    )
    assert run_script(code, path).stdout == "5 []\n"


class Attack:
    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (pathlib.Path("ran"),)


def test_nothing_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "bad": Attack()}, "x.pt")
    listing = list_file("x.pt")
    assert [tensor.fqn for tensor in listing.tensors] == ["w"] and listing.values[0].fqn == "bad"
    assert not pathlib.Path("ran").exists()


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"", "malformed"),
        (b"\x80\x02K\x01", "malformed"),
        (b"\x80\x02a.", "malformed"),
        (b"\x80\x02e.", "malformed"),
        (b"\x80\x02K\x01(e.", "elements for a int"),
        (b"\x80\x02](R.", "mark stands for a value"),
        (b"\x80\x02h\x05.", "malformed"),
        (b"\x80\x02}]K\x01s.", "unhashable"),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", "malformed"),
        (
            b"\x80\x02)q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60)) + b"}h\x3cK\x01s.",
            "a key of more",
        ),
        (b"\x80\x02I12\n.", "opcode INT is not supported"),
        (b"\x80\x02K\x01K\x02b.", "a state for a int"),
    ],
)
def test_malformed_pickles(pickled: bytes, message: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=message):
        read_pickle(pickled)


def test_a_pickle_that_multiplies_itself(tmp_path: pathlib.Path) -> None:
    bomb = b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(40)) + b"."
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("archive/data.pkl", bomb)
    with pytest.raises(CorruptCheckpointError, match=r"leaves in .* bytes"):
        list_file(tmp_path / "x.pt")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_read_and_written_again_is_the_same(protocol: int) -> None:
    shared = [1, 2]
    value = {
        "a": shared, "b": shared, "t": (1, (2.5, None)), "s": {1, 2}, "f": frozenset({3}), "y": b"bytes", "big": 2**900,
        "args": argparse.Namespace(x={"y": [True]}), 5: "five", "text": "ä" * 300, "path": pathlib.PurePosixPath("a/b"),
    }  # fmt: skip
    again = pickle.loads(write_pickle(read_pickle(pickle.dumps(value, protocol))))
    assert again == value and again["a"] is again["b"]


def test_an_object_that_is_part_of_its_own_arguments() -> None:
    inner: list[Any] = [1]
    call = Call(Global("builtins", "frozenset"), (inner,))
    inner.append(call)
    again = read_pickle(write_pickle(call))
    assert again.args[0][1].class_name == "builtins.frozenset"


def test_a_part_of_a_pickle(tmp_path: pathlib.Path) -> None:
    structure, root = StubStructure(), read_pickle(pickle.dumps({"a": [1, {"x": 2}], "b": (3, 4)}, 2))
    found = {leaf.fqn: leaf.path for leaf in leaves(structure, root)}
    part, places = pruned(structure, root, {found["a.1.x"]}, {found["b.1"]})
    assert pickle.loads(write_pickle(part)) == {"a": [None, {"x": 2}], "b": (None, None)}
    assert places[found["b.1"]] == (1, 1)


def test_what_is_imported_stays_a_name() -> None:
    assert read_pickle(pickle.dumps(pathlib.Path.touch, 4)) == Global("pathlib", "Path.touch")
    found = read_pickle(pickle.dumps(argparse.Namespace(a=1), 4))
    assert isinstance(found, Call) and (found.class_name, found.state) == ("argparse.Namespace", {"a": 1})


def test_tables_of_dtypes_are_those_of_torch() -> None:
    for name, itemsize in ITEMSIZES.items():
        assert getattr(torch, name).itemsize == itemsize, name
    for dtype, name in torch.storage._dtype_to_storage_type_map().items():
        assert STORAGE_TYPES[name] == str(dtype).removeprefix("torch.")
    for bits, name in SAFETENSORS_TYPES.values():
        assert name is None or isinstance(getattr(torch, name), torch.dtype)
        assert name in (None, "float4_e2m1fn_x2") or getattr(torch, name).itemsize * 8 == bits


def test_a_cut_file(tmp_path: pathlib.Path) -> None:
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    (tmp_path / "x.pt").write_bytes(buffer.getvalue()[:-100])
    with pytest.raises(CorruptCheckpointError, match="end record"):
        list_file(tmp_path / "x.pt")


@pytest.mark.parametrize("command", ["show", "diff"])
def test_a_compressed_archive_is_not_called_damaged(tmp_path: pathlib.Path, command: str) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "plain")
    with (
        zipfile.ZipFile(tmp_path / "plain") as plain,
        zipfile.ZipFile(tmp_path / "x", "w", zipfile.ZIP_DEFLATED) as made,
    ):
        for info in plain.infolist():
            made.writestr(info.filename, plain.read(info))
    with pytest.raises(pickle.UnpicklingError, match="compressed archive, which cannot be listed"):
        list_file(tmp_path / "x")
    found = CliRunner().invoke(main, [command, *[str(tmp_path / "x")] * (1 + (command == "diff"))])
    assert found.exit_code == 6 and "save it again" in found.output
