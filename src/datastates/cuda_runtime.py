"""What is asked of an accelerator's runtime beyond tensors: locked memory, and threads beside graph captures."""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import Any

import torch

from datastates.errors import GraphCaptureError

logger = logging.getLogger(__name__)

_REGISTER_PORTABLE = 1
"""Memory counts as locked on every device of the process, not only on the one that was current when it was registered.
Source: ``cudaHostRegisterPortable`` of the CUDA runtime API, ``hipHostRegisterPortable`` of HIP."""

_CAPTURE_MODE_RELAXED = 2
"""Source: ``cudaStreamCaptureModeRelaxed`` in ``driver_types.h``, ``hipStreamCaptureModeRelaxed`` of HIP."""

_threads_outside = threading.local()


def runtime_of(device: torch.device) -> Any:
    """torch's module of a device type, as ``torch.cuda``; None where there is none with streams and events."""
    try:
        module = torch.get_device_module(device.type)
    except (RuntimeError, AttributeError):
        return None
    names = ("Stream", "Event", "stream", "current_stream", "current_device", "set_device")
    return module if all(hasattr(module, name) for name in names) else None


def is_capturing(device: torch.device, runtime: Any = None) -> bool:
    """Whether the calling thread's current stream of the device records a graph instead of running what it is given."""
    runtime = runtime_of(device) if runtime is None else runtime
    ask = getattr(runtime, "is_current_stream_capturing", None)
    if ask is None or not runtime.is_initialized():
        return False
    with runtime.device(device):
        return bool(ask())


def check_not_capturing(device: torch.device, runtime: Any = None) -> None:
    """Raise GraphCaptureError where `is_capturing`."""
    if is_capturing(device, runtime):
        raise GraphCaptureError(
            f"the current stream of {device} is recording a graph: what a save copies there would become part of the "
            "graph; save, and wait() for saves, before the recording begins or after it has ended"
        )


def recorded(device: torch.device, stream: Any, runtime: Any) -> Any:
    """A new event that is passed when the stream has done what it has been given so far; who waits for it sleeps."""
    event = runtime.Event(blocking=True) if device.type == "cuda" else runtime.Event()
    event.record(stream)
    return event


def register(memory: torch.Tensor) -> str:
    """Lock host memory for copies of all CUDA (or ROCm) devices; empty where it is done, else the driver's answer.

    Blocks while the driver locks the pages: about a quarter of a second for a GiB. The GIL is released.
    """
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _REGISTER_PORTABLE)  # type: ignore[no-untyped-call]
    return "" if int(error) == 0 else str(error)


def unregister(memory: torch.Tensor) -> None:
    """Undo a successful `register` of the same memory; no copy may be using it."""
    error = torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
    if int(error) != 0:
        logger.warning("the driver could not unregister memory of the host cache: %s", error)


def stay_outside_captures(device: torch.device) -> None:
    """Keep the calling thread's waits and allocations from failing, or spoiling, a graph that another thread records.

    While a thread records a graph in the mode that ``torch.cuda.graph`` uses by default, waiting for an event is
    forbidden to every thread that has not said that it has nothing to do with it. Done once per thread. Without
    effect on devices other than CUDA and ROCm.

    Source: ``cudaThreadExchangeStreamCaptureMode`` and ``cudaStreamCaptureModeGlobal`` of the CUDA runtime API.
    """
    if device.type != "cuda" or getattr(_threads_outside, "is_done", False):
        return
    _threads_outside.is_done = True
    try:
        exchange = _exchange_capture_mode()
    except (OSError, AttributeError) as error:
        logger.warning(
            "%s: do not record a graph while a save is staged, or record it with capture_error_mode='thread_local'; "
            "this thread cannot be kept outside of it",
            error,
        )
        return
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    result = exchange(ctypes.byref(mode))
    if result != 0:
        logger.warning("the capture mode of the staging thread could not be changed: the runtime says %d", result)


def _exchange_capture_mode() -> Any:
    """The function of the runtime library that torch has loaded; dlopen finds it by its name."""
    if torch.version.hip is not None:
        return ctypes.CDLL("libamdhip64.so").hipThreadExchangeStreamCaptureMode
    major = str(torch.version.cuda).split(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}").cudaThreadExchangeStreamCaptureMode
