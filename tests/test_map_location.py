"""Where tensors go: for each form of ``map_location`` the same as from ``torch.load``."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from datastates import load
from datastates.formats import plan
from datastates.state import capture_host, default_is_eager
from formats.images import image_of


def make_state() -> dict[str, Any]:
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    return {
        "rng": torch.get_rng_state(),
        "optimizer": optimizer.state_dict(),
        "view": torch.arange(90).view(9, 10)[2:5],
        "float8": torch.ones(7).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(3), requires_grad=False),
    }


@pytest.fixture(params=["torch", "torch.save"])
def path(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "x.pt"
    if request.param == "torch":
        path.write_bytes(image_of(plan(make_state(), "torch", capture_host, default_is_eager(100))))
    else:
        torch.save(make_state(), path)
    return path


FORMS: dict[str, Any] = {
    "none": None,
    "a-string": "cpu",
    "a-device": torch.device("cpu"),
    "meta": "meta",
    "the-meta-device": torch.device("meta"),
    "a-dictionary": {"cuda:0": "cpu"},
    "a-dictionary-to-meta": {"cpu": "meta"},
    "a-function": lambda storage, _location: storage,
    "a-function-without-an-answer": lambda _storage, _location: None,
    "a-function-that-copies": lambda storage, _location: storage.clone(),
}


@pytest.mark.parametrize("form", FORMS)
def test_same_as_torch(path: pathlib.Path, form: str, assert_same_state: Any) -> None:
    expected, found = torch.load(path, FORMS[form]), load(path, FORMS[form])
    assert devices(found) == devices(expected)
    if "meta" not in form:
        assert_same_state(found, expected)


def test_a_function_is_called_for_the_same_storages(path: pathlib.Path) -> None:
    def recorded(loader: Callable[..., Any]) -> list[tuple[str, int, bytes]]:
        calls: list[tuple[str, int, bytes]] = []

        def record(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
            calls.append((location, storage.nbytes(), bytes(storage.tolist())))
            return storage

        loader(path, record)
        return calls

    assert recorded(load) == recorded(torch.load)


def test_meta_reads_no_tensor(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datastates.reading.FileReader.run", None)
    assert load(path, "meta")["view"].is_meta


def test_random_numbers_go_on_after_a_load(path: pathlib.Path) -> None:
    torch.set_rng_state(load(path)["rng"])
    first = torch.rand(5)
    torch.set_rng_state(torch.load(path)["rng"])
    assert torch.equal(first, torch.rand(5))


def test_an_optimizer_goes_on_after_a_load(path: pathlib.Path) -> None:
    """Its fused form needs the step counter where torch.load puts it."""
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.load_state_dict(load(path)["optimizer"])
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_memory_is_the_states_own_and_writable(path: pathlib.Path) -> None:
    first, second = load(path), load(path)
    first["view"] += 1
    assert torch.equal(second["view"], make_state()["view"])
    assert torch.equal(load(path)["view"], make_state()["view"])


def devices(node: Any) -> list[str]:
    if isinstance(node, torch.Tensor):
        return [f"{node.device} {node.dtype} {tuple(node.shape)} {node.stride()} {type(node).__name__}"]
    items = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return [one for child in items for one in devices(child)]
