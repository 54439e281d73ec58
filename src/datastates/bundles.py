"""The eager tensors of one save on one device: packed there by few launches, carried to the host as one.

A clone of each would cost the training a launch per tensor, and the stager a copy per tensor.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from datastates.copier import Copier, Mark, device_blocks, flat_bytes, ready_mark
from datastates.copying import is_flat, memory_at
from datastates.cuda_runtime import check_not_capturing
from datastates.plan import Piece, Segment

logger = logging.getLogger(__name__)


class Bundle:
    """Takes tensors on the thread of ``save()``, then gives their bytes to the stager's.

    Tensors are added; `pack` copies them, in the order of the current stream, to one piece of device memory; `bring`
    has that copied to the host. The device memory is as large as the tensors, and stays until the bundle goes.
    Source: ``torch.cat`` copies many tensors in one launch (``CAT_ARRAY_BATCH_SIZE`` in ATen/native/cuda/Shape.cu).
    """

    def __init__(self, device: torch.device, runtime: Any = None) -> None:
        """Args:
            device: of all tensors.
            runtime: what offers streams and events; None: torch's module of the device type.

        Raises:
            GraphCaptureError: the device's current stream is recording a graph, which would record the copies.
        """
        check_not_capturing(device, runtime)
        self.device = device
        self._runtime = runtime
        self.nbytes = 0
        self._tensors: list[torch.Tensor] = []
        self._packed: torch.Tensor | None = None
        self._host: torch.Tensor | None = None
        self._is_packed: Mark | None = None

    def add(self, tensor: torch.Tensor) -> BundledTensor:
        """Take a tensor of the device that is not empty in; it must not change before `pack`."""
        part = BundledTensor(self, self.nbytes, tensor.numel() * tensor.element_size())
        self._tensors.append(tensor.detach())
        self.nbytes += part.nbytes
        return part

    def pack(self) -> None:
        """Copy the tensors; from then on they may change, as far as the device's current stream changes them.

        Does not wait for the device, but where its memory is short: then the bytes come to the host at once.
        """
        with torch.no_grad():
            try:
                packed = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
                torch.cat([_bytes_of(tensor) for tensor in self._tensors], out=packed)
                self._packed, self._is_packed = packed, ready_mark(self.device, self._runtime)
            except torch.OutOfMemoryError:
                logger.warning(
                    "%s has no %.1f MiB left to copy small tensors: they come to the host while the training waits",
                    self.device,
                    self.nbytes / 2**20,
                )
                self._host = self._copied_at_once()
        self._tensors.clear()

    def bring(self, copier: Copier) -> None:
        """Have the bytes copied to the host; the copier's next mark says when they are there.

        Once is enough: does nothing when it is called again. On the copier's thread.
        """
        if self._host is not None:
            return
        host = copier.landing(self.nbytes)
        whole = Piece(Segment(0, self.nbytes, self._on_device(), "small tensors"), 0, 0, self.nbytes)
        copier.copy(whole, host, self._is_packed)
        self._host = host

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``offset`` on.

        They must have arrived if `bring` was called; else this blocks for the device's current stream.
        """
        if self._host is None:
            self._host = self._on_device().cpu()
        memory[:] = memory_at(self._host.data_ptr() + offset, len(memory))

    def _on_device(self) -> torch.Tensor:
        if self._packed is None:
            raise RuntimeError(
                f"the small tensors of {self.device} were not packed: a save must end with Captures.pack()"
            )
        return self._packed

    def _copied_at_once(self) -> torch.Tensor:
        host = torch.empty(self.nbytes, dtype=torch.uint8)
        end = 0
        for tensor in self._tensors:
            for block in device_blocks(tensor, 0, tensor.numel() * tensor.element_size()):
                host[end : end + block.numel()].copy_(block)
                end += block.numel()
        return host


class BundledTensor:
    """The row-major elements of one tensor within a `Bundle`: bytes that may still be on the device."""

    __slots__ = ("_begin", "bundle", "nbytes")

    def __init__(self, bundle: Bundle, begin: int, nbytes: int) -> None:
        self.bundle = bundle
        self.nbytes = nbytes
        self._begin = begin

    @property
    def device(self) -> torch.device:
        return self.bundle.device

    def read_into(self, offset: int, memory: memoryview) -> None:
        """See `Bundle.read_into`; ``offset`` counts from the tensor's first byte."""
        self.bundle.read_into(self._begin + offset, memory)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return flat_bytes(tensor if is_flat(tensor) else tensor.resolve_conj().resolve_neg().contiguous())
