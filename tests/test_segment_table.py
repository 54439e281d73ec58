"""Large tensors of the host by column: the same bytes as one by one, and nothing that has moved or changed."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Iterator

import pytest
import torch

from datastates.errors import TornSnapshotError
from datastates.gathering import PIECE_BYTES, runs_of
from datastates.host_cache import Slab
from datastates.plan import FilePlan, PackedSeals, Seal
from datastates.segment_table import Literals, SegmentTable, Windows, address_of, versions_of

SLAB = 1 << 20


def raw(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def table_of(tensors: list[torch.Tensor], literals: list[bytes]) -> SegmentTable:
    storages = [tensor.untyped_storage() for tensor in tensors]
    lengths = [len(literals[0])]
    for tensor, literal in zip(tensors, literals[1:], strict=True):
        lengths += [tensor.nbytes, len(literal)]
    begins = [sum(lengths[:index]) for index in range(len(lengths))]
    ends = [sum(map(len, literals[1 : index + 2])) for index in range(len(literals) - 2)]
    held = Literals(literals[0], b"".join(literals[1:-1]), ends, literals[-1])
    watched, versions = versions_of(tensors)
    windows = Windows(
        [f"t{number}" for number in range(len(tensors))],
        storages,
        [tensor.storage_offset() * tensor.itemsize for tensor in tensors],
        [tensor.nbytes for tensor in tensors],
        [tensor.data_ptr() for tensor in tensors],
        [storage.nbytes() for storage in storages],
        watched,
        versions,
    )
    vector = array("Q", bytes(16 * len(lengths)))
    vector[1::2], vector[2::4] = array("Q", lengths), array("Q", windows.addresses)
    starts = [address_of(held.between) + end - len(part) for end, part in zip(ends, literals[1:-1], strict=True)]
    vector[0::4] = array("Q", [address_of(held.first), *starts, address_of(held.last)])
    return SegmentTable(begins, lengths, held, windows, vector)


@pytest.fixture
def slab() -> Iterator[tuple[int, Slab]]:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 * SLAB)
    memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=2 * SLAB, dtype=torch.uint8)
    yield descriptor, Slab(SLAB, memory[SLAB:])
    os.close(descriptor)


def state(count: int, elements: int = 50) -> tuple[list[torch.Tensor], list[bytes], bytes]:
    """Tensors in the midst of their storages, literals of all lengths, and the bytes of the file."""
    tensors = [torch.arange(elements + 8.0).add_(number)[3 : elements + number % 5] for number in range(count)]
    literals = [bytes([number % 251]) * (number % 7 + 1) for number in range(count + 1)]
    image = literals[0] + b"".join(raw(one) + data for one, data in zip(tensors, literals[1:], strict=True))
    return tensors, literals, image


@pytest.mark.parametrize(("count", "elements"), [(1, 50), (3, 50), (1500, 20), (5, PIECE_BYTES // 4 + 100)])
@pytest.mark.parametrize("slab_bytes", [4096, 4099, SLAB])
def test_every_cut_gives_the_bytes_of_the_file(slab, count, elements, slab_bytes):
    tensors, literals, image = state(count, elements)
    table = table_of(tensors, literals)
    plan = FilePlan("torch", len(image), table)
    assert plan.literal_nbytes == sum(map(len, literals))
    descriptor, memory = slab
    for part in plan.slabs(slab_bytes):
        memory.memory.fill_(0xAB)
        for run in runs_of(part):
            assert run.copy_into(descriptor, memory, part)
        found = bytes(memory.memory[: part.nbytes + 1].tolist()) if part.nbytes < SLAB else raw(memory.memory)
        assert found[: part.nbytes] == image[part.begin : part.begin + part.nbytes]
        assert found[part.nbytes :] in (b"", b"\xab"), "nothing behind the slab's part of the file is written"


def test_rows_are_made_when_they_are_asked_for():
    tensors, literals, image = state(4)
    table = table_of(tensors, literals)
    assert len(table) == 9
    found = b"".join(raw(row.source) if isinstance(row.source, torch.Tensor) else bytes(row.source) for row in table)
    assert found == image
    part = table[3:-1]
    assert [row.fqn for row in part] == ["t1", "", "t2", "", "t3"]
    assert [row.begin for row in part] == table.begins[3:-1]
    assert part.literal_nbytes == len(literals[2]) + len(literals[3])
    assert part[1:][0].fqn == "" and part[-1].fqn == "t3"
    assert len(table[5:2]) == 0
    with pytest.raises(ValueError, match="without gaps"):
        table[::2]
    with pytest.raises(IndexError):
        table[9]


def test_a_tensor_that_is_rebound_or_turned_is_still_the_one_of_the_save(slab):
    tensors, literals, image = state(2)
    table = table_of(tensors, literals)
    tensors[0].data = torch.zeros(7)
    tensors[1].resize_(0)
    descriptor, memory = slab
    plan = FilePlan("torch", len(image), table).slab(0, SLAB)
    assert table.copy_into(descriptor, memory, plan)
    assert raw(memory.memory)[: len(image)] == image


def test_a_storage_that_grew_has_moved_and_is_read_where_it_is_now(slab):
    tensors, literals, _ = state(2)
    table = table_of(tensors, literals)
    expected = raw(tensors[0])
    tensors[0].untyped_storage().resize_(1 << 20)
    plan = FilePlan("torch", sum(table.lengths), table).slab(0, SLAB)
    assert not table.copy_into(*slab, plan)
    assert raw(table[1].source) == expected


def test_a_storage_that_was_freed_is_torn_and_stays_as_it_is(slab):
    tensors, literals, _ = state(2)
    table = table_of(tensors, literals)
    tensors[1].untyped_storage().resize_(0)
    plan = FilePlan("torch", sum(table.lengths), table).slab(0, SLAB)
    assert not table.copy_into(*slab, plan)
    with pytest.raises(TornSnapshotError, match="t1: its storage was freed") as caught:
        list(table)
    assert caught.value.fqns == ("t1",)
    assert tensors[1].untyped_storage().nbytes() == 0


def test_changes_are_named_within_the_range_that_is_asked_about():
    tensors, literals, _ = state(3)
    table = table_of(tensors, literals)
    assert table.changed(0, 1 << 30) == ()
    tensors[2].add_(1)
    tensors[0].detach().add_(1)
    assert table.changed(0, 1 << 30) == ("t0", "t2")
    assert table.changed(table.begins[3], table.begins[5]) == ()
    assert table.changed(table.begins[3], table.begins[5] + 1) == ("t2",)
    assert table[2:].changed(0, 1 << 30) == ("t2",)


def test_inference_tensors_never_change():
    with torch.inference_mode():
        still = torch.ones(4)
    watched, versions = versions_of([still, torch.ones(4)])
    assert versions == [0, 0]
    with torch.inference_mode():
        still.add_(1)
    assert [one._version for one in watched] == versions


def test_packed_seals_are_seals():
    seals = [Seal(10 * number + 6, 10 * number, 10 * number + 6) for number in range(5)]
    packed = PackedSeals.of(seals)
    assert list(packed) == seals and packed[-1] == seals[-1]
    assert list(packed[1:3]) == seals[1:3] and len(packed[5:]) == 0
    assert PackedSeals.of(packed) is packed
    with pytest.raises(IndexError):
        packed[5]
    with pytest.raises(ValueError, match="follow each other"):
        packed[::2]
