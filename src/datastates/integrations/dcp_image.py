"""The byte image of a file of ``torch.distributed.checkpoint``: one small file of ``torch.save`` behind the other.

Each item of a checkpoint lies at an offset, and torch's own reader opens it there with ``torch.load``. A tensor is laid
out like any other file in torch's format, at a multiple of what its elements are aligned to in there.

Source: ``_write_item`` and ``FileSystemReader.read_data`` in torch/distributed/checkpoint/filesystem.py, torch 2.13.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from datastates import formats
from datastates.checksum import crc32
from datastates.copying import copy_to_bytes
from datastates.errors import StateError
from datastates.formats.image import Block, ImageBuilder, Literal, lazy_block
from datastates.formats.pickling import check_has_bytes
from datastates.formats.torch_layout import ALIGNMENT, NAME, alignment_of
from datastates.plan import SEAL_NBYTES, FilePlan
from datastates.state import Capture, alias, has_own_storage

_KINDS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Frame:
    """The archive of a tensor without the tensor: all that follows from dtype and shape.

    Attributes:
        head: the bytes before those of the tensor.
        data_nbytes: length of those of the tensor, its row-major elements.
        tail: the bytes behind them: three parts, between which their CRC-32 stands twice; one part for no elements.
    """

    head: bytes
    data_nbytes: int
    tail: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        """Length of the archive."""
        return len(self.head) + self.data_nbytes + self.tail_nbytes

    @property
    def tail_nbytes(self) -> int:
        return sum(map(len, self.tail)) + SEAL_NBYTES * (len(self.tail) - 1)

    def tail_of(self, crc: int) -> bytes:
        """The whole tail of a tensor whose bytes have this CRC-32."""
        return crc.to_bytes(SEAL_NBYTES, "little").join(self.tail)

    def crc_in(self, tail: bytes) -> int | None:
        """The CRC-32 that a tail names; None where it is no tail of this frame."""
        first = len(self.tail[0])
        crc = int.from_bytes(tail[first : first + SEAL_NBYTES], "little")
        return crc if self.tail_of(crc) == tail else None


def frame_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """The frame of a tensor on the CPU, whatever its values. Quick for kinds that were asked for before."""
    return _frame_of(dtype, tuple(shape))


@functools.lru_cache(_KINDS_KEPT)
def _frame_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    form = torch.empty(shape, dtype=dtype)  # nobody touches its memory
    plan = formats.plan(form, NAME, lambda _: None, lambda *_: False)
    literals = [bytes(segment.source) for segment in plan.segments if segment.is_literal]  # type: ignore[arg-type]
    if not form.numel():
        return Frame(literals[0], 0, (b"",))
    head, behind = literals
    begin = len(head) + math.prod(shape) * dtype.itemsize
    first, second = (seal.offset - begin for seal in plan.seals)
    tail = behind[:first], behind[first + SEAL_NBYTES : second], behind[second + SEAL_NBYTES :]
    return Frame(head, begin - len(head), tail)


class ItemImage(ImageBuilder):
    """Appends items; each of the methods gives the offset and the length of what it has appended."""

    def add_bytes(self, data: Literal) -> tuple[int, int]:
        """Append an object that is serialised already."""
        begin = self._align(ALIGNMENT)
        self.literal(data)
        return begin, len(data)

    def add_tensor(
        self, tensor: torch.Tensor, fqn: str, take: Callable[[int], bool], capture: Capture
    ) -> tuple[int, int]:
        """Append a tensor. Its bytes are copied later, unless it is a small one, or of a kind that must be copied now.

        Args:
            tensor: of any kind, on any device; kept alive by the image, as far as it is not copied.
            fqn: its name, for messages.
            take: says of a number of bytes whether the image may hold them itself; asked for tensors of the CPU.
            capture: takes the bytes of a tensor of an unusual kind.

        Raises:
            StateError: it has no bytes: it is on the meta device, or its storage was freed.
        """
        if tensor.device.type == "meta":
            raise StateError(f"{fqn}: a tensor on the meta device has no data to save", fqn)
        if not has_own_storage(tensor):
            return self._embed(formats.plan(tensor.detach(), NAME, capture, lambda *_: True))
        check_has_bytes(tensor, fqn)
        tensor = alias(tensor)
        frame = frame_of(tensor.dtype, tuple(tensor.shape))
        begin = self._align(alignment_of(frame.data_nbytes))
        self.literal(frame.head)
        if frame.data_nbytes and tensor.device.type == "cpu" and take(frame.data_nbytes):
            data = copy_to_bytes(tensor)
            self.literal(data)
            self.literal(frame.tail_of(crc32(data)))
        else:
            self._lazy(tensor, fqn, frame)
        return begin, self.nbytes - begin

    def plan(self) -> FilePlan:
        """The whole file."""
        return FilePlan("distcp", self.nbytes, self.segments(), self.seals(), self.eager_end)

    def _lazy(self, tensor: torch.Tensor, fqn: str, frame: Frame) -> None:
        begin = self.nbytes
        if frame.data_nbytes:
            self.block(lazy_block(tensor, fqn))
        end = self.nbytes
        for position, part in enumerate(frame.tail):
            if position:
                self.seal(begin, end)
            self.literal(part)

    def _embed(self, plan: FilePlan) -> tuple[int, int]:
        """Append another file."""
        begin = self._align(alignment_of(plan.nbytes))
        seals = {seal.offset: seal for seal in plan.seals}
        for segment in plan.segments:
            self.literal(bytes(begin + segment.begin - self.nbytes))
            if not isinstance(segment.source, (bytes, bytearray, memoryview)):
                is_pending = segment.end <= plan.eager_end
                self.block(Block(segment.nbytes, segment.source, segment.fqn, segment.version, is_pending))  # type: ignore[arg-type]
                continue
            data, position = bytes(segment.source), 0
            for offset in sorted(seal for seal in seals if segment.begin <= seal < segment.end):
                self.literal(data[position : offset - segment.begin])
                self.seal(begin + seals[offset].begin, begin + seals[offset].end)
                position = offset - segment.begin + SEAL_NBYTES
            self.literal(data[position:])
        self.literal(bytes(begin + plan.nbytes - self.nbytes))
        return begin, plan.nbytes

    def _align(self, alignment: int) -> int:
        self.literal(bytes(-self.nbytes % alignment))
        return self.nbytes


def order_of(item: WriteItem) -> tuple[bool, int]:
    """Objects, then tensors by their length: what is small comes together."""
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return False, 0
    return True, item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def add_item(
    image: ItemImage,
    item: WriteItem,
    found: torch.Tensor | io.BytesIO,
    take: Callable[[int], bool],
    capture: Capture,
) -> tuple[int, int]:
    """Append what the planner gives for an item: a tensor, or an object that is serialised already."""
    if isinstance(found, torch.Tensor):
        return image.add_tensor(found, item.index.fqn, take, capture)
    return image.add_bytes(found.getbuffer())
