"""Columns that describe tensors, and what recognises them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from datastates.formats.geometry import Looks, are_plain, geometry_of


def tensors() -> list[torch.Tensor]:
    return [
        torch.ones(3, 4),
        torch.tensor(1.0),
        torch.empty(0, 2),
        torch.ones(5, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(4, requires_grad=True).detach().requires_grad_(),
    ]


def looks_of(known: list[torch.Tensor]) -> Looks:
    return Looks(known, geometry_of(known))


@pytest.fixture(params=["guards", "columns"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Both ways to compare; torch may not have the guards."""
    if request.param == "columns":
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    made = looks_of(tensors())
    assert (made._guards is None) == (request.param == "columns")
    return made


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = 1  # type: ignore[attr-defined]
    return tensor


CHANGES: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "shape": lambda t: [t[0].reshape(4, 3), *t[1:]],
    "stride": lambda t: [torch.ones(4, 3).t(), *t[1:]],
    "dtype": lambda t: [t[0].double(), *t[1:]],
    "dtype of equal size": lambda t: [t[0].view(torch.int32), *t[1:]],
    "requires_grad": lambda t: [t[0].requires_grad_(), *t[1:]],
    "device": lambda t: [torch.ones(3, 4, device="meta"), *t[1:]],
    "fewer": lambda t: t[:-1],
    "more": lambda t: [*t, torch.ones(1)],
    "order": lambda t: [t[1], t[0], *t[2:]],
    "negated": lambda t: [torch._neg_view(t[0]), *t[1:]],
    "conjugated": lambda t: [*t[:4], t[4].conj(), t[5]],
    "attribute": lambda t: [with_attribute(t[0]), *t[1:]],
    "number of dimensions": lambda t: [t[0], torch.ones(1), *t[2:]],
}


def test_other_tensors_that_look_alike(looks: Looks) -> None:
    assert looks.fit(tensors())
    with torch.no_grad():
        assert looks.fit(tensors())


@pytest.mark.parametrize("change", CHANGES)
def test_every_difference_is_seen(looks: Looks, change: str) -> None:
    assert not looks.fit(CHANGES[change](tensors()))


def test_one_tensor_in_two_places(looks: Looks) -> None:
    assert looks.fit(tensors())
    twice = torch.ones(3)
    assert not looks_of([twice, torch.ones(3)]).fit([twice, twice])
    assert not are_plain(geometry_of([twice, twice]), [twice, twice])


def test_guards_of_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in another way, or not at all: the columns do it."""

    def other(*_: object, **__: object) -> None:
        raise TypeError("unexpected keyword")

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", other)
    made = looks_of(tensors())
    assert made.fit(tensors())
    assert not made.fit(tensors()[:-1])
    assert looks_of([]).fit([])


def test_no_tensor_is_kept() -> None:
    known = tensors()
    references = [weakref.ref(tensor) for tensor in known]
    looks = looks_of(known)
    del known
    assert [reference() for reference in references] == [None] * len(references)
    assert looks.fit(tensors())
