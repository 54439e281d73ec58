"""Bytes of a file to the memory of a device: through a few slabs of locked host memory, while the next are read."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch

from datastates.copier import Mark
from datastates.cuda_runtime import (
    check_not_capturing,
    recorded,
    register,
    runtime_of,
    stay_outside_captures,
    unregister,
)
from datastates.reading import (
    BUFFER_BYTES,
    NUM_THREADS,
    TILE_BYTES,
    Digests,
    FileReader,
    Sink,
    Tile,
    fresh_memory,
    merged,
    page_floor,
)

logger = logging.getLogger(__name__)

NUM_SLABS = NUM_THREADS + 4
"""Each reading thread holds one; the rest is on its way to the device. With slabs of 4 MiB these are 48 MiB."""


class Link(Protocol):
    """The way from host memory to one device, in order. `send` and `mark` may be called by several threads."""

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy bytes (both uint8, contiguous, of one length); need not wait for their arrival."""

    def mark(self) -> Mark | None:
        """Mark all that this thread has sent so far; None where it has arrived."""

    def lock(self, memory: torch.Tensor) -> bool:
        """Lock host memory for fast copies; False where that cannot be done or would be of no use."""

    def unlock(self, memory: torch.Tensor) -> None:
        """Undo a successful `lock`; nothing that was sent from there may be on its way."""


class BlockingLink:
    """The link to a device that shows no streams: copies block the thread that sends."""

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        _copy(source, destination, is_async=False)

    def mark(self) -> Mark | None:
        return None

    def lock(self, memory: torch.Tensor) -> bool:  # noqa: ARG002 - the protocol's
        return False

    def unlock(self, memory: torch.Tensor) -> None:  # noqa: ARG002 - the protocol's
        raise TypeError("nothing has been locked")


class DeviceLink:
    """The link to an accelerator: a stream of its own, behind what the caller's current stream has been given so far.

    Make it when the destinations have been allocated: their memory may still be in use by earlier work of that stream.
    """

    def __init__(self, device: torch.device, runtime: Any) -> None:
        """``runtime``: torch's module of the device type, which offers streams and events.

        Raises:
            GraphCaptureError: the current stream is recording a graph.
        """
        check_not_capturing(device, runtime)
        self._device = device
        self._runtime = runtime
        self._stream = runtime.Stream(device=device)
        self._stream.wait_event(recorded(device, runtime.current_stream(device), runtime))

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        stay_outside_captures(self._device)
        with self._runtime.stream(self._stream):
            _copy(source, destination, is_async=True)

    def mark(self) -> Mark | None:
        return recorded(self._device, self._stream, self._runtime)  # type: ignore[no-any-return]

    def lock(self, memory: torch.Tensor) -> bool:
        if self._device.type != "cuda":
            return False
        problem = register(memory)
        if problem:
            logger.info("loading to %s will be slower: the driver locks no memory for it (%s)", self._device, problem)
        return not problem

    def unlock(self, memory: torch.Tensor) -> None:
        unregister(memory)


def _copy(source: torch.Tensor, destination: torch.Tensor, *, is_async: bool) -> None:
    with torch.no_grad(), torch.inference_mode(destination.is_inference()):
        destination.copy_(source, non_blocking=is_async)


def link_to(device: torch.device) -> Link:
    """The link to a device."""
    runtime = runtime_of(device)
    return BlockingLink() if runtime is None else DeviceLink(device, runtime)


def settle(device: torch.device) -> None:
    """Wait until the caller's current stream of a device has done what it has been given: other threads write next."""
    runtime = runtime_of(device)
    if runtime is not None:
        runtime.current_stream(device).synchronize()


class Ring:
    """A few slabs of host memory, each given out again when what was sent from it has arrived (`reading.Buffers`).

    Close it: that waits until all has arrived, then unlocks and frees the memory.
    """

    def __init__(self, link: Link, num_slabs: int = NUM_SLABS, slab_bytes: int = BUFFER_BYTES) -> None:
        self._link = link
        memory = fresh_memory(num_slabs * slab_bytes)
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._is_locked = link.lock(self._whole)
        self._slabs: queue.SimpleQueue[tuple[memoryview, Mark | None]] = queue.SimpleQueue()
        for index in range(num_slabs):
            self._slabs.put((memoryview(memory)[index * slab_bytes : (index + 1) * slab_bytes], None))

    def take(self) -> memoryview:
        """A slab whose bytes nobody needs any more; blocks until there is one."""
        slab, mark = self._slabs.get()
        try:
            if mark is not None:
                mark.synchronize()
        except BaseException:
            self._slabs.put((slab, mark))
            raise
        return slab

    def give(self, slab: memoryview) -> None:
        """The calling thread has sent what there was to send of a slab."""
        mark = None
        try:
            mark = self._link.mark()
        finally:
            self._slabs.put((slab, mark))

    def close(self) -> None:
        """Wait until all has arrived, also after a failure; then nothing of the memory is left."""
        try:
            last = self._link.mark()
            if last is not None:
                last.synchronize()
        finally:
            if self._is_locked:
                self._is_locked = False
                self._link.unlock(self._whole)

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Upload:
    """Bytes of the file and where on a device they go: a flat uint8 tensor of as many."""

    begin: int
    end: int
    destination: torch.Tensor


def upload(
    file: FileReader,
    uploads: Iterable[Upload],
    link: Link,
    digests: Digests | None = None,
    cuts: Sequence[int] = (),
) -> None:
    """Read ranges of the file to one device. Blocks until all is there, for any stream.

    While slabs are on their way to the device the next ones are read. Takes `NUM_SLABS` slabs of host memory, locked
    where the device knows of that; none of it is left, also after a failure, which leaves some destinations filled.

    Args:
        file: open.
        uploads: what goes where; ranges must not overlap where there are digests.
        link: to the device of all destinations, made after they were.
        digests: takes the CRC-32s of what is read.
        cuts: as for `FileReader.run`.

    Raises:
        CorruptCheckpointError: the file ends before.
        StorageError: the device of the file or its file system fails.
    """
    tiles = merged([tile for one in uploads for tile in _tiles(one, link)])
    if tiles:
        with Ring(link) as ring:
            file.run(tiles, digests, cuts, buffers=ring)


def _tiles(one: Upload, link: Link) -> Iterable[Tile]:
    begin = one.begin
    while begin < one.end:
        end = min(page_floor(begin) + TILE_BYTES, one.end)
        part = one.destination[begin - one.begin : end - one.begin]
        yield Tile(begin, end, sinks=((begin, end, _sender(link, part)),))
        begin = end


def _sender(link: Link, destination: torch.Tensor) -> Sink:
    def send(data: memoryview) -> None:
        link.send(torch.frombuffer(data, dtype=torch.uint8), destination)

    return send
