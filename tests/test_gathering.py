"""Many pieces of host memory, copied at once."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from datastates import gathering
from datastates.gathering import PIECE_BYTES, gather_into, gather_segments, gathered, runs_of
from datastates.plan import FilePlan, Segment


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    yield descriptor
    os.close(descriptor)


def raw(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def plan_of(*sources: torch.Tensor | bytes, gap_before: int = -1) -> FilePlan:
    segments, end = [], 0
    for number, source in enumerate(sources):
        end += 8 if number == gap_before else 0
        nbytes = source.nbytes if isinstance(source, torch.Tensor) else len(source)
        segments.append(Segment(end, nbytes, source, f"t{number}"))
        end += nbytes
    return FilePlan("raw", end, tuple(segments))


def copied(descriptor: int, offset: int, plan: FilePlan) -> bool:
    slab = plan.slab(0, 1 << 20)
    return gather_segments(descriptor, offset, slab, slab.segments)


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 3000])
def test_pieces_lie_behind_one_another(count: int) -> None:
    tensors = [torch.full((number % 7 + 1,), float(number)) for number in range(count)]
    copies = gathered([tensor.data_ptr() for tensor in tensors], [tensor.nbytes for tensor in tensors])
    assert copies == [raw(tensor) for tensor in tensors]


def test_memory_that_is_not_there(memory: int) -> None:
    tensor = torch.ones(4)
    assert not gather_into(memory, 0, [tensor.data_ptr(), 8], [16, 16])
    assert gathered([8], [16]) is None


def test_no_descriptor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert gathered([torch.ones(1).data_ptr()], [4]) is None


def test_literals_and_tensors_become_a_part_of_the_file(memory: int) -> None:
    os.ftruncate(memory, 1 << 20)
    sources = [part for number in range(2000) for part in (b"x" * (number % 5 + 1), torch.full((3,), float(number)))]
    plan = plan_of(*sources)
    image = b"".join(source if isinstance(source, bytes) else raw(source) for source in sources)
    assert copied(memory, 4096, plan)
    assert os.pread(memory, len(image), 4096) == image
    assert os.pread(memory, 4096, 0) == bytes(4096)
    for slab in plan.slabs(4093):  # every kind of cut
        assert gather_segments(memory, 8192, slab, slab.segments)
        assert os.pread(memory, slab.nbytes, 8192) == image[slab.begin : slab.end]


def shrunk() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(4)
    return tensor


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.ones(4, 4).t(),
        lambda: torch._neg_view(torch.ones(4)),
        lambda: torch.ones(4, dtype=torch.complex64).conj(),
        lambda: torch.ones(4, device="meta"),
        lambda: torch.nn.Parameter(torch.ones(4)),
        shrunk,
    ],
)
def test_what_is_no_flat_host_memory_is_refused(memory: int, odd: Callable[[], torch.Tensor]) -> None:
    assert not copied(memory, 0, plan_of(b"before", odd(), b"behind"))
    assert os.fstat(memory).st_size == 0


def test_what_reads_elsewhere_is_refused(memory: int) -> None:
    class Elsewhere:
        def read_into(self, offset: int, memory: memoryview) -> None:
            raise AssertionError

    assert not copied(memory, 0, FilePlan("raw", 8, (Segment(0, 4, b"head"), Segment(4, 4, Elsewhere()))))


def test_a_descriptor_that_cannot_be_written_to() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    assert not copied(writer, 0, plan_of(b"x"))


def test_runs_are_cut_at_gaps_and_large_segments() -> None:
    large = b"L" * (PIECE_BYTES + 1)
    plan = plan_of(b"a", b"b", b"c", b"d", large, b"e" * 100_000, gap_before=2)
    names = [[segment.fqn for segment in run] for run in runs_of(plan.slab(0, 1 << 20))]
    assert names == [["t0", "t1"], ["t2", "t3"], ["t4"], ["t5"]]
    cut = PIECE_BYTES + 4096
    assert [[s.fqn for s in run] for run in runs_of(plan.slab(1, cut))] == [["t5"]]
    assert gathering.MIN_PIECES > 1
