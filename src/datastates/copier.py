"""Copies of tensor bytes into slabs of the host cache, one copier for each device.

A host tensor is copied by the calling thread; the copy is done when the call returns. An accelerator's tensor is
copied on a stream of its own, behind an event of the stream that computed it; the call returns at once, and a
`Mark` says when the bytes have arrived. Nothing here runs on a device's default stream or starts an OpenMP team.

The device path uses ``torch.accelerator`` and has been exercised on a fake device only where no accelerator
was at hand; ``docs/design.md`` says which devices have run it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

import torch

from datastates.copying import copy_range, is_flat, row_blocks
from datastates.errors import TornSnapshotError
from datastates.plan import Piece
from datastates.state import has_its_bytes

logger = logging.getLogger(__name__)

DEVICE_BLOCK_BYTES = 4 << 20
"""Largest block of a non-contiguous device tensor that is gathered at once: bounds the device memory it takes."""


class Mark(Protocol):
    """A point in a device's queue of work. `torch.Event` is one."""

    def query(self) -> bool:
        """Whether the device has passed the point; does not block."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has passed the point."""


class Copier(Protocol):
    """Moves pieces of tensors of one device to host memory."""

    def ready(self) -> Mark | None:
        """Mark what the current stream has been given so far; called in ``save()`` on the caller's thread."""

    def copy(self, piece: Piece, destination: torch.Tensor, after: Mark | None) -> None:
        """Copy a piece into ``destination`` (uint8, host), not before the mark ``after`` is passed."""

    def mark(self) -> Mark | None:
        """Mark all copies issued so far; None where they are done already."""

    def hold_current_stream(self, mark: Mark) -> None:
        """Let later work of the caller's current stream wait for ``mark``; does not block the host."""


class HostCopier:
    """The copier of host tensors: a plain memory copy that releases the GIL."""

    def ready(self) -> Mark | None:
        return None

    def copy(self, piece: Piece, destination: torch.Tensor, after: Mark | None) -> None:  # noqa: ARG002 - the protocol's
        source = piece.segment.source
        assert isinstance(source, torch.Tensor)  # noqa: S101 - the stager copies literals itself
        check_storage(source, piece.segment.fqn)
        copy_range(source, piece.segment_begin, destination, piece.nbytes)

    def mark(self) -> Mark | None:
        return None

    def hold_current_stream(self, mark: Mark) -> None:  # noqa: ARG002 - the protocol's
        raise TypeError("host copies are done when they return: there is nothing to wait for")


class DeviceCopier:
    """The copier of one accelerator device. Used by one thread, but for `ready` and `hold_current_stream`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)

    def ready(self) -> Mark | None:
        event = torch.Event(device=self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def copy(self, piece: Piece, destination: torch.Tensor, after: Mark | None) -> None:
        source = piece.segment.source
        assert isinstance(source, torch.Tensor)  # noqa: S101 - the stager copies literals itself
        check_storage(source, piece.segment.fqn)
        if isinstance(after, torch.Event):
            self._stream.wait_event(after)
        with torch.no_grad(), self._stream:
            for block in device_blocks(source, piece.segment_begin, piece.nbytes):
                destination[: block.numel()].copy_(block, non_blocking=True)
                destination = destination[block.numel() :]

    def mark(self) -> Mark | None:
        event = torch.Event(device=self._device)
        event.record(self._stream)
        return event

    def hold_current_stream(self, mark: Mark) -> None:
        if isinstance(mark, torch.Event):
            torch.accelerator.current_stream(self._device).wait_event(mark)


def check_storage(source: torch.Tensor, fqn: str) -> None:
    """Raise TornSnapshotError if a tensor's memory was freed since ``save()``, as ``storage.resize_(0)`` does.

    It can be freed right after this look, too: the fence forbids that, this only catches who does not know.
    """
    if not has_its_bytes(source):
        raise TornSnapshotError(
            f"{fqn}: its storage was freed or shrunk between save() and its copy; call wait() before that", (fqn,)
        )


def device_blocks(source: torch.Tensor, begin: int, nbytes: int) -> Iterator[torch.Tensor]:
    """Bytes ``[begin, begin + nbytes)`` of the row-major elements of a device tensor, as flat uint8 tensors in order.

    Flat parts are views. Others are gathered on the device, at most `DEVICE_BLOCK_BYTES` at a time. The range must
    hold whole elements.
    """
    item = source.element_size()
    for block in row_blocks(source, begin // item, (begin + nbytes) // item, max(DEVICE_BLOCK_BYTES // item, 1)):
        yield _flat_bytes(block if is_flat(block) else block.resolve_conj().resolve_neg().contiguous())


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as flat uint8; unlike ``reshape``, whatever the stride of a single element."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copier_for(device: torch.device) -> Copier:
    """A copier for tensors of the given device."""
    return HostCopier() if device.type == "cpu" else DeviceCopier(device)


def pin(memory: torch.Tensor) -> bool:
    """Register host memory with the CUDA (or ROCm) driver, so that device copies land straight in it.

    Blocks while the driver pins the pages (about a second for several GiB). Returns False, with a warning that
    says what to do, where the driver refuses; copies then go through the driver's own bounce buffers.

    Source: ``cudaHostRegister`` of the CUDA runtime API, flag 0 (portable within the process's context).
    """
    if not torch.cuda.is_available():
        return False
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) == 0:
        return True
    logger.warning(
        "the driver refused to pin the host cache of %.2f GiB (cudaHostRegister: %s); copies will be slower and may "
        "hold up the training: raise the memlock limit (ulimit -l) or lower host_cache_size",
        memory.nbytes / 2**30,
        error,
    )
    return False


def unpin(memory: torch.Tensor) -> None:
    """Undo a successful `pin`; the memory must not be in use by any copy."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostUnregister(memory.data_ptr())
    if int(error) != 0:
        logger.warning("the driver could not unregister the host cache (cudaHostUnregister: %s)", error)
