"""The safetensors format: valid to the stock library, and nothing of the state lost."""

from __future__ import annotations

import collections
import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy
import pytest
import safetensors
import safetensors.torch
import torch
from contract import Colour, FormatContract, Settings, lazy, plain_state, pytestmark  # noqa: F401
from equality import assert_same, bits
from images import image_of

from datastates.errors import ForeignObjectError, StateError
from datastates.formats import plan
from datastates.formats import safetensors as ours
from datastates.reader import load
from datastates.state import capture_host, default_is_eager


class TestSafetensors(FormatContract):
    format = "safetensors"
    suffix = ".safetensors"

    def test_stock_library_reads_readable_names(self, tmp_path: pathlib.Path) -> None:
        weight = torch.randn(8, 8)
        state = {
            "model": collections.OrderedDict(emb=weight, head=weight.detach(), row=weight[0], tail=weight[4:]),
            "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}},
            "transposed": weight.t(),
        }
        path = self.write(tmp_path, state)
        loaded = safetensors.torch.load_file(path)
        assert sorted(loaded) == ["model.emb", "model.row", "model.tail", "optimizer.state.0.step", "transposed"]
        assert torch.equal(loaded["model.emb"], weight)
        assert torch.equal(loaded["model.tail"], weight[4:])
        assert torch.equal(loaded["transposed"], weight.t())
        assert_same(load(path), state)

    def test_every_stored_tensor_opens(self, tmp_path: pathlib.Path) -> None:
        state = {
            "plain": plain_state(),
            "tensors": [torch.ones(2), torch.ones(2, dtype=torch.complex128), torch.empty(0)],
        }
        with safetensors.safe_open(self.write(tmp_path, state), "pt") as file:
            assert file.metadata()["format"] == "pt"
            shapes = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118
        assert shapes == {"tensors.0": (2,), "tensors.1": (2, 16), "tensors.2": (0,)}

    def test_names_never_collide(self, tmp_path: pathlib.Path) -> None:
        state = {
            "a.b": torch.tensor(1),
            "a": {"b": torch.tensor(2)},
            1: torch.tensor(3),
            "1": torch.tensor(4),
            "__metadata__": torch.tensor(5),
            "__datastates__.tree": torch.tensor(6),
            "": torch.tensor(7),
            "\ud800": torch.tensor(8),
        }
        path = self.write(tmp_path, state)
        assert_same(load(path), state)
        stored = safetensors.torch.load_file(path)
        assert sorted(tensor.item() for tensor in stored.values()) == [1, 2, 3, 4, 5, 6, 7, 8]

    def test_data_begins_at_a_page_and_has_no_hole(self, tmp_path: pathlib.Path) -> None:
        state = [torch.ones(3, dtype=dtype) for dtype in (torch.int8, torch.float64, torch.bfloat16, torch.float32)]
        data = pathlib.Path(self.write(tmp_path, state)).read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert (8 + length) % 4096 == 0
        header = json.loads(data[8 : 8 + length])
        del header["__metadata__"]
        position = 0
        for entry in header.values():
            begin, end = entry["data_offsets"]
            assert begin == position
            assert begin % {"I8": 1, "F64": 8, "BF16": 2, "F32": 4}[entry["dtype"]] == 0
            position = end
        assert position == len(data) - 8 - length

    def test_padding_after_pending_tensors_is_a_tensor(self, tmp_path: pathlib.Path) -> None:
        state = {"lazy": torch.ones(9, dtype=torch.float64), "eager": torch.ones(3, dtype=torch.int8)}
        made = self.plan(state, lambda fqn, tensor: fqn == "eager", lambda tensor: None)
        path = tmp_path / "x.safetensors"
        path.write_bytes(image_of(made))
        assert set(safetensors.torch.load_file(path)) == {"lazy", "eager", "__datastates__.pad"}
        assert_same(load(path), state)

    def test_large_tree_is_a_tensor(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ours, "_MAX_METADATA_BYTES", 100)
        state = {"t": torch.ones(3), "list": ["x" * 50] * 10}
        path = self.write(tmp_path, state)
        assert "__datastates__.tree" in safetensors.torch.load_file(path)
        assert_same(load(path), state)

    def test_header_beyond_the_stock_limit_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ours, "MAX_HEADER_BYTES", 5000)
        with pytest.raises(StateError, match="allows 5000"):
            self.plan({"x" * 6000: torch.ones(1)})

    def test_plain_data_loads_with_weights_only(self, tmp_path: pathlib.Path) -> None:
        state = plain_state()
        assert_same(self.round_trip(tmp_path, state, weights_only=True), state)

    def test_data_that_pickle_cannot_hold(self, tmp_path: pathlib.Path) -> None:
        state = {"format": torch.channels_last, "big_endian": numpy.arange(3, dtype=">i4")}
        assert_same(self.round_trip(tmp_path, state, weights_only=True), state)

    @pytest.mark.parametrize("leaf", [Colour.RED, Settings(1.0, torch.ones(2))], ids=["enum", "dataclass"])
    def test_foreign_objects_are_not_loaded_unasked(self, tmp_path: pathlib.Path, leaf: Any) -> None:
        path = self.write(tmp_path, {"w": torch.ones(2), "a": [leaf]})
        with pytest.raises(ForeignObjectError, match=rf"a\.0 is an object of class contract\.{type(leaf).__name__}"):
            load(path, weights_only=True)
        assert torch.equal(safetensors.torch.load_file(path)["w"], torch.ones(2))

    def test_missing_class_fails_by_name(self, tmp_path: pathlib.Path) -> None:
        path = self.write(tmp_path, {"a": Colour.RED})
        code = (
            "import sys, datastates\n"
            "from datastates.errors import ForeignObjectError\n"
            "try:\n    datastates.load(sys.argv[1], weights_only=False)\n"
            "except ForeignObjectError as error:\n    print(error.fqn, error.class_name)\n"
        )
        command = [sys.executable, "-c", code, path]
        result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert result.stdout.split() == ["a", "contract.Colour"]

    def test_a_container_that_contains_itself_is_named(self) -> None:
        inner: dict[str, Any] = {}
        inner["self"] = [inner]
        with pytest.raises(StateError, match="contains itself") as caught:
            self.plan({"a": inner})
        assert caught.value.fqn == "a.self.0"

    def test_depth_beyond_the_interpreter_is_an_error(self) -> None:
        state: list[Any] = []
        for _ in range(100_000):
            state = [state]
        with pytest.raises(StateError, match="nested too deeply"):
            self.plan(state)
        while state:  # freed level by level
            state = state[0]

    def test_tensors_hidden_in_objects_are_named_after_them(self, tmp_path: pathlib.Path) -> None:
        path = self.write(tmp_path, {"conf": Settings(1.0, torch.ones(2))})
        assert list(safetensors.torch.load_file(path)) == ["conf.tensor"]

    def test_equal_windows_are_stored_once(self) -> None:
        weight = torch.zeros(10_000)
        state = {f"tied{index}": weight.view(100, 100) for index in range(10)}
        assert self.plan(state).nbytes < 50_000


def test_stock_file_loads_flat(tmp_path: pathlib.Path) -> None:
    state = {
        "b.w": torch.randn(3, 4),
        "a": torch.tensor(5, dtype=torch.int16),
        "e": torch.empty(0, 3),
        "f8": torch.ones(2).to(torch.float8_e5m2),
        "x4": torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "e8": torch.tensor([1, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }
    path = str(tmp_path / "stock.bin")
    safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    loaded = load(path)
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        assert loaded[name].dtype is tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert bits(loaded[name]) == bits(tensor)


def test_eager_bytes_are_few_segments() -> None:
    state = [torch.ones(3, dtype=dtype) for dtype in (torch.int8, torch.float64, torch.bfloat16)] * 100
    made = plan(state, "safetensors", capture_host, default_is_eager(1 << 20))
    assert len(made.segments) == 1


def test_lazy_only_state_has_no_seals() -> None:
    assert plan({"t": torch.ones(5)}, "safetensors", capture_host, lazy).seals == ()


@pytest.mark.parametrize("is_ours", [True, False])
def test_elements_stay_where_they_are_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """Each tensor needs the alignment of its own elements only: nothing is copied from a buffer."""
    state = {f"w{index}": torch.arange(70_001).bfloat16() + index for index in range(3)}
    state["x"] = torch.arange(30_001).float()
    path = tmp_path / "x.safetensors"
    if is_ours:
        path.write_bytes(image_of(plan(state, "safetensors", capture_host, default_is_eager(100))))
    else:
        safetensors.torch.save_file(state, path)
    monkeypatch.setattr("datastates.formats.storages.Storages._shifted", None)
    loaded = load(path)
    assert_same({name: loaded[name] for name in state}, state)
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in loaded.values())


def test_a_header_of_any_length(tmp_path: pathlib.Path) -> None:
    """The format asks for no alignment; the elements of a tensor in memory need theirs."""
    state = {"a": torch.arange(400_001).double(), "b": torch.arange(70_001).float()}
    safetensors.torch.save_file(state, tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for more in range(1, 8):
        header = data[8 : 8 + length] + b" " * more
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        loaded = load(tmp_path / "x")
        assert_same({name: loaded[name] for name in state}, state)
        assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in loaded.values())


def test_metadata_that_are_null_are_none(tmp_path: pathlib.Path) -> None:
    """As the stock library reads them."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"__metadata__": None, "a": entry}).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert torch.equal(load(tmp_path / "x")["a"], safetensors.torch.load_file(tmp_path / "x")["a"])
