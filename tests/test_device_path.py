"""The device path against a model of a device: whatever the order of its queues, the state of the save lands."""

from __future__ import annotations

import copy
import functools
import gc
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import datastates
from datastates import formats
from datastates.bundles import Bundle
from datastates.checkpoint_engine import CheckpointEngine
from datastates.copier import DeviceCopier
from datastates.errors import GraphCaptureError
from datastates.plan import FilePlan, Segment
from datastates.staging_job import StagingJob
from fake_device import Engine, Runtime
from test_stager import SLAB, Stage

CPU = torch.device("cpu")
NUM_SLABS = 4


@dataclass(frozen=True)
class Kind:
    """A tensor of the state: ``rows`` of ``columns`` elements of two bytes."""

    rows: int
    columns: int
    is_strided: bool
    is_eager: bool
    is_dropped: bool  # right after the save

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * 2


kinds = st.builds(Kind, st.integers(1, 60), st.integers(1, 90), st.booleans(), st.booleans(), st.booleans())


class Training:
    """Tensors on the model, changed by work on its main stream; saves them between two changes."""

    def __init__(self, runtime: Runtime, stage: Stage, kinds: list[Kind], seed: int) -> None:
        self._runtime, self._stage, self._kinds = runtime, stage, kinds
        self._random = random.Random(seed)
        self._memory: list[torch.Tensor | None] = [None] * len(kinds)
        self._data: list[bytes] = [b""] * len(kinds)
        self.expected: dict[str, bytes] = {}
        self.jobs: list[StagingJob[str]] = []

    def change(self, *, eager_only: bool = False) -> None:
        """An optimizer's step, or what a forward pass changes; enqueued, not done."""
        for number, kind in enumerate(self._kinds):
            if eager_only and not kind.is_eager:
                continue
            memory = self._memory[number]
            if memory is None:
                memory = self._memory[number] = self._runtime.empty(kind.nbytes)
            self._data[number] = self._random.randbytes(kind.nbytes)
            self._runtime.write(memory, self._data[number])

    def save(self) -> StagingJob[str]:
        bundle = Bundle(CPU, self._runtime)
        segments, end, expected = [], 0, b""
        for number, kind in enumerate(self._kinds):
            tensor = self._tensor(number)
            source = bundle.add(tensor) if kind.is_eager else tensor
            segments.append(Segment(end, kind.nbytes, source, f"t{number}", -1 if kind.is_eager else 0))
            expected += self._elements(number)
            end += kind.nbytes
        if bundle.nbytes:
            with self._runtime.stream(self._runtime.main):
                bundle.pack()
        name = f"file {len(self.jobs)}"
        self.expected[name] = expected
        job = self._stage.save(FilePlan("torch", end, tuple(segments)), name)
        self.jobs.append(job)
        return job

    def drop(self) -> None:
        """Let go of tensors while their copies are on their way."""
        for number, kind in enumerate(self._kinds):
            if kind.is_dropped:
                self._memory[number] = None

    def _tensor(self, number: int) -> torch.Tensor:
        kind, memory = self._kinds[number], self._memory[number]
        matrix = memory.view(torch.int16).view(kind.rows, kind.columns)
        return matrix.t() if kind.is_strided else matrix

    def _elements(self, number: int) -> bytes:
        kind = self._kinds[number]
        if not kind.is_strided:
            return self._data[number]
        matrix = torch.frombuffer(bytearray(self._data[number]), dtype=torch.int16).view(kind.rows, kind.columns)
        return matrix.t().contiguous().numpy().tobytes()


def train(runtime: Runtime, stage: Stage, kinds: list[Kind], num_saves: int, seed: int) -> Training:
    """Saves with changes after them that only the fence orders behind the copies."""
    training = Training(runtime, stage, kinds, seed)
    training.change()
    for _ in range(num_saves):
        training.save()
        training.change(eager_only=True)
        training.drop()
        stage.fence.close(60)
        training.change()
    return training


def staging(runtime: Runtime) -> Stage:
    return Stage(NUM_SLABS, DeviceCopier(CPU, runtime))


@given(st.lists(kinds, min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 2**16), st.sampled_from("mcr"))
@settings(deadline=None, max_examples=40)
def test_in_any_order_of_the_queues_the_state_of_the_save_lands(kinds, num_saves, seed, order):
    runtime = Runtime()
    with staging(runtime) as stage:
        favourite = {"m": runtime.main, "c": runtime.streams[1], "r": None}[order]
        with Engine(runtime, seed, favourite):
            training = train(runtime, stage, kinds, num_saves, seed)
            for job in training.jobs:
                job.staged.result(60)
        assert {name: stage.sink.image(name) for name in training.expected} == training.expected
        assert stage.cache.num_free == NUM_SLABS


@given(st.lists(kinds, min_size=1, max_size=3), st.integers(0, 2**16), st.sampled_from("mcr"))
@settings(deadline=None, max_examples=40)
def test_the_host_passes_the_fence_before_the_device_has_done_anything(kinds, seed, order):
    if sum(kind.nbytes for kind in kinds) > (NUM_SLABS - 1) * SLAB:
        kinds = kinds[:1]
    runtime = Runtime()
    with staging(runtime) as stage:
        training = train(runtime, stage, kinds, 1, seed)
        assert runtime.main.num_done == 0, "the fence has not waited for the device"
        favourite = {"m": runtime.main, "c": runtime.streams[1], "r": None}[order]
        with Engine(runtime, seed, favourite):
            training.jobs[0].staged.result(60)
        assert stage.sink.image("file 0") == training.expected["file 0"]


def test_a_state_larger_than_the_cache_holds_the_host_back():
    runtime = Runtime()
    kinds = [Kind(64, 96, False, False, False)] * 3
    with staging(runtime) as stage:
        training = Training(runtime, stage, kinds, 0)
        training.change()
        job = training.save()
        with pytest.raises(TimeoutError):
            stage.fence.close(0.05)
        with Engine(runtime, 0):
            stage.fence.close(60)
            training.change()
            job.staged.result(60)
        assert stage.sink.image("file 0") == training.expected["file 0"]


def test_without_the_fence_the_model_tears_the_state():
    """The model can fail: this is what the fence is for."""
    runtime = Runtime()
    with staging(runtime) as stage:
        training = Training(runtime, stage, [Kind(20, 20, False, False, False)], 0)
        training.change()
        job = training.save()
        assert job.issued.wait(60)
        training.change()
        with Engine(runtime, 0, runtime.main):
            job.staged.result(60)
        assert stage.sink.image("file 0") != training.expected["file 0"]


def test_memory_that_is_let_go_of_before_its_copy_is_written_to():
    """The model can fail: a stream that reads what nobody keeps reads what comes next."""
    runtime = Runtime()
    tensor, other = runtime.empty(64), runtime.Stream()
    runtime.write(tensor, bytes(64))
    target = torch.zeros(64, dtype=torch.uint8)
    event = runtime.Event()
    event.record(runtime.main)
    other.wait_event(event)
    with runtime.stream(other):
        target.copy_(tensor)
    del tensor
    while runtime.step(lambda runnable: runtime.main if runtime.main in runnable else runnable[0]):
        pass
    assert set(target.tolist()) == {0xEE}


def test_a_lost_file_keeps_its_sources_until_no_copy_reads_them():
    runtime = Runtime()
    losses = iter([None, OSError("disk gone")])  # asked before each slab: the first one's copies are issued
    with staging(runtime) as stage:
        stage.stager._loss_of = lambda file: next(losses)
        copies = runtime.streams[1]
        freed_early: list[bool] = []
        runtime._freed = lambda address, nbytes, stream: freed_early.append(copies.num_done < len(copies.queue))
        training = Training(runtime, stage, [Kind(64, 96, False, False, True)], 0)
        training.change()
        job = training.save()
        training.drop()
        while not runtime.num_host_waits and not job.staged.done():
            job.issued.wait(0.001)
        with Engine(runtime, 0), pytest.raises(OSError, match="disk gone"):
            job.staged.result(60)
    del job, training, stage  # the staging thread has ended, too: nobody holds the sources any more
    gc.collect()
    assert freed_early == [False]


@pytest.mark.parametrize("shortage", [1, 3])
def test_short_of_device_memory_small_tensors_come_to_the_host_at_once(shortage, caplog, monkeypatch):
    monkeypatch.setattr("datastates.copier.MIN_DEVICE_BLOCK_BYTES", 64)
    runtime = Runtime()
    tensor = runtime.empty(40 * 50 * 2)
    data = random.Random(0).randbytes(4000)
    tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    matrix = tensor.view(torch.int16).view(40, 50)
    bundle = Bundle(CPU, runtime)
    parts = [bundle.add(matrix), bundle.add(matrix.t())]
    runtime.short_of_memory = shortage
    with _AtOnce(runtime):
        bundle.pack()
    found = [bytearray(part.nbytes) for part in parts]
    for part, memory in zip(parts, found, strict=True):
        part.read_into(0, memoryview(memory))
    assert bytes(found[0]) == data
    assert bytes(found[1]) == matrix.t().contiguous().numpy().tobytes()
    assert "come to the host while the training waits" in caplog.text


def test_a_save_or_a_fence_within_a_graph_is_refused():
    runtime = Runtime()
    with staging(runtime) as stage:
        training = Training(runtime, stage, [Kind(4, 4, False, False, False)], 0)
        training.change()
        runtime.capturing = runtime.main
        with pytest.raises(GraphCaptureError, match="recording a graph"):
            Bundle(CPU, runtime)
        with pytest.raises(GraphCaptureError):
            training.save()
        stage.fence._jobs.clear()  # the saver ends such a job
        runtime.capturing = None
        job = training.save()
        assert job.issued.wait(60)
        runtime.capturing = runtime.main
        with pytest.raises(GraphCaptureError):
            stage.fence.close(60)
        assert stage.fence.is_open
        runtime.capturing = None
        stage.fence.close(60)
        with Engine(runtime, 0):
            job.staged.result(60)


def test_a_step_that_is_recorded_leaves_the_fence_open(monkeypatch, caplog):
    runtime = Runtime()
    monkeypatch.setattr("datastates.fence.is_capturing", lambda device: runtime.is_current_stream_capturing())
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    parameter.grad = torch.ones(3)
    with staging(runtime) as stage:
        training = Training(runtime, stage, [Kind(4, 4, False, False, False)], 0)
        training.change()
        job = training.save()
        runtime.capturing = runtime.main
        optimizer.step()
        optimizer.step()
        assert stage.fence.is_open
        assert caplog.text.count("its replays run no hooks") == 1
        runtime.capturing = None
        optimizer.step()
        assert not stage.fence.is_open
        with Engine(runtime, 0):
            job.staged.result(60)


def test_a_copy_stream_that_somebody_records_on_loses_the_file_and_spoils_no_graph():
    runtime = Runtime()
    with staging(runtime) as stage:
        training = Training(runtime, stage, [Kind(4, 4, False, False, False)], 0)
        training.change()
        runtime.capturing = runtime.streams[1]
        job = training.save()
        with Engine(runtime, 0), pytest.raises(GraphCaptureError):
            job.staged.result(60)


@pytest.mark.parametrize("is_verified", [False, True])
def test_bundled_tensors_of_an_ordinary_state_are_planned_from_its_structure(tmp_path, monkeypatch, is_verified):
    monkeypatch.setattr("datastates.captures._is_on_host", lambda tensor: False)
    monkeypatch.setattr("datastates.formats.torch_structure._is_on_host", lambda device: False)
    monkeypatch.setitem(formats._PLANNERS, "torch", lambda *_: pytest.fail("the reference planner was asked"))
    settings = {"host_cache_size": 2**-6, "slab_bytes": 1 << 20, "verify_staging": is_verified}
    engine = CheckpointEngine(settings, rank=0)
    try:
        for step in range(2):
            state = {str(n): torch.full((n % 7 + 1,), float(n + step)) for n in range(300)}
            state |= {"step": torch.tensor(step), "large": torch.full((1 << 16,), float(step))}
            expected = copy.deepcopy(state)
            engine.save(state, str(tmp_path / "state.pt"))
            torch._foreach_zero_([tensor for name, tensor in state.items() if name != "large"])
            engine.wait(persist=True)
            found = torch.load(tmp_path / "state.pt")
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    finally:
        engine.close()
    assert engine.saver._budget._taken_bytes == 0


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("is_verified", [False, True])
def test_bundled_tensors_land_in_files_of_both_formats(tmp_path, monkeypatch, suffix, is_verified, assert_same_state):
    monkeypatch.setattr("datastates.captures._is_on_host", lambda tensor: False)
    monkeypatch.setattr("datastates.formats.torch_planner.TorchPlanner.plan", lambda *arguments: None)
    base = torch.randn(40, 50)
    state = {
        "turned": base.t(),
        "part": base[3:5],
        "step": torch.tensor(3.0),
        "half": torch.randn(7, 9).to(torch.bfloat16),
        "eight": torch.randn(11).to(torch.float8_e4m3fn),
        "lazily": torch.randn(6, 7, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "many": [torch.full((5,), float(number)) for number in range(300)],
        "large": torch.randn(300, 400),
    }
    expected = copy.deepcopy(state)
    settings = {"host_cache_size": 2**-6, "slab_bytes": 1 << 20, "verify_staging": is_verified}
    engine = CheckpointEngine(settings, rank=0)
    try:
        engine.save(state, str(tmp_path / f"state.{suffix}"))
        for tensor in (base, state["step"], state["half"], *state["many"]):
            tensor.zero_()
        engine.wait(persist=True)
    finally:
        engine.close()
    assert engine.saver._budget._taken_bytes == 0
    found = datastates.load(str(tmp_path / f"state.{suffix}"))
    assert_same_state(found, expected)


class _AtOnce:
    """Makes ``torch.empty`` and gathering run out of the model's memory, everything being done at once."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __enter__(self) -> None:
        self._empty, self._contiguous = torch.empty, torch.Tensor.contiguous
        torch.empty = functools.partial(self._limited, self._empty)
        torch.Tensor.contiguous = lambda tensor: self._limited(self._contiguous, tensor)

    def __exit__(self, *_: object) -> None:
        torch.empty, torch.Tensor.contiguous = self._empty, self._contiguous

    def _limited(self, function, *arguments, device=None, **options):
        is_on_device = device is not None or function is self._contiguous
        if is_on_device and self._runtime.short_of_memory > 0:
            self._runtime.short_of_memory -= 1
            raise torch.OutOfMemoryError("the model is out of memory")
        return function(*arguments, **options)
