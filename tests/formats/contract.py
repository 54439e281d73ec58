"""What every format promises; each format's test module inherits this suite."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import math
import pathlib
import random
import threading
from typing import Any

import numpy
import pytest
import torch
from equality import assert_same, bits
from hypothesis import HealthCheck, given, settings
from images import image_of
from strategies import DTYPES, states, tensor_from_bytes, views

from datastates.errors import ForeignObjectError, StateError
from datastates.formats import plan
from datastates.plan import FilePlan
from datastates.reader import load
from datastates.state import Capture, IsEager, capture_host, default_is_eager

quick = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning", "ignore:Sparse:UserWarning")


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    rate: float
    weight: torch.Tensor


class LossScaler:
    """Like those of DeepSpeed: an object of a framework, alive in the state."""

    def __init__(self) -> None:
        self.cur_scale = 65536.0
        self.history = [1, 2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LossScaler) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Scaled(torch.Tensor):
    """A wrapper subclass as quantization libraries have them: no storage of its own."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.inner, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["inner"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].scale)
        raise NotImplementedError(str(func))


def lazy(fqn: str, tensor: torch.Tensor) -> bool:
    return False


def eager(fqn: str, tensor: torch.Tensor) -> bool:
    return True


def optimizer_state() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.AdamW([weight], lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 25])
    weight.grad = torch.randn(4, 3)
    optimizer.step()
    scheduler.step()
    return {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


def plain_state() -> dict[Any, Any]:
    """Plain data of every kind, without a tensor."""
    return {
        1: "one",
        "1": "text",
        (0, 1): "tuple",
        2.5: "float",
        None: "none",
        "a.b": 1,
        "a": {"b": 2},
        "empty": ({}, [], (), set(), frozenset()),
        "counter": collections.Counter({25: 1, 3: -2}),
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "default": collections.defaultdict(list, {1: [2]}),
        "deque": collections.deque([1, 2], maxlen=3),
        "size": torch.Size([2, 3]),
        "big": 10**5000,
        "limits": [2**63, 2**64, -(2**63) - 1, -(2**70)],
        "floats": [math.inf, -math.inf, -0.0, 5e-324, 0.1],
        "text": "\ud83d\ude00\udcff",
        "bytes": [b"\0\xff", bytearray(b"x")],
        "ranges": [range(1, 10**20, 3), slice(None, 3, None), ...],
        "torch": [torch.bfloat16, torch.device("cuda", 1), torch.sparse_coo],
        "path": pathlib.PurePosixPath("a/b\udcff"),
        "times": [
            datetime.date(2024, 2, 29),
            datetime.datetime(2024, 2, 29, 1, 2, 3, 4, fold=1),
            datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "X")),
            datetime.time(1, 2, tzinfo=datetime.timezone.utc),
            datetime.timedelta(days=-1, microseconds=5),
        ],
    }


class FormatContract:
    """Inherit, set ``format`` and ``suffix``, and name the class ``Test...``."""

    format: str
    suffix: str

    def plan(self, state: object, is_eager: IsEager = lazy, capture: Capture = capture_host) -> FilePlan:
        return plan(state, self.format, capture, is_eager)

    def write(self, directory: pathlib.Path, state: object, is_eager: IsEager = lazy) -> str:
        path = directory / f"file{self.suffix}"
        path.write_bytes(image_of(self.plan(state, is_eager), slab_bytes=4096))
        return str(path)

    def round_trip(self, directory: pathlib.Path, state: object, is_eager: IsEager = lazy, **options: Any) -> Any:
        return load(self.write(directory, state, is_eager), **{"weights_only": False, **options})

    # --- values

    @quick
    @given(state=states)
    def test_any_state(self, tmp_path: pathlib.Path, state: Any) -> None:
        for is_eager in (lazy, eager):
            assert_same(self.round_trip(tmp_path, state, is_eager), state)

    @quick
    @given(tensors=views())
    def test_any_views_of_one_storage(self, tmp_path: pathlib.Path, tensors: list[torch.Tensor]) -> None:
        for is_eager in (lazy, eager):
            assert_same(self.round_trip(tmp_path, tensors, is_eager), tensors)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype(self, tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
        data = bytes(range(256 - 6 * dtype.itemsize, 256))
        state = {
            "t": tensor_from_bytes(data, dtype, (2, 3)),
            "scalar": tensor_from_bytes(data[: dtype.itemsize], dtype, ()),
            "empty": torch.empty((0, 5), dtype=dtype),
        }
        state["strided"] = state["t"].t()
        assert_same(self.round_trip(tmp_path, state), state)

    def test_plain_data_is_kept_and_needs_no_code(self, tmp_path: pathlib.Path) -> None:
        state = plain_state()
        assert_same(self.round_trip(tmp_path, state), state)

    def test_nan_payload(self, tmp_path: pathlib.Path) -> None:
        nan = torch.tensor([0x7FF8DEADBEEF0001], dtype=torch.int64).view(torch.float64).item()
        assert_same(self.round_trip(tmp_path, {"nan": nan}), {"nan": nan})

    @pytest.mark.parametrize("state", [torch.ones(3), 5, None, {}, [torch.empty(0)]], ids=repr)
    def test_states_that_are_no_dictionary(self, tmp_path: pathlib.Path, state: Any) -> None:
        assert_same(self.round_trip(tmp_path, state), state)

    def test_optimizer_twice(self, tmp_path: pathlib.Path) -> None:
        state = optimizer_state()
        once = self.round_trip(tmp_path, state)
        assert_same(once, state)
        assert_same(self.round_trip(tmp_path, once), state)

    def test_random_states(self, tmp_path: pathlib.Path) -> None:
        legacy = numpy.random.RandomState(3).get_state()
        state = {"torch": torch.get_rng_state(), "python": random.Random(1).getstate(), "numpy": legacy}
        assert_same(self.round_trip(tmp_path, state), state)

    def test_deepspeed_like_state(self, tmp_path: pathlib.Path) -> None:
        flat = torch.arange(64, dtype=torch.bfloat16)
        state = {
            "module": collections.OrderedDict(w=flat[:32].view(4, 8), b=flat[32:40], tied=flat[:32].view(4, 8)),
            "buffer_names": ["n"],
            "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(0)}}, "scaler": LossScaler()},
            "param_shapes": [collections.OrderedDict(w=torch.Size([4, 8]))],
            "args": argparse.Namespace(lr=0.1, names=["x"]),
            "stage": Colour.RED,
            "lr_scheduler": None,
        }
        assert_same(self.round_trip(tmp_path, state), state)

    def test_numpy(self, tmp_path: pathlib.Path) -> None:
        state = {
            "fortran": numpy.arange(6.0).reshape(2, 3).T,
            "time": numpy.array(["2024-01-01", "NaT"], dtype="M8[ns]"),
            "text": numpy.array(["a", "bc"]),
            "record": numpy.zeros(2, dtype=[("x", "i4"), ("y", "f8")]),
            "empty": numpy.zeros((0, 3)),
            "large": numpy.arange(20_000),
            "scalars": [numpy.float32(1.5), numpy.int64(3), numpy.bool_(True), numpy.datetime64("2024-01-01", "s")],
        }
        loaded = self.round_trip(tmp_path, state)
        assert_same(loaded, state)
        assert loaded["large"].flags.writeable

    # --- tensors that are no plain windows

    def test_parameters_and_buffers(self, tmp_path: pathlib.Path) -> None:
        state = {
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
            "leaf": torch.ones(2, requires_grad=True),
            "slice": torch.ones(4, requires_grad=True)[:2],
            "buffer": torch.nn.Buffer(torch.ones(2), persistent=False),
        }
        loaded = self.round_trip(tmp_path, state)
        assert_same(loaded, state)
        assert isinstance(loaded["buffer"], torch.nn.Buffer)
        assert not loaded["buffer"].persistent

    @pytest.mark.parametrize("attribute", ["tensor", "parameter"])
    def test_python_attributes_of_tensors(self, tmp_path: pathlib.Path, attribute: str) -> None:
        value = torch.nn.Parameter(torch.ones(3)) if attribute == "parameter" else torch.ones(3)
        value.note = "kept"
        loaded = self.round_trip(tmp_path, {"t": value})["t"]
        assert loaded.note == "kept"
        assert_same(loaded, value)

    def test_sparse(self, tmp_path: pathlib.Path) -> None:
        dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
        state = {
            "coo": dense.to_sparse(),
            "uncoalesced": torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), is_coalesced=False),
            "csr": dense.to_sparse_csr(),
            "csc": dense.to_sparse_csc(),
            "bsr": dense.to_sparse_bsr((1, 2)),
            "bsc": dense.to_sparse_bsc((2, 1)),
        }
        loaded = self.round_trip(tmp_path, state)
        assert_same(loaded, state)
        assert not loaded["uncoalesced"].is_coalesced()

    @pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning", "ignore:.*deprecated:DeprecationWarning")
    def test_quantized(self, tmp_path: pathlib.Path) -> None:
        data = torch.linspace(-1, 1, 12).view(3, 4)
        state = {
            "tensor": torch.quantize_per_tensor(data, 0.1, 3, torch.qint8),
            "channel": torch.quantize_per_channel(data, torch.ones(3) / 9, torch.zeros(3), 0, torch.quint8),
            "slice": torch.quantize_per_tensor(data, 0.1, 3, torch.qint32)[1:],
        }
        assert_same(self.round_trip(tmp_path, state), state)

    def test_wrapper_subclass_by_parts(self, tmp_path: pathlib.Path) -> None:
        inner, scale = torch.arange(6, dtype=torch.int8).view(2, 3), torch.tensor([0.5])
        loaded = self.round_trip(tmp_path, {"w": Scaled(inner, scale)})["w"]
        assert type(loaded) is Scaled
        assert_same([loaded.inner, loaded.scale], [inner, scale])

    def test_parts_of_a_subclass_are_lazy_like_any_tensor(self) -> None:
        state = {"w": Scaled(torch.zeros(2000, dtype=torch.int8), torch.ones(1)), "s": torch.eye(2).to_sparse()}
        lazies = {one.fqn.partition(".")[0] for one in self.plan(state).segments if not one.is_literal}
        assert lazies == {"w", "s"}

    def test_lazy_negation_of_a_dense_tensor(self, tmp_path: pathlib.Path) -> None:
        state = {"t": torch._neg_view(torch.arange(3.0)), "part": torch._neg_view(torch.arange(8.0))[2:4]}
        assert_same(self.round_trip(tmp_path, state, weights_only=True), state)

    def test_tensors_inside_objects(self, tmp_path: pathlib.Path) -> None:
        weight = torch.arange(4.0)
        state = {"settings": Settings(0.1, weight), "weight": weight}
        loaded = self.round_trip(tmp_path, state)
        assert_same(loaded["settings"].weight, weight)
        assert loaded["settings"].weight is loaded["weight"]

    def test_storages(self, tmp_path: pathlib.Path) -> None:
        tensor = torch.arange(5, dtype=torch.int32)
        loaded = self.round_trip(tmp_path, {"s": tensor.untyped_storage(), "t": tensor[1:]})
        assert bytes(loaded["s"].tolist()) == bits(tensor)
        assert_same(loaded["t"], tensor[1:])

    # --- sharing

    def test_same_object_and_aliases_stay_one(self, tmp_path: pathlib.Path) -> None:
        weight = torch.arange(6.0)
        loaded = self.round_trip(tmp_path, {"a": weight, "b": weight, "c": weight.detach()})
        assert loaded["a"] is loaded["b"]
        assert loaded["c"] is not loaded["a"]
        loaded["a"].fill_(9.0)
        assert loaded["c"].tolist() == [9.0] * 6

    def test_small_views_do_not_drag_their_storage_along(self) -> None:
        flat = torch.zeros(10_000_000)
        state = {f"p{index}": flat[index * 100 : (index + 1) * 100] for index in range(100)}
        state["every"] = flat[5_000_000::1000]
        state["far"] = flat[9_000_000:9_000_010]
        assert self.plan(state).nbytes < 160_000

    def test_loaded_tensors_are_writable_and_their_own(self, tmp_path: pathlib.Path) -> None:
        path = self.write(tmp_path, {"t": torch.zeros(5)})
        first, second = load(path)["t"], load(path)["t"]
        first.fill_(7.0)
        assert second.tolist() == [0.0] * 5
        assert load(path)["t"].tolist() == [0.0] * 5

    # --- eager and lazy

    def test_lazy_segments_alias_and_eager_ones_do_not(self, tmp_path: pathlib.Path) -> None:
        state = {"small": torch.zeros(4), "large": torch.zeros(4000)}
        made = self.plan(state, default_is_eager(1000))
        state["small"].fill_(1.0)
        state["large"].fill_(2.0)
        path = tmp_path / f"x{self.suffix}"
        path.write_bytes(image_of(made))
        loaded = load(path, weights_only=False)
        assert loaded["small"].tolist() == [0.0] * 4
        assert loaded["large"][0] == 2.0
        assert made.eager_end == 0

    def test_rebinding_data_is_not_followed(self, tmp_path: pathlib.Path) -> None:
        parameter = torch.nn.Parameter(torch.zeros(8))
        made = self.plan({"p": parameter})
        parameter.data = torch.ones(3)
        path = tmp_path / f"x{self.suffix}"
        path.write_bytes(image_of(made))
        assert load(path)["p"].tolist() == [0.0] * 8

    def test_version_of_the_source_follows_the_original(self) -> None:
        tensor = torch.zeros(100)
        tensor.add_(1)
        made = self.plan({"t": tensor, "tied": tensor[:50]}, lambda fqn, one: one.numel() == 50)
        segment = next(one for one in made.segments if one.fqn == "t" and not one.is_literal)
        assert segment.version == tensor._version == 1
        tensor.add_(1)
        assert segment.source._version == 2

    def test_inference_tensors_have_no_version(self) -> None:
        with torch.inference_mode():
            tensor = torch.zeros(100)
        segment = next(one for one in self.plan({"t": tensor}).segments if not one.is_literal)
        assert segment.version == -1

    def test_capture_that_must_wait_stays_before_eager_end(self) -> None:
        state = {"lazy": torch.ones(9, dtype=torch.float64), "eager": torch.ones(3, dtype=torch.int8)}
        made = self.plan(state, lambda fqn, tensor: fqn == "eager", lambda tensor: None)
        places = {one.fqn: one for one in made.segments if not one.is_literal}
        assert places["eager"].end <= made.eager_end <= places["lazy"].begin
        assert places["lazy"].begin % 8 == 0

    def test_capture_on_the_device_gives_a_source_that_may_wait(self) -> None:
        made = self.plan({"t": torch.ones(3)}, eager, lambda tensor: tensor.clone())
        assert made.eager_end == 0
        assert [one.fqn for one in made.segments if not one.is_literal] == ["t"]

    def test_capture_of_another_length_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'t' returned 2 bytes, expected 12"):
            self.plan({"t": torch.ones(3)}, eager, lambda tensor: b"12")

    def test_hidden_tensors_are_eager(self) -> None:
        made = self.plan({"settings": Settings(1.0, torch.ones(5000))})
        assert all(one.is_literal for one in made.segments)

    def test_many_small_tensors_make_few_segments(self) -> None:
        state = {f"layer.{index}": torch.full((3,), index) for index in range(2000)}
        assert len(self.plan(state, eager).segments) <= 3

    # --- what cannot be saved

    @pytest.mark.parametrize(
        "leaf", [lambda x: x, threading.Lock(), (_ for _ in ())], ids=["lambda", "lock", "generator"]
    )
    def test_unpicklable_leaf_is_named(self, leaf: object) -> None:
        with pytest.raises(StateError, match=r"model\.1\.callback") as caught:
            self.plan({"w": torch.ones(2), "model": [1, {"callback": leaf}]})
        assert caught.value.fqn == "model.1.callback"

    @pytest.mark.parametrize("is_eager", [lazy, lambda _fqn, _tensor: True])
    def test_memory_that_was_freed_or_shrunk_is_never_read(self, is_eager: IsEager) -> None:
        for nbytes in (0, 60):
            for wrap in (list, tuple, lambda tensors: [Settings(0.1, tensors[0])], lambda t: [t[0].view(8, 2).t()]):
                tensor = torch.ones(16)
                state = {"w": wrap([tensor])}
                tensor.untyped_storage().resize_(nbytes)
                with pytest.raises(StateError, match=f"w.*storage of {nbytes} bytes, too short") as caught:
                    self.plan(state, is_eager)
                assert caught.value.fqn.startswith("w")

    def test_meta_tensor_is_named(self) -> None:
        for state in (
            {"a": [torch.empty(2, device="meta")]},
            {"a": [torch.nn.Parameter(torch.empty(2, device="meta"))]},
        ):
            with pytest.raises(StateError, match="meta device") as caught:
                self.plan(state)
            assert caught.value.fqn == "a.0"

    def test_the_state_is_not_changed(self) -> None:
        state = {"p": torch.nn.Parameter(torch.ones(3)), "l": [1, 2]}
        parameter = state["p"]
        self.plan(state)
        assert state["p"] is parameter
        assert state["l"] == [1, 2]

    # --- the image

    def test_segments_align_to_their_items(self) -> None:
        state = {f"{dtype}": torch.zeros(3, dtype=dtype) for dtype in DTYPES}
        for segment in self.plan(state).segments:
            if isinstance(segment.source, torch.Tensor):
                assert segment.begin % segment.source.itemsize == 0
                assert segment.nbytes == segment.source.numel() * segment.source.itemsize

    def test_every_slab_size_gives_the_same_image(self) -> None:
        made = self.plan({"a": torch.arange(5000), "b": torch.arange(7).t(), "s": "text"})
        images = {image_of(made, slab_bytes) for slab_bytes in (4096, 12288, 1 << 20)}
        assert len(images) == 1

    # --- where to, and how safely

    def test_map_location(self, tmp_path: pathlib.Path) -> None:
        path = self.write(tmp_path, {"rng": torch.ones(3, dtype=torch.uint8), "w": torch.ones(2)})
        seen: list[str] = []

        def mapper(storage: torch.UntypedStorage, location: str) -> None:
            seen.append(location)

        for where in (None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, mapper, lambda storage, location: storage):
            assert load(path, where)["w"].device.type == "cpu"
        assert seen == ["cpu", "cpu"]
        assert load(path, "meta")["w"].is_meta
        assert load(path, {"cpu": "meta"})["w"].is_meta

    def test_weights_only_loads_tensors(self, tmp_path: pathlib.Path) -> None:
        state = {"w": torch.ones(2), "p": torch.nn.Parameter(torch.ones(2)), 3: [1, 2.5, "x", None, (True,)]}
        assert_same(self.round_trip(tmp_path, state, weights_only=True), state)

    def test_foreign_error_survives_pickling(self) -> None:
        error = ForeignObjectError("text", "a.b", "m.C")
        copy = error.__reduce__()[0](*error.__reduce__()[1])
        assert (str(copy), copy.fqn, copy.class_name) == ("text", "a.b", "m.C")
