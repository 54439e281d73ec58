"""Parts of files by name, and files into tensors that exist: what is read, what is filled, and what is refused."""

from __future__ import annotations

import argparse
import copy
import os
import pathlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch
import torch

from datastates import load
from datastates.errors import CorruptCheckpointError, ForeignObjectError, MismatchError, StateError
from datastates.formats import plan
from datastates.reading import FileReader
from datastates.state import capture_host, default_is_eager
from formats.images import image_of

KINDS = ("torch", "safetensors", "torch.save", "torch.save-old")


def make_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 700, generator=generator)
    return {
        "model": OrderedDict({"a.weight": weight, "a.bias": weight[:, 3].clone(), "tied": weight, "t": weight[:9].t()}),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": weight + 1}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "log": [{"a": 1}, {"b": torch.arange(4)}],
        "half": (torch.arange(6).to(torch.bfloat16), [torch.arange(3)]),
        "step": 7,
        "empty": {},
        "none": None,
    }


def write(path: pathlib.Path, kind: str, state: Any) -> pathlib.Path:
    if kind.startswith("torch.save"):
        torch.save(state, path, _use_new_zipfile_serialization=kind == "torch.save")
    else:
        path.write_bytes(image_of(plan(state, kind, capture_host, default_is_eager(100))))
    return path


def tensors_in(node: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield name, node
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    for key, child in items:
        yield from tensors_in(child, f"{name}.{key}" if name else str(key))


def blank(node: Any) -> Any:
    """The same structure, all tensors zero."""
    if isinstance(node, torch.Tensor):
        return torch.zeros(node.shape, dtype=node.dtype)
    if isinstance(node, dict):
        return type(node)((key, blank(child)) for key, child in node.items())
    return type(node)(map(blank, node)) if isinstance(node, (list, tuple)) else node


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of every kind with the same state."""
    return write(tmp_path / "x", request.param, make_state())


# --- keys


@pytest.mark.parametrize("key", ["model", "model.*"])
def test_a_prefix_selects_what_is_below(path: pathlib.Path, key: str) -> None:
    loaded, state = load(path, keys=key), make_state()
    assert list(loaded) == ["model"] and list(loaded["model"]) == list(state["model"])
    assert all(torch.equal(loaded["model"][name], state["model"][name]) for name in state["model"])


def test_names_of_leaves_in_lists_and_below_numbers(path: pathlib.Path) -> None:
    keys = ["model.a.bias", "optimizer.state.0.step", "log.1", "half.1.0", "step", "empty"]
    loaded, state = load(path, keys=keys), make_state()
    assert list(loaded["model"]) == ["a.bias"]
    assert loaded["optimizer"] == {"state": {0: {"step": torch.tensor(3.0)}}}
    assert loaded["log"][0] is None and torch.equal(loaded["log"][1]["b"], torch.arange(4))
    assert loaded["half"][0] is None and isinstance(loaded["half"], tuple)
    assert torch.equal(loaded["half"][1][0], torch.arange(3))
    assert (loaded["step"], loaded["empty"]) == (7, {}) and "none" not in loaded
    assert torch.equal(loaded["model"]["a.bias"], state["model"]["a.bias"])


def test_a_name_is_no_prefix_within_a_word(path: pathlib.Path) -> None:
    with pytest.raises(MismatchError, match="nothing is named 'mod'; near names: 'model"):
        load(path, keys="mod")


def test_a_misspelt_beginning_names_the_right_one(path: pathlib.Path) -> None:
    with pytest.raises(MismatchError, match="nothing is named 'modle'; near names: 'model'"):
        load(path, keys="modle")


def test_a_name_that_matches_nothing_names_near_ones(path: pathlib.Path) -> None:
    with pytest.raises(MismatchError, match=r"'model\.a\.wieght'; near names: 'model\.a\.weight'") as caught:
        load(path, keys=["step", "model.a.wieght"])
    assert caught.value.missing == ("model.a.wieght",)
    with pytest.raises(MismatchError, match="empty list"):
        load(path, keys=[])


def test_keys_of_files_of_others(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a.w": torch.ones(3), "a.b": torch.ones(2), "c": torch.ones(1)}, path)
    assert load(path, keys="a").keys() == {"a.w", "a.b"}
    assert load(path, keys=["c"]).keys() == {"c"}


@pytest.mark.parametrize("kind", ["torch", "safetensors", "torch.save"])
def test_only_what_is_asked_for_is_read(tmp_path: pathlib.Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"layer{index}": torch.full((1 << 18,), float(index)) for index in range(8)}
    path, wanted = write(tmp_path / "x", kind, state), (1 << 18) * 4
    ranges: list[int] = []
    original = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        count = original(descriptor, buffers, offset, flags)
        ranges.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    assert load(path, keys="layer3")["layer3"][5] == 3
    # beside the tensor: header or directory, and whole pages
    assert wanted <= sum(ranges) < wanted + (20 << 10)


@pytest.mark.parametrize("kind", ["torch", "safetensors", "torch.save"])
def test_foreign_objects_elsewhere_are_in_nobodys_way(tmp_path: pathlib.Path, kind: str) -> None:
    state = {"model": {"w": torch.ones(5)}, "args": argparse.Namespace(a=1, w=torch.ones(2))}
    path = write(tmp_path / "x", kind, state)
    assert torch.equal(load(path, keys="model")["model"]["w"], torch.ones(5))
    with pytest.raises(ForeignObjectError, match="Namespace") as caught:
        load(path)
    assert caught.value.fqn == "args"
    with pytest.raises(ForeignObjectError, match="args"):
        load(path, keys="args")
    assert torch.equal(load(path, keys="args", weights_only=False)["args"].w, torch.ones(2))


# --- into


def test_into_fills_in_place(path: pathlib.Path) -> None:
    state, targets = make_state(), blank(make_state())
    held = dict(tensors_in(targets))
    found = load(path, into=targets)
    expected = dict(tensors_in(state))
    assert set(found.filled) == set(expected) and (found.missing, found.unexpected) == ((), ())
    for name, tensor in tensors_in(found.state):
        assert tensor is held[name], name
        assert torch.equal(tensor, expected[name]), name
    assert (found.state["step"], found.state["none"], found.state["empty"]) == (7, None, {})
    assert list(found.state) == list(state)


def test_targets_keep_dtype_strides_and_autograd(path: pathlib.Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(300, 700, dtype=torch.float64))
    turned = torch.zeros(700, 300).t()
    step = torch.zeros((), dtype=torch.int64)
    version = parameter._version
    targets = {"model": {"a.weight": parameter, "tied": turned}, "optimizer.state.0.step": step}
    load(path, into=targets, strict=False)
    weight = make_state()["model"]["a.weight"]
    assert parameter.dtype is torch.float64 and torch.equal(parameter.float(), weight) and parameter._version > version
    assert turned.stride() == (1, 300) and torch.equal(turned, weight)
    assert step.dtype is torch.int64 and step == 3


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_of_inference_mode(path: pathlib.Path, is_inside: bool, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        flat, turned = torch.zeros(300, 700, dtype=dtype), torch.zeros(700, 300, dtype=dtype).t()
    ordinary = torch.zeros(300, 700, dtype=dtype)
    weight = make_state()["model"]["a.weight"].to(dtype)
    for target in (flat, turned, ordinary):
        with torch.inference_mode(is_inside):
            load(path, into={"model": {"a.weight": target}}, strict=False)
        assert torch.equal(target, weight)


def test_a_flat_dictionary_is_a_template_too(path: pathlib.Path) -> None:
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors_in(make_state())}
    load(path, into=targets)
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors_in(make_state()))


def test_keys_limit_what_counts_as_the_files(path: pathlib.Path) -> None:
    targets = {"model": {name: torch.zeros_like(one) for name, one in make_state()["model"].items()}}
    found = load(path, into=targets, keys="model")
    assert found.unexpected == () and list(found.state) == ["model"]


def test_strict_lists_what_differs_and_changes_nothing(path: pathlib.Path) -> None:
    """As when a model has one layer more and one less than the file."""
    targets = {"model": {"a.weight": torch.zeros(300, 700), "b.weight": torch.zeros(2)}}
    with pytest.raises(
        MismatchError, match=r"missing in the file: model\.b\.weight; without a target: .*a\.bias"
    ) as caught:
        load(path, into=targets, keys="model")
    assert caught.value.missing == ("model.b.weight",)
    assert caught.value.unexpected == ("model.a.bias", "model.tied", "model.t")
    assert not targets["model"]["a.weight"].any()


def test_not_strict_returns_both_lists_and_leaves_others_untouched(path: pathlib.Path) -> None:
    targets = {"model": {"a.weight": torch.zeros(300, 700), "b.weight": torch.full((2,), 9.0)}}
    found = load(path, into=targets, keys="model", strict=False)
    assert (found.filled, found.missing) == (("model.a.weight",), ("model.b.weight",))
    assert found.unexpected == ("model.a.bias", "model.tied", "model.t")
    assert list(found.state["model"]) == ["a.weight"]
    assert torch.equal(targets["model"]["a.weight"], make_state()["model"]["a.weight"])
    assert torch.equal(targets["model"]["b.weight"], torch.full((2,), 9.0))


@pytest.mark.parametrize("strict", [True, False])
def test_no_match_at_all_is_always_an_error(path: pathlib.Path, strict: bool) -> None:
    """A prefix that a wrapper has added must not give a fresh model."""
    targets = {"module.model.a.weight": torch.zeros(300, 700)}
    with pytest.raises(MismatchError, match=r"no name matches; near names: 'model\.a\.weight"):
        load(path, into=targets, strict=strict)
    assert not targets["module.model.a.weight"].any()


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_are_always_an_error(path: pathlib.Path, strict: bool) -> None:
    targets = {"model.a.weight": torch.zeros(700, 300), "model.a.bias": torch.zeros(300)}
    with pytest.raises(MismatchError, match=r"model\.a\.weight has shape \(300, 700\) in the file") as caught:
        load(path, into=targets, strict=strict, keys=["model.a.weight", "model.a.bias"])
    assert caught.value.mismatched.keys() == {"model.a.weight"}
    assert not targets["model.a.bias"].any()


def test_a_value_is_no_tensor(path: pathlib.Path) -> None:
    with pytest.raises(MismatchError, match="step is no plain tensor in the file"):
        load(path, into={"step": torch.zeros(())}, strict=False)


def freed(shape: tuple[int, ...]) -> torch.Tensor:
    """As FSDP leaves the parameters of a module that is not in use."""
    tensor = torch.zeros(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.zeros(300, 700, device="meta"), "on the meta device"),
        (torch.zeros(300, 1).expand(300, 700), "expanded"),
        (torch.zeros(300, 700).to_sparse(), "no plain strided tensor"),
        (torch.zeros(999).unfold(0, 700, 1), "elements overlap"),
        (torch.zeros(2000).as_strided((300, 700), (1, 1)), "elements overlap"),
        (freed((300, 700)), "has no memory"),
        (torch.nn.parameter.UninitializedParameter(), "no plain strided tensor"),
    ],
)
def test_targets_that_cannot_be_filled(path: pathlib.Path, target: torch.Tensor, message: str) -> None:
    other = torch.zeros(300)
    with pytest.raises(StateError, match=rf"^model\.a\.weight: .*{message}") as caught:
        load(path, into={"model.a.bias": other, "model.a.weight": target}, strict=False)
    assert caught.value.fqn == "model.a.weight" and not other.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_are_filled_whatever_the_default_device_is(path: pathlib.Path, dtype: torch.dtype) -> None:
    bias, turned = torch.zeros(300, dtype=dtype), torch.zeros(9, 700, dtype=dtype).t()
    with torch.device("meta"):
        load(path, into={"model.a.bias": bias, "model.t": turned}, strict=False)
    expected = make_state()["model"]
    assert torch.equal(bias.float(), expected["a.bias"]) and torch.equal(turned.float(), expected["t"])


def test_into_without_tensors_or_with_a_device(path: pathlib.Path) -> None:
    with pytest.raises(StateError, match="a list that holds no tensor"):
        load(path, into=[1, 2])
    with pytest.raises(ValueError, match="leave out map_location"):
        load(path, "cpu", into={"a": torch.ones(1)})


def test_an_optimizer_that_has_never_stepped(tmp_path: pathlib.Path) -> None:
    """Its state is made by its first step: what the file has for it must not be skipped without a word."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    path = write(tmp_path / "x", "torch", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh = torch.optim.AdamW(torch.nn.Linear(4, 3).parameters())
    targets = {"model": torch.nn.Linear(4, 3).state_dict(), "optimizer": fresh.state_dict()}
    with pytest.raises(
        MismatchError, match=r"without a target: optimizer\.state\.0\.step, optimizer\.state\.0\.exp_avg"
    ):
        load(path, into=targets)
    fresh.load_state_dict(load(path)["optimizer"])
    assert fresh.state_dict()["state"][0]["step"] == 1


def test_an_optimizer_without_the_state_of_one_parameter(tmp_path: pathlib.Path) -> None:
    state = make_state()
    path = write(tmp_path / "x", "torch", {**state, "optimizer": {"state": {}, "param_groups": []}})
    with pytest.raises(
        MismatchError, match=r"missing in the file: optimizer\.state\.0\.step, optimizer\.state\.0\.exp"
    ):
        load(path, into=blank(state))


def test_lists_of_another_length(path: pathlib.Path, assert_same_state: Any) -> None:
    """The template's lists say where tensors go, not how long the file's are."""
    targets = {"model": make_state()["model"], "log": [], "half": (torch.zeros(6, dtype=torch.bfloat16), [])}
    found = load(path, into=targets, keys=["model", "log", "half"], strict=False)
    assert found.unexpected == ("log.1.b", "half.1.0")
    assert found.state["log"] == [{"a": 1}, None]
    assert_same_state(load(path)["log"], make_state()["log"])


def test_numbers_and_their_names_as_keys(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "x", "torch", {1: torch.ones(2), "1": torch.zeros(2)})
    targets = {1: torch.full((2,), 5.0), "1": torch.full((2,), 5.0)}
    load(path, into=targets)
    assert torch.equal(targets[1], torch.ones(2)) and torch.equal(targets["1"], torch.zeros(2))


def test_shared_containers_and_cycles(tmp_path: pathlib.Path) -> None:
    inner = {"w": torch.arange(3.0)}
    path = write(tmp_path / "x", "torch", {"a": inner, "b": inner})
    assert load(path, keys="b").keys() == {"b"}
    targets: dict[str, Any] = {"b": {"w": torch.zeros(3)}}
    targets["self"] = targets
    load(path, into=targets, strict=False)
    assert torch.equal(targets["b"]["w"], torch.arange(3.0))


def test_a_state_that_contains_itself_is_not_loaded_in_parts(tmp_path: pathlib.Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(2)}
    state["self"] = state
    path = write(tmp_path / "x", "torch.save", state)
    assert load(path)["self"]["w"].sum() == 2
    with pytest.raises(CorruptCheckpointError, match="nested more than"):
        load(path, keys="w")


@pytest.mark.parametrize("kind", ["torch", "torch.save"])
def test_tensors_that_are_more_than_their_bytes(tmp_path: pathlib.Path, kind: str) -> None:
    """Conjugated views are loaded and copied; sparse ones come back as they are."""
    value = torch.randn(3, 4, dtype=torch.complex64)
    path = write(tmp_path / "x", kind, {"c": value.conj(), "s": torch.eye(3).to_sparse(), "w": torch.ones(2)})
    targets = {"c": torch.zeros(3, 4, dtype=torch.complex64), "w": torch.zeros(2)}
    found = load(path, into=targets)
    assert torch.equal(targets["c"], value.conj()) and found.state["c"] is targets["c"]
    assert torch.equal(found.state["s"].to_dense(), torch.eye(3))


@pytest.mark.parametrize("kind", ["torch", "torch.save"])
def test_a_damaged_file_changes_no_target(tmp_path: pathlib.Path, kind: str) -> None:
    state = {f"w{index}": torch.randn(1 << 19) for index in range(4)}
    path = write(tmp_path / "x", kind, state)
    data = bytearray(path.read_bytes())
    data[-3_000_000] ^= 1
    path.write_bytes(data)
    targets = blank(state)
    with pytest.raises(CorruptCheckpointError, match=r"w2 is damaged") as caught:
        load(path, into=targets)
    assert caught.value.fqn == "w2"
    assert not any(tensor.any() for tensor in targets.values())
    load(path, into=targets, check=False)
    assert torch.equal(targets["w0"], state["w0"]) and not torch.equal(targets["w2"], state["w2"])


def test_state_and_targets_of_unaligned_files(tmp_path: pathlib.Path) -> None:
    """A header of an odd length: elements lie across the bounds of their size."""
    path = tmp_path / "x.safetensors"
    values = {"a": torch.arange(3 << 19, dtype=torch.int32), "b": torch.randn(7)}
    safetensors.torch.save_file(values, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 5).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 5 + data[8 + length :])
    loaded = load(path)
    assert all(torch.equal(loaded[name], values[name]) and loaded[name].data_ptr() % 8 == 0 for name in values)
    targets = {"a": torch.zeros(3 << 19, dtype=torch.int64), "b": torch.zeros(7)}
    load(path, into=targets)
    assert torch.equal(targets["a"], values["a"].long()) and torch.equal(targets["b"], values["b"])


def test_many_small_targets_are_filled_by_few_reads(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{index}": torch.full((5,), float(index)) for index in range(500)}
    path, targets = write(tmp_path / "x", "torch", state), blank(state)
    reads: list[int] = []
    original = FileReader.fill

    def counted(self: FileReader, view: memoryview, begin: int, nbytes: int) -> None:
        reads.append(nbytes)
        original(self, view, begin, nbytes)

    monkeypatch.setattr(FileReader, "fill", counted)
    load(path, into=targets, check=False)
    assert len(reads) == 1 and all(targets[f"w{index}"][0] == index for index in range(500))


def test_loading_leaves_the_template_alone(path: pathlib.Path) -> None:
    targets = blank(make_state())
    shape = copy.deepcopy(targets)
    load(path, into=targets)
    assert targets.keys() == shape.keys() and targets["log"][0] == shape["log"][0]
