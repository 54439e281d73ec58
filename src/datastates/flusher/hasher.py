"""The checksums of a file's image, computed in file order while its slabs pass by."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from datastates.checksum import crc32, crc32_combine
from datastates.plan import SEAL_NBYTES, Seal

_Range = tuple[int, int]


class ImageHasher:
    """Fills in a file's seals and hashes its bytes, each byte once.

    The image is given in consecutive pieces of any length. A piece is cut where a sealed range begins or ends
    and where a seal stands; the CRCs of the cuts are combined into those of ranges and piece. Not thread safe.
    """

    def __init__(self, seals: Sequence[Seal]) -> None:
        self.position = 0
        self._seals = sorted(seals, key=lambda seal: seal.offset)
        self._next_seal = 0
        self._ranges = sorted({(seal.begin, seal.end) for seal in seals})
        self._next_range = 0
        self._running: dict[_Range, int] = {}
        self._finished: dict[_Range, int] = {}
        for seal in self._seals:
            if not 0 <= seal.begin <= seal.end <= seal.offset:
                raise ValueError(f"seal at {seal.offset} does not follow its range [{seal.begin}, {seal.end})")

    def feed(self, piece: memoryview) -> int:
        """Hash the next bytes of the image.

        Args:
            piece: writable; seals that fall into it are filled in.

        Returns:
            The CRC-32 of the piece with its seals filled in.
        """
        begin, end = self.position, self.position + piece.nbytes
        total = 0
        while self.position < end:
            self._open_ranges()
            self._fill_seals(piece, begin)
            stop = self._next_cut(end)
            nbytes = stop - self.position
            value = crc32(piece[self.position - begin : stop - begin])
            total = crc32_combine(total, value, nbytes)
            for key, running in self._running.items():
                self._running[key] = crc32_combine(running, value, nbytes)
            self.position = stop
            self._close_ranges()
        return total

    def _open_ranges(self) -> None:
        while self._next_range < len(self._ranges) and self._ranges[self._next_range][0] <= self.position:
            self._running[self._ranges[self._next_range]] = 0
            self._next_range += 1
        self._close_ranges()

    def _close_ranges(self) -> None:
        for key in [key for key in self._running if key[1] <= self.position]:
            self._finished[key] = self._running.pop(key)

    def _fill_seals(self, piece: memoryview, piece_begin: int) -> None:
        """Fill in the seals that stand at the position, or that reach over it from the piece before."""
        index = self._next_seal
        while index < len(self._seals) and self._seals[index].offset <= self.position:
            seal = self._seals[index]
            value = struct.pack("<I", self._finished[seal.begin, seal.end])
            first = max(seal.offset, piece_begin)
            last = min(seal.offset + SEAL_NBYTES, piece_begin + piece.nbytes)
            piece[first - piece_begin : last - piece_begin] = value[first - seal.offset : last - seal.offset]
            index += 1
            if last == seal.offset + SEAL_NBYTES:
                self._next_seal = index

    def _next_cut(self, end: int) -> int:
        cut = min([end, *(key[1] for key in self._running)])
        if self._next_range < len(self._ranges):
            cut = min(cut, self._ranges[self._next_range][0])
        for index in range(self._next_seal, len(self._seals)):
            if self._seals[index].offset > self.position:
                return min(cut, self._seals[index].offset)
        return cut
