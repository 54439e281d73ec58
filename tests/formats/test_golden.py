"""Golden bytes: a file written today must be what it was, and one written then must load for ever.

A change of the layout on purpose needs a new golden file beside the old one, which stays and goes on loading:
write ``image_of(plan(golden_state(), ...))`` to ``golden/``. The torch file also depends on how torch pickles.
"""

from __future__ import annotations

import pathlib
from collections import OrderedDict
from typing import Any

import pytest
import safetensors.torch
import torch
from equality import assert_same
from images import image_of

from datastates.formats import plan
from datastates.reader import load
from datastates.state import capture_host, default_is_eager

GOLDEN = pathlib.Path(__file__).with_name("golden")
FILES = {"torch": "state.pt", "safetensors": "state.safetensors"}


def golden_state() -> dict[Any, Any]:
    """One of everything that has a place of its own in a file."""
    flat = torch.arange(100, dtype=torch.float32)
    return {
        "model": OrderedDict(weight=flat[:60].view(6, 10), tied=flat[:60].view(6, 10), row=flat[10:20]),
        "half": torch.arange(40, dtype=torch.bfloat16).view(5, 8).t(),
        "eight": torch.arange(50, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "step": torch.tensor(7.0),
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
        "complex": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        3: ("x", None, True, 2**70, -0.0, float("inf"), b"\0", [], {}),
    }


@pytest.mark.parametrize("kind", FILES)
def test_bytes_are_what_they_were(kind: str) -> None:
    image = image_of(plan(golden_state(), kind, capture_host, default_is_eager(20)))
    assert image == (GOLDEN / FILES[kind]).read_bytes()


@pytest.mark.parametrize("kind", FILES)
def test_loads_for_ever(kind: str) -> None:
    assert_same(load(GOLDEN / FILES[kind]), golden_state())


def test_their_owners_load_them() -> None:
    assert_same(torch.load(GOLDEN / "state.pt", weights_only=True), golden_state())
    stored = safetensors.torch.load_file(GOLDEN / "state.safetensors")
    assert torch.equal(stored["model.weight"], golden_state()["model"]["weight"])
