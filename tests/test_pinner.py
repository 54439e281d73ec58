"""The host cache registered with a driver, and threads that stay outside of graph captures; the driver is a model."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import Future

import pytest
import torch

from datastates import cuda_runtime, pinner
from datastates.pinner import Pinner

SLAB = 4096


class Driver:
    """As ``torch.cuda.cudart()``: knows what is registered, refuses what is beyond its limit."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.registered: dict[int, int] = {}
        self.limit = limit
        self.flags: set[int] = set()

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.flags.add(flags)
        if sum(self.registered.values()) + nbytes > self.limit:
            return 2  # cudaErrorMemoryAllocation
        self.registered[pointer] = nbytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        return 0 if self.registered.pop(pointer, 0) else 1  # cudaErrorInvalidValue


@pytest.fixture
def driver(monkeypatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(pinner, "PIECE_BYTES", 2 * SLAB + 100)
    return made


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.zeros(7 * SLAB, dtype=torch.uint8)


def reserved() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def test_the_memory_is_registered_in_pieces_of_whole_slabs_and_given_back(driver, memory):
    made = Pinner(memory, SLAB, reserved())
    made.start(0)
    made.wait(30)
    assert list(driver.registered.values()) == [2 * SLAB, 2 * SLAB, 2 * SLAB, SLAB]
    assert list(driver.registered) == [memory.data_ptr() + begin * SLAB for begin in (0, 2, 4, 6)]
    assert driver.flags == {1}, "registered for all devices of the process"
    assert made.num_pinned_bytes == memory.nbytes
    made.start(0)
    made.close(30)
    assert driver.registered == {}


def test_a_memory_lock_limit_that_is_too_small_is_a_warning_with_advice(driver, memory, caplog):
    driver.limit = 5 * SLAB
    made = Pinner(memory, SLAB, reserved())
    made.start(0)
    made.wait(30)
    assert made.num_pinned_bytes == 4 * SLAB
    assert "ulimit -l" in caplog.text
    made.close(30)
    assert driver.registered == {}


def test_what_nobody_starts_registers_nothing(driver, memory):
    made = Pinner(memory, SLAB, reserved())
    made.wait(0)
    made.close(0)
    made.start(0)
    assert driver.registered == {}


def test_memory_that_is_not_there_is_not_registered(driver, memory):
    future: Future[None] = Future()
    made = Pinner(memory, SLAB, future)
    made.start(0)
    future.set_exception(OSError("no memory"))
    made.close(30)
    assert driver.registered == {}


def test_memory_that_a_copy_may_still_reach_stays_mapped(driver, memory, monkeypatch):
    monkeypatch.setattr(pinner, "_abandoned", [])
    made = Pinner(memory, SLAB, reserved())
    made.start(0)
    made.wait(30)
    made.abandon()
    assert len(driver.registered) == 4
    assert pinner._abandoned[0] is memory


def run_in_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(30)


def test_a_copying_thread_takes_itself_out_of_captures_once(monkeypatch):
    modes = []

    def exchange(reference) -> int:
        mode = ctypes.cast(reference, ctypes.POINTER(ctypes.c_int)).contents
        modes.append(mode.value)
        return 0

    monkeypatch.setattr(cuda_runtime, "_exchange_capture_mode", lambda: exchange)

    def copying() -> None:
        for device in ("cpu", "cuda:0", "cuda:1"):
            cuda_runtime.stay_outside_captures(torch.device(device))

    run_in_thread(copying)
    assert modes == [2]
    run_in_thread(copying)
    assert modes == [2, 2]


def test_a_runtime_that_cannot_be_asked_is_a_warning_with_advice(monkeypatch, caplog):
    def missing() -> None:
        raise OSError("libcudart.so.99: cannot open shared object file")

    monkeypatch.setattr(cuda_runtime, "_exchange_capture_mode", missing)
    run_in_thread(lambda: cuda_runtime.stay_outside_captures(torch.device("cuda:0")))
    assert "capture_error_mode='thread_local'" in caplog.text


def test_devices_with_streams_have_a_runtime():
    assert cuda_runtime.runtime_of(torch.device("cuda")) is torch.cuda
    assert cuda_runtime.runtime_of(torch.device("xpu")) is torch.xpu
    assert cuda_runtime.runtime_of(torch.device("mps")) is None
    assert not cuda_runtime.is_capturing(torch.device("cuda:0"))
