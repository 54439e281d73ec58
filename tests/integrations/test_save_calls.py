"""What is offered of a framework's saves, and what a file of weights by name holds."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from datastates import reader
from datastates.formats.safetensors import plan_flat
from datastates.integrations.save_calls import diverted
from datastates.integrations.stepped import SteppedOptimizers
from datastates.state import capture_host

BASE = torch.randn(4, 6)


@pytest.fixture
def offered():
    """What `diverted` has offered; it is all taken."""
    found = []

    def divert(state, path, *, is_flat):
        found.append((path, is_flat))
        return True

    with diverted(divert):
        yield found


def test_plain_calls_are_offered(tmp_path, offered):
    safetensors.torch.save_file({"w": BASE}, tmp_path / "w.safetensors", metadata={"format": "pt"})
    torch.save({"w": BASE}, tmp_path / "w.pt")
    assert offered == [(str(tmp_path / "w.safetensors"), True), (str(tmp_path / "w.pt"), False)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "tensors",
    [
        {"one": BASE, "other": BASE},
        {"whole": BASE, "part": BASE[1:]},
        {"transposed": BASE.t()},
        {"sparse": BASE.to_sparse()},
        {"list": [BASE]},
        {1: BASE},
    ],
    ids=lambda tensors: str(next(iter(tensors))),
)
def test_what_safetensors_refuses_is_left_to_it(tmp_path, offered, tensors):
    with pytest.raises((RuntimeError, ValueError, TypeError, AttributeError)):
        safetensors.torch.save_file(tensors, tmp_path / "w.safetensors")
    assert offered == []


def test_parts_of_one_buffer_that_share_no_byte_are_offered(tmp_path, offered):
    safetensors.torch.save_file({"top": BASE[:2], "bottom": BASE[2:]}, tmp_path / "w.safetensors")
    assert len(offered) == 1


def test_calls_with_options_go_where_they_always_went(tmp_path, offered):
    safetensors.torch.save_file({"w": BASE}, tmp_path / "w.safetensors", metadata={"mine": "1"})
    torch.save({"w": BASE}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    assert offered == []
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("capture", [None, capture_host, lambda _: None], ids=["lazy", "copied", "no-room"])
def test_a_file_of_weights_has_their_names_and_no_other(tmp_path, capture):
    """Sizes are odd, item sizes differ, and every second tensor is copied, or cannot be for want of room."""
    dtypes = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.bool]
    tensors = {f"w{i}": torch.arange(2 * i + 1).to(dtypes[i % 5]) for i in range(15)} | {"empty": torch.ones(0, 3)}
    plan = plan_flat(tensors, capture, lambda name, _: name in list(tensors)[::2])
    path = tmp_path / "w.safetensors"
    image = bytearray(plan.nbytes)
    for segment in plan.segments:
        data = segment.source if segment.is_literal else capture_host(segment.source)
        image[segment.begin : segment.end] = data
    path.write_bytes(image)
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(tensors)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
    found = reader.load(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


class Averaging(torch.optim.SGD):
    """Puts averaged weights into the parameters for evaluation, as optimizers without a schedule do."""

    def train(self) -> None:
        """Takes them out again."""

    def eval(self) -> None:
        """Puts them in."""


@pytest.mark.parametrize(("kind", "is_copied"), [(torch.optim.SGD, False), (Averaging, True)])
def test_weights_that_an_optimizer_swaps_between_steps_are_copied_at_once(kind, is_copied):
    weight = torch.nn.Parameter(torch.ones(4))
    steps = SteppedOptimizers()
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.ones(4)
    assert steps.eager_rule()("w", weight)  # has not stepped: nobody says that it will
    optimizer.step()
    assert steps.eager_rule()("w", weight) is is_copied
