"""Files planned with what earlier saves have taught, against the reference planner."""

from __future__ import annotations

import io
import weakref
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from contract import FormatContract, Settings, lazy, pytestmark  # noqa: F401
from equality import assert_same
from hypothesis import HealthCheck, given, settings
from images import image_of
from strategies import states

from datastates.captures import Captures, EagerBudget
from datastates.formats import Planner, plan, torch_planner, torch_structure
from datastates.formats.torch_planner import TorchPlanner
from datastates.plan import FilePlan
from datastates.state import Capture, EagerRule, IsEager, capture_host


def rule_of(is_eager: IsEager) -> EagerRule:
    return is_eager if isinstance(is_eager, EagerRule) else EagerRule(-1, is_eager)


class TestPlanner(FormatContract):
    """All that the format promises, from a planner that has seen the state before."""

    format = "torch"
    suffix = ".pt"

    def plan(self, state: object, is_eager: IsEager = lazy, capture: Capture = capture_host) -> FilePlan:
        if capture is not capture_host:
            return plan(state, self.format, capture, is_eager)
        planner = Planner()
        planner.plan(state, self.format, Captures(EagerBudget(1 << 30)), rule_of(is_eager))
        return planner.plan(state, self.format, Captures(EagerBudget(1 << 30)), rule_of(is_eager))


def small_state(step: float = 1.0) -> dict[str, Any]:
    """A state of the kind that the fast way is for: tied weights, no elements, parameter groups, attributes."""
    weight = torch.full((40, 8), step)
    model = OrderedDict(
        [
            ("embedding", weight),
            ("head", weight.detach()),
            ("bias", torch.full((8,), -step)),
            ("none", torch.empty(0, 3)),
        ]
    )
    model._metadata = OrderedDict([("", {"version": 1})])  # type: ignore[attr-defined]
    optimizer = {n: {"step": torch.tensor(step), "exp_avg": torch.full((n + 1, 300), step)} for n in range(4)}
    groups = [{"lr": 0.1 * step, "betas": (0.9, 0.95), "params": [0, 1, 2, 3]}]
    return {
        "model": model,
        "optimizer": {"state": optimizer, "param_groups": groups},
        "step": int(step),
        3: [True, None],
    }


def made(planner: TorchPlanner, state: object, threshold_bytes: int = 1 << 10, **options: Any) -> FilePlan | None:
    take, capture = options.pop("take", lambda _: True), options.pop("capture", None)
    return planner.plan(state, take, EagerRule(threshold_bytes, **options), capture=capture)


def loaded(file_plan: FilePlan | None) -> Any:
    assert file_plan is not None
    image = image_of(file_plan, slab_bytes=4096)
    with zipfile.ZipFile(io.BytesIO(image)) as archive:
        assert archive.testzip() is None
        assert len(set(archive.namelist())) == len(archive.namelist())
    return torch.load(io.BytesIO(image), weights_only=True)


def resized(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def num_structures(planner: TorchPlanner) -> int:
    return len(planner._structures)


def test_new_values_in_the_structure_of_an_earlier_save() -> None:
    planner = TorchPlanner()
    for step in (1.0, 2.0, 123456789.0, -1e30):
        state = small_state(step)
        assert_same(loaded(made(planner, state)), state)
    assert num_structures(planner) == 1
    assert loaded(made(planner, state))["model"]._metadata == state["model"]._metadata


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(state=states)
def test_the_same_as_the_reference(state: Any) -> None:
    """Whether a state is ordinary or not; where it is, the second plan comes from the first one's layout."""
    planner = TorchPlanner()
    for _ in range(2):
        found = made(planner, state, threshold_bytes=16)
        if found is None:
            return
        reference = plan(state, "torch", capture_host, EagerRule(16))
        options = {"weights_only": False}
        expected = torch.load(io.BytesIO(image_of(reference)), **options)
        assert_same(torch.load(io.BytesIO(image_of(found)), **options), expected)
        assert [s.fqn for s in found.segments if s.fqn] == [s.fqn for s in reference.segments if s.fqn]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda t: {"a": t, "b": 3}, lambda t: {"a": 3, "b": t}),
        (lambda t: [t, 3], lambda t: [3, t]),
        (lambda t: {"a": {"x": t}, "b": {"x": 3}}, lambda t: {"a": {"x": 3}, "b": {"x": t}}),
        (lambda t: {"a": t, "b": {"c": 3}}, lambda t: {"a": 3, "b": {"c": t}}),
    ],
)
def test_a_tensor_in_the_place_of_a_value_has_a_name_of_its_own(first: Any, second: Any) -> None:
    planner = TorchPlanner()
    assert made(planner, first(torch.ones(3000))) is not None
    state = second(torch.ones(3000))
    found = made(planner, state)
    reference = plan(state, "torch", capture_host, EagerRule(1 << 10))
    names = [segment.fqn for segment in reference.segments if segment.fqn]
    assert [segment.fqn for segment in found.segments if segment.fqn] == names
    asked: list[str] = []
    made(planner, state, is_volatile=lambda fqn, _: bool(asked.append(fqn)))
    assert asked == names, "else what is volatile by its name would be copied late, and torn"


class Hiding(dict):
    """Pickled without what is in it."""

    def __reduce__(self) -> Any:
        return dict, ()


def test_a_hidden_tensor_that_takes_the_place_of_an_unsaved_one() -> None:
    state = {"seen": Hiding(x=torch.ones(3000)), "hidden": Settings(0.1, torch.ones(3000))}
    assert made(TorchPlanner(), state) is None


def _changed(what: str) -> dict[str, Any]:
    state = small_state()
    moments = state["optimizer"]["state"]
    if what == "shape":
        moments[3]["exp_avg"] = torch.ones(4, 301)
    elif what == "dtype":
        moments[3]["exp_avg"] = torch.ones(4, 300, dtype=torch.int32)
    elif what == "key":
        state["optimizer"]["state"] = {n + 1: moment for n, moment in moments.items()}
    elif what == "order":
        moments[2] = dict(reversed(moments[2].items()))
    elif what == "untied":
        state["model"]["head"] = torch.full((40, 8), 5.0)
    elif what == "tied":
        state["model"]["bias"] = state["model"]["embedding"].view(-1)[:8]
    elif what == "requires_grad":
        moments[1]["exp_avg"].requires_grad_()
    elif what == "one more":
        state["ema"] = torch.ones(2)
    elif what == "one moved into a list":
        state["model"], state["bias"] = OrderedDict(state["model"]), [state["model"].pop("bias")]
    return state


@pytest.mark.parametrize(
    "what",
    ["shape", "dtype", "key", "order", "untied", "tied", "requires_grad", "one more", "one moved into a list"],
)
def test_a_changed_structure_is_planned_anew(what: str) -> None:
    planner = TorchPlanner()
    assert made(planner, small_state()) is not None
    state = _changed(what)
    found = made(planner, state)
    reference = plan(state, "torch", capture_host, EagerRule(1 << 10))
    assert_same(torch.load(io.BytesIO(image_of(found or reference))), state)
    assert found is None or [s.fqn for s in found.segments] == [s.fqn for s in reference.segments]
    assert_same(loaded(made(planner, small_state())), small_state())


def test_ties_are_found_again_when_the_memory_has_changed() -> None:
    planner = TorchPlanner()
    first = {"a": torch.ones(2000), "b": torch.ones(2000)}
    assert made(planner, first, 16) is not None
    tied = {"a": first["a"], "b": first["a"].detach()}
    found = loaded(made(planner, tied, 16))
    found["a"][0] = 7
    assert found["b"][0] == 7
    assert_same(loaded(made(planner, first, 16)), first)


def test_a_pickle_that_outgrows_its_place() -> None:
    planner = TorchPlanner()
    for length in (1, 100, 5000, 3, 200_000):
        state = {**small_state(), "text": "x" * length}
        assert_same(loaded(made(planner, state)), state)


def test_a_larger_tensor_may_turn_volatile() -> None:
    planner = TorchPlanner()
    state = small_state()
    assert len([s for s in made(planner, state).segments if not s.is_literal]) == 5
    volatile = made(planner, state, is_volatile=lambda fqn, _: fqn == "model.head")
    assert "model.embedding" not in [s.fqn for s in volatile.segments]
    assert_same(loaded(volatile), state)


def test_lazy_sources_follow_no_rebinding() -> None:
    state = {"w": torch.arange(5000.0)}
    found = made(TorchPlanner(), state)
    state["w"].data = torch.zeros(5000)
    assert torch.equal(loaded(found)["w"], torch.arange(5000.0))


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.ones(4, 3).t(),
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
        lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        lambda: Settings(0.1, torch.ones(2000)),
        lambda: torch.ones(2).untyped_storage(),
        lambda: resized(torch.ones(2), 0),
        lambda: resized(torch.ones(2), 4),
    ],
)
def test_what_is_not_ordinary_is_left_to_the_reference(odd: Any) -> None:
    planner = TorchPlanner()
    assert made(planner, {"a": torch.ones(3), "odd": odd()}) is None
    assert num_structures(planner) == 0


def test_small_tensors_may_be_hidden_or_in_two_places() -> None:
    """No container need lead to them: all are copied at once."""
    planner = TorchPlanner()
    for step in (1.0, 2.0):
        twice = torch.full((3,), step)
        state = {"hidden": Settings(step, torch.full((2,), step)), "twice": [twice, twice]}
        found = made(planner, state)
        twice.zero_()
        loaded = torch.load(io.BytesIO(image_of(found)), weights_only=False)
        assert loaded["hidden"].weight.tolist() == [step] * 2
        assert loaded["twice"][0].tolist() == [step] * 3 and loaded["twice"][0] is loaded["twice"][1]
    assert num_structures(planner) == 1


def test_a_large_tensor_in_two_places_is_left_to_the_reference() -> None:
    assert made(TorchPlanner(), {"twice": [torch.ones(3000)] * 2}) is None


def test_no_tensor_is_kept() -> None:
    planner = TorchPlanner()
    tensor = torch.ones(5000)
    reference = weakref.ref(tensor)
    assert made(planner, {"w": tensor}) is not None
    del tensor
    assert reference() is None


def test_without_memory_for_copies_eager_tensors_are_staged_first() -> None:
    planner, asked = TorchPlanner(), []
    for step in (1.0, 2.0):
        state = small_state(step)
        found = made(planner, state, take=lambda nbytes: bool(asked.append(nbytes)))
        assert_same(loaded(found), state)
        late = {one.nbytes: one for one in found.segments if not one.is_literal}
        assert late[32].end <= found.eager_end <= min(one.begin for nbytes, one in late.items() if nbytes > 32)
        assert sum(not one.is_literal for one in found.segments) == 1 + 4 + 5
        assert_same(loaded(made(planner, state)), state)
    assert asked == [32 + 4 * 4] * 2
    assert num_structures(planner) == 2


def test_eager_tensors_of_a_device_are_captured_in_the_order_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_structure, "_is_on_host", lambda _: False)
    planner, taken = TorchPlanner(), []

    def capture(tensor: torch.Tensor) -> memoryview:
        taken.append(tensor)
        return capture_host(tensor)

    for step in (1.0, 2.0):
        state = small_state(step)
        found = made(planner, state, capture=capture)
        assert_same(loaded(found), state)
        assert found.eager_end == 0
        large = [one for one in found.segments if isinstance(one.source, torch.Tensor)]
        assert [one.version for one in large] == [one.source._version for one in large] == [0] * 5
    bias, steps = state["model"]["bias"], [one["step"] for one in state["optimizer"]["state"].values()]
    assert list(map(id, taken[5:])) == list(map(id, [bias, *steps]))
    assert num_structures(planner) == 1
    assert made(planner, state) is None, "nobody takes copies on the device"
    assert made(planner, state, capture=lambda _: None) is None
    assert made(planner, state, take=lambda _: False) is None


def test_structures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = TorchPlanner()
    for count in range(1, 9):
        made(planner, {str(n): torch.ones(1) for n in range(count)})
    assert num_structures(planner) == 8
    made(planner, {str(n): torch.ones(1) for n in range(2)})
    assert planner._structures[-1].num_tensors == 2
    monkeypatch.setattr(torch_planner, "_MAX_TENSORS", 6)
    made(planner, {str(n): torch.ones(1) for n in range(3)})
    assert [one.num_tensors for one in planner._structures] == [2, 3]


def test_names_that_change_with_each_save_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_planner, "_MAX_STRUCTURES", 4)
    planner = TorchPlanner()
    for step in range(9):
        made(planner, {f"step{step}": torch.ones(3000)})
    assert num_structures(planner) == 4
