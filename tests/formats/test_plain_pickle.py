"""Pickles of tensors and containers alone are read by the unpickler in C, and come out as by torch's; no other is."""

from __future__ import annotations

import gc
import io
import pathlib
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from datastates import list_file, load
from datastates.contents.stub_pickle import read_whole
from datastates.errors import CorruptCheckpointError
from datastates.formats import plain_pickle
from formats.equality import assert_same

_TUPLES = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))
_ENDLESS_KEY = b"\x80\x02" + _TUPLES + b"}h\x3cK\x01s."
_ENDLESS_ARGUMENT = b"\x80\x02ccollections\nOrderedDict\nq\xc8" + _TUPLES + b"h\xc8](h\x3cK\x01\x86e\x85R."
_LEGACY_HEAD = b"".join(
    pickle.dumps(value, 2)
    for value in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}})
)


def saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def with_pickle(pickled: bytes, compression: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved([torch.ones(2)]))) as old, zipfile.ZipFile(made, "w", compression) as new:
        for info in old.infolist():
            new.writestr(info.filename, pickled if info.filename.endswith("data.pkl") else old.read(info))
    return made.getvalue()


def pickle_in(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def usual_state() -> dict[str, Any]:
    weight = torch.arange(24.0).view(4, 6)
    ordered = OrderedDict({"w": weight, "t": weight.t(), "tied": weight, "p": torch.nn.Parameter(torch.ones(3))})
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as modules have it
    state: dict[str, Any] = {"model": ordered, "empty": torch.empty(0, 3), "scalar": torch.tensor(2.0)}
    state["bits"] = torch.tensor([1 + 2j]).conj()
    state["half"] = torch.ones(2, dtype=torch.bfloat16)
    state["leaf"] = torch.ones(2, requires_grad=True)
    state["values"] = (1, 2.5, None, True, "x", 2**70, [[], {}], {1: 2})
    return state


def test_a_usual_state_is_read_in_c_and_is_what_torch_makes_of_it(tmp_path: pathlib.Path) -> None:
    data = saved(usual_state())
    (tmp_path / "x").write_bytes(data)
    assert plain_pickle.is_plain(read_whole(pickle_in(data)))
    found, expected = load(tmp_path / "x"), torch.load(io.BytesIO(data))
    assert_same(found, expected)
    assert found["model"]._metadata == {"": {"version": 1}}
    assert found["model"]["tied"] is found["model"]["w"]
    assert found["model"]["t"].data_ptr() == found["model"]["w"].data_ptr()
    assert type(found["model"]["p"]) is torch.nn.Parameter
    assert found["leaf"].requires_grad and found["bits"].is_conj()


def test_a_tensor_does_not_reach_beyond_a_storage_without_bytes(tmp_path: pathlib.Path) -> None:
    pickled = pickle_in(saved([torch.empty(0)])).replace(b"K\x00\x85", b"K\x09\x85")
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved([torch.empty(0)]))) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, pickled if info.filename.endswith("data.pkl") else old.read(info))
    (tmp_path / "x").write_bytes(made.getvalue())
    with pytest.raises(CorruptCheckpointError, match="beyond its storage of 0 bytes"):
        load(tmp_path / "x")


@pytest.mark.parametrize("form", ["torch's path", "deflated", "older"])
def test_nor_does_one_that_torch_reads(tmp_path: pathlib.Path, form: str) -> None:
    """With a `torch.Size` in it, which is not read in C."""
    made = io.BytesIO()
    torch.save([torch.empty(0), torch.Size([1])], made, _use_new_zipfile_serialization=form != "older")
    if form == "older":
        data = made.getvalue().replace(b"K\x00\x85", b"K\x09\x85")
    else:
        pickled = pickle_in(made.getvalue()).replace(b"K\x00\x85", b"K\x09\x85")
        data = with_pickle(pickled, zipfile.ZIP_DEFLATED if form == "deflated" else zipfile.ZIP_STORED)
        assert not plain_pickle.is_plain(read_whole(pickled))
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"ends at byte 36 of a storage of 0"):
        load(tmp_path / "x")


@pytest.mark.parametrize("read", [list_file, lambda path: load(path, into=[torch.zeros(1)])])
def test_a_parameter_of_a_parameter_without_end_is_refused(tmp_path: pathlib.Path, read: Callable[..., Any]) -> None:
    pickled = b"\x80\x02ctorch._utils\n_rebuild_parameter\nq\xc80" + b"h\xc8" * 5000 + b"N" + b"\x85R" * 5000 + b"."
    (tmp_path / "x").write_bytes(with_pickle(pickled, zipfile.ZIP_STORED))
    with pytest.raises(CorruptCheckpointError, match="wrapped more than"):
        read(tmp_path / "x")


def test_a_storage_without_a_dtype_is_left_to_torch(tmp_path: pathlib.Path) -> None:
    data = saved([torch.ones(2).untyped_storage()])
    (tmp_path / "x").write_bytes(data)
    assert not plain_pickle.is_plain(read_whole(pickle_in(data)))
    assert bytes(load(tmp_path / "x")[0]._untyped_storage) == bytes(torch.ones(2).untyped_storage())


def test_with_fake_tensors_about_torch_loads(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").write_bytes(saved([torch.ones(2)]))
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "y")
    with FakeTensorMode():
        assert isinstance(load(tmp_path / "x")[0], FakeTensor)
        assert isinstance(load(tmp_path / "y")["w"], FakeTensor)


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(b"\x80\x02cos\nsystem\n.", id="another import"),
        pytest.param(b"\x80\x02cos\nsystem\n0N.", id="an import that is dropped"),
        pytest.param(b"\x80\x02ccollections\nOrderedDict\n]\x85R.", id="an OrderedDict with arguments"),
        pytest.param(b"\x80\x02ccollections\nOrderedDict\n)RN}\x86b.", id="slots of an OrderedDict"),
        pytest.param(b"\x80\x02ccollections\nOrderedDict\n)\x81.", id="an object made by __new__"),
        pytest.param(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R}b.", id="a state for a tensor"),
        pytest.param(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)RK\x00K\x01s.", id="an element of a tensor"),
    ],
)
def test_whatever_else_is_left_to_torch(pickled: bytes) -> None:
    assert not plain_pickle.is_plain(read_whole(pickled))


def test_nothing_can_be_set_on_the_functions_a_pickle_imports() -> None:
    for function in plain_pickle._ALLOWED.values():
        with pytest.raises((pickle.UnpicklingError, TypeError)):
            function.__defaults__ = ()


@pytest.mark.parametrize("pickled", [_ENDLESS_KEY, _ENDLESS_ARGUMENT], ids=["key", "argument"])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_what_takes_for_ever_to_hash_is_refused(tmp_path: pathlib.Path, pickled: bytes, compression: int) -> None:
    (tmp_path / "x").write_bytes(with_pickle(pickled, compression))
    with pytest.raises(CorruptCheckpointError, match=r"more than 1000 parts|contain themselves"):
        load(tmp_path / "x")


@pytest.mark.parametrize("pickled", [_ENDLESS_KEY, _ENDLESS_ARGUMENT], ids=["key", "argument"])
def test_also_in_files_of_the_older_form(tmp_path: pathlib.Path, pickled: bytes) -> None:
    (tmp_path / "x").write_bytes(_LEGACY_HEAD + pickled + pickle.dumps([], 2))
    with pytest.raises(CorruptCheckpointError, match=r"more than 1000 parts|contain themselves"):
        load(tmp_path / "x")


def test_an_older_file_with_a_pickle_longer_than_what_is_read_at_first_loads(tmp_path: pathlib.Path) -> None:
    state = {"text": ["x" * 1000 + str(number) for number in range(3000)], "w": torch.ones(3)}
    torch.save(state, tmp_path / "x", _use_new_zipfile_serialization=False)
    assert_same(load(tmp_path / "x"), state)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(RuntimeError, match="inner"), plain_pickle.garbage_kept(), plain_pickle.garbage_kept():
            assert not gc.isenabled()
            raise RuntimeError("inner")
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
