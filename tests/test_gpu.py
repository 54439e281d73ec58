"""The device path on a real accelerator; skipped where torch finds none."""

from __future__ import annotations

import copy

import pytest
import torch

from datastates.checkpoint_engine import CheckpointEngine

pytestmark = pytest.mark.gpu

SETTINGS = {"host_cache_size": 2**-5, "slab_bytes": 1 << 20}  # 32 MiB


@pytest.fixture
def engine():
    made = CheckpointEngine(SETTINGS, rank=0)
    yield made
    made.close()


@pytest.fixture
def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_file_has_the_state_of_the_save_although_kernels_are_in_flight(engine, tmp_path, device, dtype):
    weight = torch.zeros(24 << 20, device=device, dtype=torch.uint8)
    torch.accelerator.synchronize()
    for _ in range(100):
        weight.add_(1)  # still running when save() is called
    state = {"w": weight.view(dtype), "strided": weight.view(2, -1).t(), "small": weight[:10].clone()}
    engine.save(state, str(tmp_path / "state.pt"))
    engine.fence.close()
    weight.fill_(7)
    engine.wait(persist=True)
    found = torch.load(tmp_path / "state.pt", map_location="cpu")
    assert all(bool((found[name].view(torch.uint8) == 100).all()) for name in ("w", "strided", "small"))


def test_training_goes_on_at_once(engine, tmp_path, device, assert_same_state):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(3))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
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


def test_memory_that_is_freed_right_after_the_save_is_not_reused_too_early(engine, tmp_path, device):
    tensor = torch.full((16 << 20,), 3, device=device, dtype=torch.uint8)
    engine.save({"w": tensor}, str(tmp_path / "state.pt"))
    del tensor
    noise = [torch.full((16 << 20,), 9, device=device, dtype=torch.uint8) for _ in range(4)]
    engine.wait(persist=True)
    assert bool((torch.load(tmp_path / "state.pt", map_location="cpu")["w"] == 3).all())
    assert len(noise) == 4


def test_the_host_cache_is_pinned_where_cuda_is_in_use(device):
    if device.type != "cuda":
        pytest.skip("only CUDA and ROCm register memory")
    engine = CheckpointEngine({**SETTINGS, "fast_cache_init": False}, rank=0)
    try:
        assert engine.saver._pinner is not None
        assert engine.saver._pinner._is_pinned
    finally:
        engine.close()
