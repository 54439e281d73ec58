"""The bytes of a file as storages of torch: read into new memory of the host or a device, or mapped."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from datastates.reading import TILE_BYTES, Digests, FileReader, Tile, fresh_memory, page_ceil, page_floor, tiles_of
from datastates.uploads import Upload, link_to, upload

_LARGE_BYTES = 1 << 20
"""Storages from this size on have memory of their own; smaller neighbours share a block, and keep it alive together."""

_SMALL_GAP_BYTES = 64 << 10

MAX_ALIGNMENT = 8
"""What the elements of every dtype in a file need at most (of complex numbers each part)."""


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of one storage: where they are in the file, and a multiple of what their address must be."""

    name: str
    begin: int
    end: int
    alignment: int = MAX_ALIGNMENT

    @property
    def is_aligned(self) -> bool:
        """Whether it may stay at the place within a page that it has in the file."""
        return self.begin % self.alignment == 0


@dataclass(frozen=True, slots=True)
class Check:
    """A range of the file and the CRC-32 that it should have; ``is_exact`` where it is just one tensor."""

    begin: int
    end: int
    expected: int
    is_exact: bool = False


class Checksums:
    """The checks of a file, and how they came out for what has been read."""

    def __init__(self, checks: Iterable[Check]) -> None:
        self.checks = tuple(checks)
        self.digests = Digests()
        self.cuts = sorted({offset for check in self.checks for offset in (check.begin, check.end)})

    def failed(self) -> list[tuple[Check, int]]:
        """The checks that do not hold, with what was found; ranges of which not all was read count as right."""
        found = ((check, self.digests.of(check.begin, check.end)) for check in self.checks)
        return [(check, value) for check, value in found if value is not None and value != check.expected]


class Storages:
    """The storages of one file by name, as one-dimensional tensors of bytes on the host or on a device.

    `read` first, then `take` each; a storage that was not read before is read when it is taken.
    """

    def __init__(
        self,
        file: FileReader,
        regions: Iterable[Region],
        checksums: Checksums | None = None,
        devices: Mapping[str, torch.device] | None = None,
    ) -> None:
        """Args:
        file: open; stays the caller's.
        regions: of all storages that may be asked for.
        checksums: takes the digests of what is read.
        devices: by name, of storages that do not belong on the host.
        """
        self._file = file
        self._devices = devices or {}
        self._regions = {region.name: region for region in regions}
        self._checksums = checksums
        self._made: dict[str, torch.Tensor] = {}

    def read(self, names: Iterable[str] | None = None, *, whole_file: bool = False) -> None:
        """Read storages into new memory, several reads at a time; blocks until all are there.

        Args:
            names: which ones; None: all.
            whole_file: read the bytes between them, too, for the checksums that cover them.

        Raises:
            CorruptCheckpointError: the file ends before.
            StorageError: the device or file system fails.
        """
        regions = self._regions.values() if names is None else [self._regions[name] for name in names]
        ordered = sorted((region for region in regions if region.end > region.begin), key=lambda one: one.begin)
        here = [region for region in ordered if region.name not in self._devices]
        there = [region for region in ordered if region.name in self._devices]
        tiles = list(itertools.chain.from_iterable(map(self._tiles, _blocks(here))))
        if whole_file:
            tiles += between([*tiles, *(Tile(region.begin, region.end) for region in there)], self._file.nbytes)
        run(self._file, tiles, self._checksums)
        for device in dict.fromkeys(self._devices[region.name] for region in there):
            self._upload([region for region in there if self._devices[region.name] == device], device)

    def take(self, name: str) -> torch.Tensor:
        """The bytes of a storage; its memory belongs to the tensor from now on."""
        region = self._regions[name]
        if region.end == region.begin:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if name not in self._made:
            self.read([name])
        return self._made.pop(name)

    def _upload(self, regions: Sequence[Region], device: torch.device) -> None:
        """Read regions to a device; those that lie between them in the file are read and skipped."""
        uploads = []
        for region in regions:
            made = torch.empty(region.end - region.begin, dtype=torch.uint8, device=device)
            self._made[region.name] = made
            uploads.append(Upload(region.begin, region.end, made))
        checked = () if self._checksums is None else (self._checksums.digests, self._checksums.cuts)
        upload(self._file, uploads, link_to(device), *checked)

    def _tiles(self, block: Sequence[Region]) -> list[Tile]:
        """One tile in fresh memory for the regions of a block, which become views of it."""
        begin, end = block[0].begin, block[-1].end
        if not block[0].is_aligned:
            return self._shifted(block[0])
        cover = page_floor(begin)
        memory = fresh_memory(page_ceil(end) - cover)
        for region in block:
            self._made[region.name] = _bytes_of(memory, region.begin - cover, region.end - region.begin)
        return [Tile(begin, end, memoryview(memory))]

    def _shifted(self, region: Region) -> list[Tile]:
        """A tile that copies a region to aligned memory; read straight into its pages, its elements would not be."""
        nbytes = region.end - region.begin
        memory = fresh_memory(nbytes)
        self._made[region.name] = _bytes_of(memory, 0, nbytes)
        return [Tile(region.begin, region.end, target=memoryview(memory)[:nbytes])]


def run(file: FileReader, tiles: Sequence[Tile], checksums: Checksums | None) -> None:
    """Read tiles, with or without digests."""
    if checksums is None:
        file.run(tiles)
    else:
        file.run(tiles, checksums.digests, checksums.cuts)


def scanning_tiles(regions: Iterable[Region]) -> list[Tile]:
    """Tiles that read regions for their checksums alone, small neighbours together."""
    tiles: list[Tile] = []
    for region in sorted(regions, key=lambda one: one.begin):
        last = tiles[-1] if tiles else None
        if (
            last is not None
            and region.begin - last.end < _SMALL_GAP_BYTES
            and max(region.end, last.end) - last.begin <= TILE_BYTES
        ):
            tiles[-1] = Tile(last.begin, max(region.end, last.end))
            continue
        tiles += tiles_of(region.begin, region.end)
    return tiles


def between(tiles: Iterable[Tile], nbytes: int) -> list[Tile]:
    """Tiles for what other tiles leave out of the file."""
    position, rest = 0, []
    for begin, end in [*sorted((tile.begin, tile.end) for tile in tiles), (nbytes, nbytes)]:
        rest += tiles_of(position, begin)
        position = max(position, end)
    return rest


def _blocks(regions: Iterable[Region]) -> list[list[Region]]:
    """Regions in file order, small neighbours together."""
    blocks: list[list[Region]] = []
    for region in regions:
        last = blocks[-1] if blocks else None
        if (
            last is not None
            and max(last[0].end - last[0].begin, region.end - region.begin) < _LARGE_BYTES
            and last[0].is_aligned
            and region.is_aligned
            and region.begin - last[-1].end < _SMALL_GAP_BYTES
            and region.end - last[0].begin <= TILE_BYTES
        ):
            last.append(region)
        else:
            blocks.append([region])
    return blocks


def _bytes_of(memory: object, offset: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=nbytes)


class MappedStorages:
    """The storages of one file as windows of the mapped file, read where they are touched, written to privately."""

    def __init__(self, file: FileReader, regions: Iterable[Region]) -> None:
        self._regions = {region.name: region for region in regions}
        self._whole = torch.UntypedStorage.from_file(file.utf8_path, False, file.nbytes)

    def take(self, name: str) -> torch.Tensor:
        region = self._regions[name]
        tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        return tensor.set_(self._whole[region.begin : region.end], 0, (region.end - region.begin,), (1,))
