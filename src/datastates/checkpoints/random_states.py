"""The states of the random generators of this process, as plain data and tensors, and back."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)


def capture() -> dict[str, Any]:
    """The states of Python's generator, torch's on the CPU and on all accelerators in use, and numpy's if imported.

    No accelerator is woken up for it.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, _packed(words), gauss], "torch": torch.get_rng_state()}
    device = _device_in_use()
    if device is not None:
        states["accelerator"] = {"type": device, "states": _device_states(torch.get_device_module(device))}
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        states["numpy"] = [str(kind), _packed(keys.tolist()), int(position), int(has_gauss), float(gauss)]
    return states


def restore(states: dict[str, Any]) -> None:
    """Set the generators to what `capture` gave. What is not here any more is logged and left out.

    Numpy's is set if numpy is imported by now.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(states["torch"].cpu())
    if "accelerator" in states:
        _restore_devices(states["accelerator"]["type"], states["accelerator"]["states"])
    if "numpy" in states and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(keys.tolist(), dtype=numpy.uint32), *rest))


def _packed(words: Sequence[int]) -> torch.Tensor:
    """Unsigned 32-bit words as one tensor, rather than as hundreds of numbers that are each a leaf of the state."""
    return torch.tensor(words, dtype=torch.int64)


def _restore_devices(device: str, states: list[torch.Tensor]) -> None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != device:
        logger.warning("the random states of %s are not restored: this process has no such devices", device)
        return
    module = torch.get_device_module(device)
    num_devices = torch.accelerator.device_count()
    if len(states) != num_devices:
        what = f"those of {len(states)} {device} devices were saved, {num_devices} are here"
        logger.warning("random states are restored as far as they go: %s", what)
    for index, state in enumerate(states[:num_devices]):
        if hasattr(module, "set_rng_state_all"):
            module.set_rng_state(state.cpu(), index)
        else:  # mps, of which there is one
            module.set_rng_state(state.cpu())


def _device_in_use() -> str | None:
    """The kind of accelerator that this process has used, None where there is none."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    is_initialized = getattr(torch.get_device_module(device), "is_initialized", None)
    return device.type if is_initialized is None or is_initialized() else None


def _device_states(module: Any) -> list[torch.Tensor]:
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]
