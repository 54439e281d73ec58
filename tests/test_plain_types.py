"""Plain data of numpy and the standard library loads without running code; what only looks like it does not."""

from __future__ import annotations

import collections
import datetime
import pathlib
import random
import threading
from typing import Any

import numpy
import pytest
import torch

from datastates import load
from datastates.errors import ForeignObjectError
from datastates.formats import plan
from datastates.state import capture_host, default_is_eager
from formats.images import image_of

VALUES = {
    "array": numpy.arange(6.0).reshape(2, 3),
    "text": numpy.array(["a", "bc"]),
    "times": numpy.array(["2026-01-01"], dtype="datetime64[D]"),
    "scalar": numpy.float64(1.5),
    "half": numpy.float16(2),
    "numpy-rng": numpy.random.RandomState(1).get_state(),
    "python-rng": random.Random(1).getstate(),
    "torch-rng": torch.get_rng_state(),
    "day": datetime.date(2026, 1, 2),
    "moment": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    "delta": datetime.timedelta(seconds=5),
    "path": pathlib.PurePosixPath("a/b"),
    "real-path": pathlib.Path("a"),
    "frozen": frozenset({1, 2}),
    "range": range(3, 9, 2),
    "slice": slice(1, None, 2),
}


def write(path: pathlib.Path, kind: str, state: Any) -> pathlib.Path:
    if kind == "torch.save":
        torch.save(state, path)
    else:
        path.write_bytes(image_of(plan(state, kind, capture_host, default_is_eager(0))))
    return path


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("kind", ["torch", "safetensors", "torch.save"])
def test_plain_values(tmp_path: pathlib.Path, kind: str, name: str) -> None:
    expected = VALUES[name]
    found = load(write(tmp_path / "x", kind, {"v": expected}))["v"]
    assert type(found) is type(expected)
    if isinstance(expected, (numpy.ndarray, torch.Tensor)):
        assert found.dtype == expected.dtype and (found == expected).all()
    elif name == "numpy-rng":
        assert (found[1] == expected[1]).all() and found[2:] == expected[2:]
    else:
        assert found == expected


@pytest.mark.parametrize("value", [numpy.array([object()], dtype=object), collections.deque([1]), random.Random(1)])
def test_others_stay_foreign(tmp_path: pathlib.Path, value: Any) -> None:
    path = write(tmp_path / "x", "torch.save", {"v": value if not isinstance(value, numpy.ndarray) else _objects()})
    with pytest.raises(ForeignObjectError, match="v holds"):
        load(path)


def _objects() -> Any:
    return numpy.array([pathlib.Path, 1], dtype=object)


def test_torch_itself_allows_no_more_than_before(tmp_path: pathlib.Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    path = write(tmp_path / "x", "torch.save", {"v": VALUES["array"]})
    threads = [threading.Thread(target=lambda: [load(path) for _ in range(20)], name=f"loader-{n}") for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(torch.serialization.get_safe_globals()) == before
