"""Names, aliases and captures of tensors, and the copies behind them."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates import state as module
from datastates.copying import BLOCK_ELEMENTS, copy_range, copy_to_bytes
from datastates.state import alias, capture_host, default_is_eager, has_own_storage, is_plain, named_tensors, version_of


def reference(tensor: torch.Tensor) -> bytes:
    """Row-major bytes by way of torch's own copies."""
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    dense.copy_(tensor.detach().reshape(-1))
    return bytes(dense.view(torch.uint8).tolist()) if dense.numel() else b""


def copied(tensor: torch.Tensor, begin: int, nbytes: int) -> bytes:
    """The range, copied between guard bytes that must stay as they are."""
    room = torch.full((nbytes + 32,), 0xA5, dtype=torch.uint8)
    copy_range(tensor, begin, room.data_ptr() + 16, nbytes)
    assert room[:16].eq(0xA5).all()
    assert room[16 + nbytes :].eq(0xA5).all()
    return bytes(room[16 : 16 + nbytes].tolist())


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float64, torch.complex64, torch.bool]))
    base = torch.arange(1, 201).to(dtype)
    dims = draw(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 2, 5, 7, 11])), max_size=4))
    reach = sum(max(size - 1, 0) * stride for size, stride in dims)
    offset = draw(st.integers(0, 199 - reach))
    tensor = base.as_strided([size for size, _ in dims], [stride for _, stride in dims], offset)
    if tensor.is_complex():
        tensor = draw(st.sampled_from([tensor, tensor.conj(), tensor.conj().imag]))
    return tensor


@settings(deadline=None, max_examples=200)
@given(tensor=strided(), data=st.data())
def test_copy_range_of_any_strides(tensor: torch.Tensor, data: st.DataObject) -> None:
    expected = reference(tensor)
    begin = data.draw(st.integers(0, len(expected)))
    nbytes = data.draw(st.integers(0, len(expected) - begin))
    assert copied(tensor, begin, nbytes) == expected[begin : begin + nbytes]
    assert bytes(copy_to_bytes(tensor)) == expected


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(300 * 400, dtype=torch.int32).view(300, 400).t(),
        torch.arange(3 * BLOCK_ELEMENTS, dtype=torch.int16)[::2],
        torch.arange(4 * BLOCK_ELEMENTS, dtype=torch.int16).view(2, BLOCK_ELEMENTS, 2)[:, :, 0],
        torch.zeros(2, 3, 64, 65).to(memory_format=torch.channels_last),
        torch.arange(100_000, dtype=torch.uint8).view(torch.uint4)[::3],
    ],
    ids=["transposed", "steps", "rows-above-a-block", "channels-last", "sub-byte"],
)
def test_copy_range_over_many_blocks(tensor: torch.Tensor) -> None:
    raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    expected = reference(raw)
    for begin, end in ((0, len(expected)), (1, len(expected) - 3), (len(expected) // 3, len(expected) // 2)):
        assert copied(tensor, begin, end - begin) == expected[begin:end]


def test_copy_range_into_a_tensor() -> None:
    room = torch.zeros(8, dtype=torch.uint8)
    copy_range(torch.tensor([1, 2], dtype=torch.int16), 0, room[2:], 4)
    assert room.tolist() == [0, 0, 1, 0, 2, 0, 0, 0]


@pytest.mark.parametrize(("begin", "nbytes"), [(-1, 2), (0, 9), (8, 1), (0, -1)])
def test_copy_range_outside_the_tensor(begin: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="of a tensor of 8 bytes"):
        copy_range(torch.zeros(2), begin, torch.zeros(100, dtype=torch.uint8), nbytes)


@pytest.mark.parametrize(
    "room", [torch.zeros(7, dtype=torch.uint8), torch.zeros(8), torch.zeros(16, dtype=torch.uint8)[::2]]
)
def test_copy_range_into_what_cannot_hold_it(room: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="must be 8 contiguous uint8 bytes"):
        copy_range(torch.zeros(2), 0, room, 8)


def test_no_copy_is_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        sizes.append(source.numel())
        return original(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    for tensor in (
        torch.zeros(1000, 999).t(),
        torch.zeros(5 * BLOCK_ELEMENTS)[::2],
        torch.zeros(3, 200_000).t().t()[:, ::2],
    ):
        copy_to_bytes(tensor)
    assert 0 < max(sizes) <= BLOCK_ELEMENTS


def test_copies_start_no_thread() -> None:
    """A fresh process: here some test may have started an OpenMP team already."""
    code = (
        "import os, torch\n"
        "from datastates.copying import copy_to_bytes\n"
        "def threads(): return len(os.listdir('/proc/self/task'))\n"
        "wide, image = torch.empty(2000, 1000).t(), torch.empty(2, 8, 64, 64).permute(0, 2, 3, 1)\n"
        "before = threads()\n"
        "for tensor in (wide, image, torch.empty(1 << 22)[::2], torch.empty(1 << 22)): copy_to_bytes(tensor)\n"
        "ours = threads() - before\n"
        "torch.empty(1 << 22)[::2].contiguous()\n"
        "print(ours, threads() - before)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    ours, theirs = map(int, result.stdout.split())
    assert ours == 0
    assert theirs > 0, "torch's own copy starts no team here, so this test says nothing"


def test_capture_host_is_a_copy() -> None:
    tensor = torch.arange(4, dtype=torch.int16)
    captured = capture_host(tensor)
    tensor.fill_(9)
    assert bytes(captured) == bytes([0, 0, 1, 0, 2, 0, 3, 0])
    assert capture_host(torch.empty(0, 3)).nbytes == 0
    assert capture_host(torch.ones(50_000)).nbytes == 200_000


def test_default_is_eager() -> None:
    is_eager = default_is_eager(16)
    assert is_eager("a", torch.zeros(4))
    assert not is_eager("a", torch.zeros(5))
    assert default_is_eager(0)("step", torch.tensor(1.0))


def test_named_tensors_names_the_first_way() -> None:
    weight, other = torch.ones(2), torch.nn.Parameter(torch.ones(1))
    state = {
        "m": collections.OrderedDict(w=weight),
        "again": weight,
        3: [None, (other,)],
        (1, 2): {"x": torch.zeros(0)},
    }
    names = dict(named_tensors(state).values())
    assert list(names) == ["m.w", "3.1.0", "(1, 2).x"]
    assert names["m.w"] is weight
    assert names["3.1.0"] is other


def test_named_tensors_ends_in_a_cycle_and_at_objects() -> None:
    state: dict[str, object] = {"t": torch.ones(1), "hidden": threading.local(), "size": torch.Size([1])}
    state["self"] = state
    assert [fqn for fqn, _ in named_tensors(state).values()] == ["t"]
    assert [fqn for fqn, _ in named_tensors(torch.ones(1)).values()] == [""]


def test_alias_shares_memory_and_version_but_not_data() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    taken = alias(parameter)
    assert type(taken) is torch.Tensor
    assert not taken.requires_grad
    with torch.no_grad():
        parameter.add_(1)
    assert taken.tolist() == [1.0] * 3
    assert version_of(taken) == version_of(parameter) == 1
    parameter.data = torch.ones(5)
    assert taken.shape == (3,)


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        assert version_of(torch.zeros(1)) == -1


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_kinds_of_tensors() -> None:
    with_note = torch.ones(2)
    with_note.note = 1
    parameter = torch.nn.Parameter(torch.ones(2))
    assert is_plain(torch.ones(2))
    assert not is_plain(with_note)
    assert has_own_storage(with_note)
    assert has_own_storage(parameter)
    assert not is_plain(parameter)
    assert not has_own_storage(torch.eye(2).to_sparse())
    assert not has_own_storage(torch.eye(2).to_sparse_csr())


def test_exported_names_exist() -> None:
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
