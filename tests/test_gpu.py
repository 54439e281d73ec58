"""The device path on a real accelerator; skipped where torch finds none. Nothing here measures time."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import datastates
from datastates.checkpoint_engine import CheckpointEngine
from datastates.errors import GraphCaptureError

pytestmark = pytest.mark.gpu

SETTINGS = {"host_cache_size": 2**-5, "slab_bytes": 1 << 20}  # 32 MiB
LARGE = {"host_cache_size": 2**-2, "slab_bytes": 1 << 20}  # 256 MiB
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
SLEEP_CYCLES = 3_000_000_000
"""Of a kernel that outlasts what the host does meanwhile: more than a second on any device."""


@pytest.fixture
def engine():
    made = CheckpointEngine({**SETTINGS, "fast_cache_init": False}, rank=0)
    yield made
    made.close()


@pytest.fixture
def large_engine():
    made = CheckpointEngine({**LARGE, "fast_cache_init": False}, rank=0)
    yield made
    made.close()


@pytest.fixture
def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


@pytest.fixture
def cuda(device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs CUDA or ROCm")
    return device


@pytest.fixture
def other_device(device) -> torch.device:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    return torch.device(device.type, (device.index + 1) % torch.accelerator.device_count())


def loaded(path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)


def is_filled(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor.view(torch.uint8) == value).all())


# --- never torn


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_file_has_the_state_of_the_save_although_kernels_are_in_flight(engine, tmp_path, device, dtype):
    weight = torch.zeros(24 << 20, device=device, dtype=torch.uint8)
    torch.accelerator.synchronize()
    for _ in range(100):
        weight.add_(1)  # still running when save() is called
    state = {"w": weight.view(dtype), "strided": weight.view(dtype).view(2, -1).t(), "small": weight[:16].clone()}
    engine.save(state, str(tmp_path / "state.pt"))
    engine.fence.close()
    weight.fill_(7)
    engine.wait(persist=True)
    found = loaded(tmp_path / "state.pt")
    assert all(is_filled(found[name].contiguous(), 100) for name in state)


def test_lazy_conjugation_and_negation_arrive_resolved(engine, tmp_path, device):
    numbers = torch.randn(300, 500, dtype=torch.complex64).to(device)
    state = {"conj": numbers.conj(), "neg": numbers.conj().imag, "small": numbers[:2, :3].conj()}
    expected = {name: tensor.resolve_conj().resolve_neg().cpu() for name, tensor in state.items()}
    engine.save(state, str(tmp_path / "state.pt"))
    engine.wait(persist=True)
    found = loaded(tmp_path / "state.pt")
    assert all(torch.equal(found[name].resolve_conj().resolve_neg(), expected[name]) for name in state)


def test_small_tensors_may_change_as_soon_as_save_has_returned(engine, tmp_path, device):
    small = [torch.full((1 + number % 90, 3), float(number), device=device) for number in range(2000)]
    turned = torch.arange(6000.0, device=device).view(60, 100).t()
    expected = [tensor.cpu().clone() for tensor in small]
    work = torch.ones(4096, 4096, device=device)
    for _ in range(50):
        work = work @ work / 4096  # keeps the stream busy: nothing has been packed when save() returns
    engine.save({"small": small, "turned": turned, "step": torch.tensor(3, device=device)}, str(tmp_path / "state.pt"))
    torch._foreach_zero_(small)
    turned.zero_()
    engine.wait(persist=True)
    found = loaded(tmp_path / "state.pt")
    assert all(torch.equal(one, other) for one, other in zip(found["small"], expected, strict=True))
    assert torch.equal(found["turned"], torch.arange(6000.0).view(60, 100).t())
    assert int(found["step"]) == 3


def test_training_goes_on_at_once(engine, tmp_path, device, assert_same_state):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(3))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    saved = []
    for number in range(4):
        model(torch.randn(8, 1500, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved.append(copy.deepcopy(state))
        engine.save(state, str(tmp_path / f"{number}.pt"))
    engine.wait(persist=True)
    for number, expected in enumerate(saved):
        assert_same_state(torch.load(tmp_path / f"{number}.pt", weights_only=True), expected)


# --- streams and memory


def test_a_save_on_a_side_stream_waits_for_that_stream(engine, tmp_path, device):
    weight = torch.zeros(24 << 20, device=device, dtype=torch.uint8)
    torch.accelerator.synchronize()
    module = torch.get_device_module(device)
    side = module.Stream()
    with module.stream(side):
        for _ in range(100):
            weight.add_(1)
        engine.save({"w": weight}, str(tmp_path / "state.pt"))
    engine.fence.close()  # the main stream waits for the copies, and so for what the side stream had to do
    weight.fill_(7)
    engine.wait(persist=True)
    assert is_filled(loaded(tmp_path / "state.pt")["w"], 100)


def test_memory_that_is_freed_right_after_the_save_is_not_reused_too_early(engine, tmp_path, device):
    tensors = {f"w{number}": torch.full((4 << 20,), 3, device=device, dtype=torch.uint8) for number in range(4)}
    tensors["strided"] = torch.full((2048, 2048), 3, device=device, dtype=torch.uint8).t()
    tensors["small"] = torch.full((64,), 3, device=device, dtype=torch.uint8)
    engine.save(tensors, str(tmp_path / "state.pt"))
    sizes = [tensor.numel() for tensor in tensors.values()]
    del tensors
    noise = [torch.full((size,), 9, device=device, dtype=torch.uint8) for size in sizes * 3]
    torch.accelerator.empty_cache()
    engine.wait(persist=True)
    assert all(is_filled(tensor.contiguous(), 3) for tensor in loaded(tmp_path / "state.pt").values())
    assert len(noise) == 3 * len(sizes)


def test_the_host_does_not_wait_for_the_device(large_engine, tmp_path, cuda):
    state = {"w": torch.ones(8 << 20, device=cuda), "small": [torch.ones(8, device=cuda) for _ in range(100)]}
    large_engine.save(state, str(tmp_path / "first.pt"))  # what is done once is done: streams, kernels, pinned memory
    large_engine.wait(persist=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    asleep = torch.cuda.Event()
    asleep.record()
    large_engine.save(state, str(tmp_path / "state.pt"))
    large_engine.fence.close()
    is_host_ahead = not asleep.query()
    state["w"].zero_()
    large_engine.wait(persist=True)
    assert is_host_ahead
    assert bool((loaded(tmp_path / "state.pt")["w"] == 1).all())


def test_a_state_larger_than_the_cache_is_held_by_the_fence(engine, tmp_path, device):
    weight = torch.zeros(200 << 20, device=device, dtype=torch.uint8)
    for number in range(3):
        weight.fill_(number)
        engine.save({"w": weight}, str(tmp_path / f"{number}.pt"))
        engine.fence.close()
    weight.fill_(9)
    engine.wait(persist=True)
    assert all(is_filled(loaded(tmp_path / f"{number}.pt")["w"], number) for number in range(3))


def test_the_host_cache_is_pinned_where_cuda_is_in_use(engine, cuda):
    machinery = engine.saver._machinery
    assert machinery._pinner is not None
    assert machinery._pinner.num_pinned_bytes == machinery.cache.nbytes


def test_short_of_device_memory_the_save_goes_on(engine, tmp_path, cuda):
    small = [torch.full((15_000,), float(number), device=cuda) for number in range(100)]
    turned = torch.arange(4_000_000.0, device=cuda).view(2000, 2000).t()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(cuda) + (3 << 20)) / total, cuda)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(6_000_000, device=cuda, dtype=torch.uint8)
        engine.save({"small": small, "turned": turned}, str(tmp_path / "state.pt"))
        engine.wait(persist=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    found = loaded(tmp_path / "state.pt")
    assert [float(tensor[-1]) for tensor in found["small"]] == list(range(100))
    assert torch.equal(found["turned"], turned.cpu())


# --- graphs


def test_a_save_within_a_graph_is_refused_and_the_graph_is_whole(engine, tmp_path, cuda):
    weight = torch.ones(1 << 20, device=cuda)
    small = torch.ones(4, device=cuda)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        weight.add_(1)
        for state in ({"w": weight}, {"small": small}):
            with pytest.raises(GraphCaptureError):
                engine.save(state, str(tmp_path / "refused.pt"))
    graph.replay()
    engine.save({"w": weight}, str(tmp_path / "state.pt"))
    engine.wait(persist=False)
    graph.replay()
    with pytest.raises(GraphCaptureError):
        engine.wait(persist=True)  # tells of the save that was refused
    engine.wait(persist=True)
    assert bool((loaded(tmp_path / "state.pt")["w"] == 2).all())


def test_a_graph_may_be_recorded_while_a_save_is_staged(engine, tmp_path, cuda):
    weight = torch.full((256 << 20,), 5, device=cuda, dtype=torch.uint8)  # eight times the cache
    other = torch.zeros(1 << 20, device=cuda)
    engine.save({"w": weight, "turned": weight.view(-1, 2).t()}, str(tmp_path / "state.pt"))
    graphs = []
    for _ in range(20):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            other.add_(1)
    engine.wait(persist=True)
    for graph in graphs:
        graph.replay()
    assert float(other[0]) == 20.0
    assert is_filled(loaded(tmp_path / "state.pt")["w"], 5)


# --- several devices


def test_tensors_of_several_devices_in_one_file(engine, tmp_path, device, other_device):
    tensors = {}
    for number, where in enumerate((device, other_device)):
        weight = torch.zeros(24 << 20, device=where, dtype=torch.uint8)
        for _ in range(50 + number):
            weight.add_(1)
        tensors[f"w{number}"], tensors[f"small{number}"] = weight, weight[:8].clone()
    engine.save(tensors, str(tmp_path / "state.pt"))
    engine.fence.close()
    for weight in tensors.values():
        weight.fill_(7)
    engine.wait(persist=True)
    found = loaded(tmp_path / "state.pt")
    assert all(is_filled(found[f"{name}{number}"], 50 + number) for name in ("w", "small") for number in (0, 1))


def test_a_device_that_is_not_the_current_one(engine, tmp_path, other_device):
    tensor = torch.full((8 << 20,), 3, device=other_device, dtype=torch.uint8)
    engine.save({"w": tensor}, str(tmp_path / "state.pt"))
    engine.wait(persist=True)
    assert torch.accelerator.current_device_index() != other_device.index
    assert is_filled(loaded(tmp_path / "state.pt")["w"], 3)


# --- back again


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_load_brings_the_state_to_the_device(engine, tmp_path, device, suffix):
    state = {"w": torch.randn(1000, 1000).to(device), "half": torch.randn(70_000).to(device, torch.bfloat16)}
    engine.save(state, str(tmp_path / f"state.{suffix}"))
    engine.wait(persist=True)
    found = datastates.load(str(tmp_path / f"state.{suffix}"), map_location=device)
    assert {name: tensor.device for name, tensor in found.items()} == {"w": device, "half": device}
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert math.isfinite(float(found["w"].sum()))
