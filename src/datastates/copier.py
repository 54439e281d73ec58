"""Copies of tensor bytes into slabs of the host cache, one copier for each device.

A host tensor is copied by the calling thread; the copy is done when the call returns. An accelerator's tensor is
copied on a stream of its own, behind an event of the stream that computed it; the call returns at once, and a
`Mark` says when the bytes have arrived. Nothing here runs on a device's default stream or starts an OpenMP team.

``docs/accelerators.md`` says which devices have run this, and what was read where about those that have not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from datastates.copying import copy_range, is_flat, row_blocks
from datastates.cuda_runtime import check_not_capturing, recorded, runtime_of, stay_outside_captures
from datastates.errors import TornSnapshotError
from datastates.plan import Piece
from datastates.state import has_its_bytes

logger = logging.getLogger(__name__)

DEVICE_BLOCK_BYTES = 4 << 20
"""Largest block of a non-contiguous device tensor that is gathered at once: bounds the device memory it takes."""

MIN_DEVICE_BLOCK_BYTES = 64 << 10
"""Blocks are halved down to this size where device memory is short."""


class Mark(Protocol):
    """A point in a device's queue of work: an event of the device's module, as ``torch.cuda.Event``."""

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

    def landing(self, nbytes: int) -> torch.Tensor:
        """New host memory (uint8) that copies reach at full speed; locked where the device knows of that."""


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
        raise TypeError("copies are done when they return: there is nothing to wait for")

    def landing(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class BlockingCopier(HostCopier):
    """The copier of a device that shows no streams, as Apple's: it does all in one order, copies block the caller."""

    def copy(self, piece: Piece, destination: torch.Tensor, after: Mark | None) -> None:  # noqa: ARG002 - the protocol's
        source = piece.segment.source
        assert isinstance(source, torch.Tensor)  # noqa: S101 - the stager copies literals itself
        check_storage(source, piece.segment.fqn)
        with torch.no_grad():
            for block in device_blocks(source, piece.segment_begin, piece.nbytes):
                destination[: block.numel()].copy_(block)
                destination = destination[block.numel() :]


class DeviceCopier:
    """The copier of one accelerator device. Used by one thread, but for `ready` and `hold_current_stream`.

    Streams and events are those of the device's own module throughout. An event of ``torch.cuda`` is a ``torch.Event``
    by its type, but carries another one inside: a ``torch.Stream`` would wait for nothing. And only ``torch.cuda``'s
    can put a waiting thread to sleep; a ``torch.Event`` lets it spin on a core that the training needs.
    Source: ``THCPEvent_pynew``, ``THPEvent_pynew`` and ``THPStream_wait_event`` in torch/csrc.

    Sources stay alive until their copies have arrived, so that the caching allocator cannot hand their memory out
    again: the plan of a `StagingJob` holds them. What is gathered here for a moment belongs to the copy stream, and may
    be reused there alone, behind the copy.
    """

    def __init__(self, device: torch.device, runtime: Any = None) -> None:
        """``runtime``: what offers streams and events; None: torch's module of the device type."""
        self._device = device
        self._runtime = runtime_of(device) if runtime is None else runtime
        self._stream = self._runtime.Stream(device=device)
        self._waited: Mark | None = None

    def ready(self) -> Mark | None:
        """See `Copier`.

        Raises:
            GraphCaptureError: the current stream is recording a graph.
        """
        return ready_mark(self._device, self._runtime)

    def copy(self, piece: Piece, destination: torch.Tensor, after: Mark | None) -> None:
        source = piece.segment.source
        assert isinstance(source, torch.Tensor)  # noqa: S101 - the stager copies literals itself
        check_storage(source, piece.segment.fqn)
        self._enter()
        if after is not None and after is not self._waited:  # a stream that has waited once is behind it for good
            self._stream.wait_event(after)
            self._waited = after
        with torch.no_grad(), self._runtime.stream(self._stream):
            check_not_capturing(self._device, self._runtime)  # torch's streams are few, and given out again
            for block in device_blocks(source, piece.segment_begin, piece.nbytes):
                destination[: block.numel()].copy_(block, non_blocking=True)
                destination = destination[block.numel() :]

    def mark(self) -> Mark | None:
        return recorded(self._device, self._stream, self._runtime)  # type: ignore[no-any-return]

    def hold_current_stream(self, mark: Mark) -> None:
        """See `Copier`.

        Raises:
            GraphCaptureError: the current stream is recording a graph, which cannot wait for what is outside of it.
        """
        check_not_capturing(self._device, self._runtime)
        self._runtime.current_stream(self._device).wait_event(mark)

    def landing(self, nbytes: int) -> torch.Tensor:
        self._enter()
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device.type in ("cuda", "xpu"))
        except RuntimeError as error:
            logger.info(
                "copies of small tensors of %s will be slower: no locked memory for them (%s)", self._device, error
            )
            return torch.empty(nbytes, dtype=torch.uint8)

    def _enter(self) -> None:
        """Make the device current on the copying thread, so that no call of it wakes up another one."""
        stay_outside_captures(self._device)
        if self._runtime.current_device() != self._device.index:
            self._runtime.set_device(self._device)


def ready_mark(device: torch.device, runtime: Any = None) -> Mark | None:
    """Mark what the caller's current stream of a device has been given so far; None where it has no streams.

    Raises:
        GraphCaptureError: the current stream is recording a graph.
    """
    runtime = runtime_of(device) if runtime is None else runtime
    if runtime is None:
        return None
    check_not_capturing(device, runtime)
    return recorded(device, runtime.current_stream(device), runtime)  # type: ignore[no-any-return]


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

    Flat parts are views. Others are gathered on the device, at most `DEVICE_BLOCK_BYTES` at a time, less where memory
    is short. The range must hold whole elements.

    Raises:
        torch.OutOfMemoryError: not even `MIN_DEVICE_BLOCK_BYTES` of device memory can be had.
    """
    item = source.element_size()
    yield from _blocks(source, begin // item, (begin + nbytes) // item, max(DEVICE_BLOCK_BYTES // item, 1))


def _blocks(source: torch.Tensor, first: int, last: int, limit: int) -> Iterator[torch.Tensor]:
    for block in row_blocks(source, first, last, limit):
        gathered = block if is_flat(block) else _gathered(block)
        if gathered is not None:
            yield flat_bytes(gathered)
        else:
            yield from _blocks(block, 0, block.numel(), max(block.numel() // 2, 1))


def _gathered(block: torch.Tensor) -> torch.Tensor | None:
    """The elements of a block in new memory; None where there is none and a smaller block is worth a try."""
    try:
        return block.resolve_conj().resolve_neg().contiguous()
    except torch.OutOfMemoryError:
        if block.numel() * block.element_size() <= MIN_DEVICE_BLOCK_BYTES:
            raise
        return None


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as flat uint8; unlike ``reshape``, whatever the stride of a single element."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copier_for(device: torch.device) -> Copier:
    """A copier for tensors of the given device."""
    if device.type == "cpu":
        return HostCopier()
    return BlockingCopier() if runtime_of(device) is None else DeviceCopier(device)
