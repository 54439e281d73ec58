"""The builder of a byte image: bytes and tensors in file order become the segments of a `FilePlan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from datastates.plan import SEAL_NBYTES, Seal, Segment
from datastates.state import Capture, Captured, alias, version_of

Literal = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Block:
    """The bytes of one tensor before they have a place in the file.

    Attributes:
        nbytes: length in bytes.
        source: captured bytes, also those still on their way, or a tensor (see `Segment.source`).
        fqn: dotted name of the leaf.
        version: version of the source tensor, -1 where it has none.
        is_pending: the source may change before the fence, so the block must lie before `FilePlan.eager_end`.
    """

    nbytes: int
    source: Literal | Captured | torch.Tensor
    fqn: str
    version: int = -1
    is_pending: bool = False

    @property
    def is_literal(self) -> bool:
        return isinstance(self.source, (bytes, bytearray, memoryview))


def capture_block(tensor: torch.Tensor, fqn: str, capture: Capture) -> Block:
    """Capture an eager tensor.

    Raises:
        ValueError: ``capture`` returned another number of bytes than the tensor has.
    """
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes == 0:
        return Block(0, b"", fqn)
    captured = capture(tensor)
    if captured is None:
        return Block(nbytes, alias(tensor), fqn, version_of(tensor), is_pending=True)
    found = len(captured) if isinstance(captured, (bytes, bytearray)) else captured.nbytes
    if found != nbytes:
        raise ValueError(f"capture of {fqn!r} returned {found} bytes, expected {nbytes}")
    return Block(nbytes, captured, fqn)


def lazy_block(tensor: torch.Tensor, fqn: str) -> Block:
    """A block whose bytes are copied later, from a detached alias of the tensor."""
    nbytes = tensor.numel() * tensor.itemsize
    return Block(nbytes, alias(tensor), fqn, version_of(tensor)) if nbytes else Block(0, b"", fqn)


class Image(Protocol):
    """Something that bytes, blocks and seals can be appended to; ``nbytes`` is its length so far."""

    nbytes: int

    def literal(self, data: Literal) -> None: ...

    def block(self, block: Block) -> None: ...

    def seal(self, begin: int, end: int) -> None: ...


class ImageBuilder:
    """Appends bytes and tensors; adjoining literal bytes end up in one segment.

    Attributes:
        nbytes: length of the image so far.
        eager_end: end of the last pending block so far.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.eager_end = 0
        self._segments: list[Segment] = []
        self._seals: list[Seal] = []
        self._literals: list[Literal] = []
        self._literals_begin = 0

    def literal(self, data: Literal) -> None:
        """Append bytes."""
        self._literals.append(data)
        self.nbytes += len(data)

    def block(self, block: Block) -> None:
        """Append the bytes of a tensor."""
        if not isinstance(block.source, (bytes, bytearray, memoryview)):
            self._end_literals()
            self._segments.append(Segment(self.nbytes, block.nbytes, block.source, block.fqn, block.version))
            self.nbytes += block.nbytes
            self._literals_begin = self.nbytes
            if block.is_pending:
                self.eager_end = self.nbytes
        else:
            self.literal(block.source)

    def seal(self, begin: int, end: int) -> None:
        """Append four bytes that the flusher will fill with the CRC-32 of ``[begin, end)``."""
        self._seals.append(Seal(self.nbytes, begin, end))
        self.literal(bytes(SEAL_NBYTES))

    def segments(self) -> tuple[Segment, ...]:
        self._end_literals()
        return tuple(self._segments)

    def seals(self) -> tuple[Seal, ...]:
        return tuple(self._seals)

    def _end_literals(self) -> None:
        if self.nbytes > self._literals_begin:
            data = b"".join(self._literals)
            self._segments.append(Segment(self._literals_begin, len(data), data))
        self._literals.clear()
        self._literals_begin = self.nbytes
