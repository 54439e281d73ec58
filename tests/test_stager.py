"""The stager and the fence, with host tensors and with a device whose queue the test moves by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from datastates import stager
from datastates.copier import HostCopier
from datastates.copying import copy_range
from datastates.errors import TornSnapshotError, WaitTimeoutError
from datastates.events import EventLog
from datastates.fence import Fence
from datastates.gathering import gather_segments
from datastates.host_cache import HostCache
from datastates.plan import FilePlan, Piece, Segment
from datastates.stager import Stager
from datastates.staging_job import StagingJob

SLAB = 4096


@dataclass
class Recorder:
    """A sink that keeps a copy of each slab and gives the slab back, or holds it until told."""

    cache: HostCache
    gate: threading.Event = field(default_factory=threading.Event)
    images: dict[str, dict[int, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()

    def flush_slab(self, file: str, index: int, cache_offset: int, nbytes: int) -> None:
        assert self.gate.wait(30)
        data = self.cache.memory[cache_offset : cache_offset + nbytes]
        self.images.setdefault(file, {})[index] = bytes(data.tolist())
        self.cache.release(cache_offset)

    def image(self, file: str) -> bytes:
        slabs = self.images[file]
        return b"".join(slabs[index] for index in range(len(slabs)))


class FakeMark:
    def __init__(self, device: FakeDevice, position: int) -> None:
        self._device = device
        self._position = position

    def query(self) -> bool:
        return self._device.done >= self._position

    def synchronize(self) -> None:
        with self._device.condition:
            assert self._device.condition.wait_for(self.query, 30), "the device never got there"


class FakeDevice:
    """A device with one copy queue; nothing in it runs before `run`. Stands in for every device."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.queue: list[Callable[[], None]] = []
        self.is_asked = threading.Event()
        self.done = 0
        self.held: list[FakeMark] = []
        self.num_ready = 0

    def ready(self) -> FakeMark:
        self.num_ready += 1
        return FakeMark(self, 0)

    def copy(self, piece: Piece, destination: torch.Tensor, after: FakeMark | None) -> None:
        assert after is not None
        source = piece.segment.source
        self.queue.append(lambda: copy_range(source, piece.segment_begin, destination, piece.nbytes))
        self.is_asked.set()

    def mark(self) -> FakeMark:
        return FakeMark(self, len(self.queue))

    def hold_current_stream(self, mark: FakeMark) -> None:
        self.held.append(mark)

    def run(self, count: int | None = None) -> None:
        with self.condition:
            end = len(self.queue) if count is None else self.done + count
            for entry in self.queue[self.done : end]:
                entry()
            self.done = end
            self.condition.notify_all()


class Stage:
    """A cache, a recorder, a stager and a fence, closed together."""

    def __init__(self, num_slabs: int = 8, device: FakeDevice | None = None) -> None:
        self.cache = HostCache(num_slabs * SLAB, SLAB)
        self.sink = Recorder(self.cache)
        self.lost: list[tuple[str, BaseException]] = []
        self.records: list[dict] = []
        events = EventLog(listener=self.records.append)
        extra = {} if device is None else {"make_copier": lambda _: device}
        self.losses: dict[str, BaseException] = {}
        self.stager: Stager[str] = Stager(
            self.cache,
            self.sink,
            events,
            self.losses.get,
            lambda job, error: self.lost.append((job.path, error)),
            **extra,
        )
        self.fence = Fence(self.stager.copier, events)

    def save(self, plan: FilePlan, name: str = "file") -> StagingJob[str]:
        job = StagingJob(plan, name, name)
        self.fence.add(job)
        self.stager.submit(job)
        return job

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.sink.gate.set()
        self.fence.remove()
        self.stager.close(30)
        self.cache.close()


def plan_of(*sources: torch.Tensor | bytes, gap: int = 0, eager_end: int = 0) -> FilePlan:
    segments, end = [], gap
    for number, source in enumerate(sources):
        nbytes = len(source) if isinstance(source, bytes) else source.numel() * source.element_size()
        version = -1 if isinstance(source, bytes) else source._version
        kept = source if isinstance(source, bytes) else source.detach()
        segments.append(Segment(end, nbytes, kept, f"t{number}", version))
        end += nbytes + gap
    return FilePlan("torch", end, tuple(segments), (), eager_end)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def test_the_image_is_literals_tensors_and_zero_gaps():
    big, strided = torch.randn(3000), torch.randn(40, 50).t()
    plan = plan_of(big, b"x" * 5000, strided, gap=8)
    with Stage() as stage:
        for slab in [stage.cache.reserve() for _ in range(8)]:  # what an earlier save left must not show in the gaps
            slab.memory.fill_(0xAB)
            stage.cache.release(slab.offset)
        del slab
        stage.save(plan).staged.result(30)
        zero = bytes(8)
        assert stage.sink.image("file") == zero + raw(big) + zero + b"x" * 5000 + zero + raw(strided) + zero


def test_small_tensors_are_copied_together(monkeypatch):
    """One call for each slab: the thread must not take the GIL from the training for each tensor."""
    calls: list[int] = []
    monkeypatch.setattr(HostCopier, "copy", lambda _, piece, *__: pytest.fail(f"{piece} was copied alone"))
    monkeypatch.setattr(stager, "gather_segments", lambda *a: bool(calls.append(len(a[3]))) or gather_segments(*a))
    sources = [
        source for number in range(300) for source in (bytes([number % 251]) * 41, torch.full((6,), float(number)))
    ]
    plan = plan_of(*sources)
    with Stage(num_slabs=8) as stage:
        for slab in [stage.cache.reserve() for _ in range(8)]:
            slab.memory.fill_(0xAB)
            stage.cache.release(slab.offset)
        del slab
        stage.save(plan).staged.result(30)
        assert stage.sink.image("file") == b"".join(s if isinstance(s, bytes) else raw(s) for s in sources)
    assert len(calls) == plan.num_slabs(SLAB)
    assert sum(calls) >= len(sources)


def test_what_cannot_be_copied_together_is_copied_alone(monkeypatch):
    monkeypatch.setattr(stager, "gather_segments", lambda *_: False)
    tensors = [torch.full((6,), float(number)) for number in range(100)]
    with Stage() as stage:
        stage.save(plan_of(*tensors)).staged.result(30)
        assert stage.sink.image("file") == b"".join(map(raw, tensors))


def test_a_state_of_ten_times_the_cache_passes_through():
    tensors = [torch.full((SLAB,), float(number)) for number in range(20)]
    with Stage(num_slabs=4) as stage:
        stage.save(plan_of(*tensors)).staged.result(60)
        assert stage.sink.image("file") == b"".join(raw(tensor) for tensor in tensors)


def test_the_fence_waits_for_host_copies_and_reopens_for_the_next_save():
    tensor = torch.ones(6 * SLAB)
    with Stage(num_slabs=4) as stage:
        stage.sink.gate.clear()
        job = stage.save(plan_of(tensor))
        with pytest.raises(WaitTimeoutError, match="file"):
            stage.fence.close(0.05)
        assert not job.staged.done()
        stage.sink.gate.set()
        stage.fence.close(30)
        tensor.fill_(2.0)
        job.staged.result(30)
        assert stage.sink.image("file") == raw(torch.ones(6 * SLAB))
        second = stage.save(plan_of(tensor), "second")
        stage.fence.close(30)
        second.staged.result(30)
        assert stage.sink.image("second") == raw(tensor)


def test_an_optimizers_step_closes_the_fence():
    parameter = torch.nn.Parameter(torch.ones(4 * SLAB))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones(4 * SLAB)
    with Stage(num_slabs=4) as stage:
        stage.sink.gate.clear()
        job = stage.save(plan_of(parameter))
        stepper = threading.Thread(target=optimizer.step)
        stepper.start()
        assert not job.issued.is_set()
        assert float(parameter.detach()[0]) == 1.0
        stage.sink.gate.set()
        stepper.join(30)
        assert float(parameter.detach()[0]) == 0.0
        job.staged.result(30)
        assert stage.sink.image("file") == raw(torch.ones(4 * SLAB))


def test_a_change_before_the_copy_loses_the_save_by_name_and_nothing_else():
    tensor = torch.ones(2 * SLAB)
    with Stage(num_slabs=4) as stage:
        stage.sink.gate.clear()
        first = stage.save(plan_of(torch.zeros(4 * SLAB)), "first")
        torn = stage.save(plan_of(torch.zeros(8), tensor), "torn")
        tensor.add_(1.0)
        stage.sink.gate.set()
        with pytest.raises(TornSnapshotError) as caught:
            torn.staged.result(30)
        assert caught.value.fqns == ("t1",)
        assert [path for path, _ in stage.lost] == ["torn"]
        assert first.staged.exception(30) is None
        stage.fence.close(30)
        assert stage.cache.num_free == 4


def test_the_last_slab_of_a_torn_file_never_leaves():
    tensor = torch.ones(3 * SLAB // 4)
    with Stage(num_slabs=4) as stage:
        stage.sink.gate.clear()
        stage.save(plan_of(torch.zeros(4 * SLAB)), "first")
        torn = stage.save(plan_of(tensor), "torn")
        tensor.add_(1.0)
        stage.sink.gate.set()
        assert isinstance(torn.staged.exception(30), TornSnapshotError)
        assert 2 not in stage.sink.images.get("torn", {})


def test_device_copies_are_fenced_on_the_stream_and_the_host_goes_on():
    device = FakeDevice()
    tensor = torch.randn(2 * SLAB)
    expected = raw(tensor)
    with Stage(device=device) as stage:
        job = stage.save(plan_of(tensor))
        stage.fence.close(30)  # returns although the device has run nothing yet
        assert device.done == 0
        assert not job.staged.done()
        assert stage.sink.images == {}
        assert device.held, "later work of the stream is ordered behind the copies"
        assert device.held[-1]._position == len(device.queue)
        device.run()
        job.staged.result(30)
        assert stage.sink.image("file") == expected


def test_a_full_cache_is_drained_as_the_device_gets_on():
    device = FakeDevice()
    tensor = torch.randn(10 * SLAB)
    with Stage(num_slabs=4, device=device) as stage:
        job = stage.save(plan_of(tensor))
        while not job.staged.done():
            device.run()
            job.issued.wait(0.001)
        assert stage.sink.image("file") == raw(tensor)
        assert stage.cache.num_free == 4


def test_a_change_on_the_device_after_the_fence_is_not_taken_for_a_tear():
    device = FakeDevice()
    tensor = torch.ones(2 * SLAB)
    with Stage(device=device) as stage:
        job = stage.save(plan_of(tensor))
        stage.fence.close(30)
        version = tensor._version
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version + 1,))
        device.run()
        assert job.staged.exception(30) is None


def test_a_change_on_the_device_without_a_fence_is_found():
    device = FakeDevice()
    tensor = torch.ones(2 * SLAB)
    with Stage(device=device) as stage:
        job = stage.save(plan_of(tensor))
        assert job.issued.wait(30)
        tensor.add_(1.0)
        device.run()
        assert isinstance(job.staged.exception(30), TornSnapshotError)
        assert stage.cache.num_free == 8


def test_save_waits_for_eager_tensors_that_could_not_be_captured():
    tensor = torch.ones(SLAB)
    with Stage(num_slabs=4) as stage:
        stage.sink.gate.clear()
        stage.save(plan_of(torch.zeros(4 * SLAB)), "first")
        job = stage.save(plan_of(tensor, torch.zeros(SLAB), eager_end=4 * SLAB), "eager")
        passed = threading.Event()
        waiter = threading.Thread(target=lambda: (job.wait_eager(stage.stager.copier), passed.set()))
        waiter.start()
        waiter.join(0.2)
        assert not passed.is_set()
        stage.sink.gate.set()
        waiter.join(30)
        assert passed.is_set()
        job.staged.result(30)


def test_a_failing_copy_loses_one_file_and_frees_its_slabs():
    class Broken(FakeDevice):
        def copy(self, piece: Piece, destination: torch.Tensor, after: FakeMark | None) -> None:
            if piece.segment.fqn == "t1":
                raise RuntimeError("device on fire")
            super().copy(piece, destination, after)

    device = Broken()
    with Stage(num_slabs=4, device=device) as stage:
        job = stage.save(plan_of(torch.ones(SLAB), torch.ones(8)))
        while not job.staged.done():
            device.run()
        with pytest.raises(RuntimeError, match="device on fire"):
            job.staged.result(30)
        after = stage.save(plan_of(torch.ones(8)), "after")
        while not after.staged.done():
            device.run()
        assert stage.sink.image("after") == raw(torch.ones(8))
        assert stage.cache.num_free == 4


def test_a_finished_job_holds_the_state_no_longer():
    with Stage() as stage:
        job = stage.save(plan_of(torch.ones(SLAB)))
        job.staged.result(30)
        assert job.plan.segments == ()


def test_events_tell_of_each_slab_and_the_whole_file():
    with Stage() as stage:
        stage.save(plan_of(torch.ones(SLAB))).staged.result(30)
        stage.fence.close(30)
        names = [record["event"] for record in stage.records]
        assert names == ["stage"] * 4 + ["staged", "fence"]
        assert [record["index"] for record in stage.records[:4]] == [0, 1, 2, 3]


def test_an_eager_tensor_beyond_the_budget_may_change_once_save_has_returned():
    eager, lazy = torch.ones(SLAB // 4), torch.zeros(8 * SLAB)
    with Stage(num_slabs=4) as stage:
        stage.sink.gate.clear()
        job = stage.save(plan_of(eager, lazy, eager_end=SLAB))
        job.wait_eager(stage.stager.copier)
        eager.fill_(2.0)  # bumps the version counter
        stage.sink.gate.set()
        job.staged.result(30)
        assert stage.sink.image("file") == raw(torch.ones(SLAB // 4)) + raw(lazy)


def test_a_torn_file_gives_no_slab_back_while_the_device_still_writes_to_it():
    device = FakeDevice()
    tensor = torch.ones(SLAB // 4)
    with Stage(num_slabs=4, device=device) as stage:
        plan = plan_of(tensor)
        tensor.add_(1.0)
        torn = stage.save(plan, "torn")
        assert device.is_asked.wait(30)
        assert stage.cache.num_free == 3, "the copy has not run yet: its slab is not free"
        device.run()
        assert isinstance(torn.staged.exception(30), TornSnapshotError)
        assert stage.cache.num_free == 4


def test_a_device_that_fails_later_loses_its_file_and_the_thread_goes_on():
    class Broken(FakeDevice):
        is_broken = True

        def mark(self) -> FakeMark:
            mark = super().mark()
            if self.is_broken:
                mark.query = self.fail
            return mark

        def fail(self) -> bool:
            raise RuntimeError("device lost")

    device = Broken()
    with Stage(num_slabs=4, device=device) as stage:
        lost = stage.save(plan_of(torch.ones(3 * SLAB // 4)), "lost")
        with pytest.raises(RuntimeError, match="device lost"):
            lost.staged.result(30)
        stage.fence.close(30)
        device.is_broken = False
        after = stage.save(plan_of(torch.ones(8)), "after")
        while not after.staged.done():
            device.run()
        assert stage.sink.image("after") == raw(torch.ones(8))
        assert stage.cache.num_free == 4


def test_a_file_that_is_lost_downstream_ends_with_that_reason():
    with Stage(num_slabs=4) as stage:
        stage.losses["file"] = OSError("disk gone")
        job = stage.save(plan_of(torch.ones(8 * SLAB)))
        with pytest.raises(OSError, match="disk gone"):
            job.staged.result(30)
        assert stage.cache.num_free == 4


def test_who_is_told_of_a_loss_may_fail_without_harm_to_the_thread():
    with Stage(num_slabs=4) as stage:
        stage.stager._on_lost = lambda job, error: (_ for _ in ()).throw(RuntimeError("callback"))
        stage.losses["first"] = OSError("disk gone")
        with pytest.raises(OSError, match="disk gone"):
            stage.save(plan_of(torch.ones(8)), "first").staged.result(30)
        stage.save(plan_of(torch.ones(8)), "second").staged.result(30)


def test_a_fence_that_nobody_closes_does_not_collect_finished_jobs():
    with Stage() as stage:
        for number in range(5):
            stage.save(plan_of(torch.ones(8)), str(number)).staged.result(30)
        assert len(stage.fence._jobs) == 1
