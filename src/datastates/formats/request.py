"""What a caller of `reader.load` wants of one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from datastates.contents.parts import Part, names_within, parts_of
from datastates.errors import CorruptCheckpointError
from datastates.formats.storages import Check, Checksums, Region, between, run, scanning_tiles
from datastates.fqns import listed
from datastates.reading import FileReader

MapLocation: TypeAlias = (
    str | torch.device | dict[str, str] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | None
)


@dataclass(frozen=True, slots=True)
class Request:
    """How a file is to be loaded.

    Attributes:
        map_location: as for ``torch.load``.
        weights_only: run nothing that the file says.
        check: compare what is read with its checksums.
        slabs: checks of the whole file from outside of it; empty where there are none.
        mmap: map the file instead of reading it.
    """

    map_location: MapLocation
    weights_only: bool
    check: bool = True
    slabs: tuple[Check, ...] = ()
    mmap: bool = False

    @property
    def target(self) -> torch.device | None:
        """The device of all that is loaded, None where each storage has its own.

        Raises:
            RuntimeError: there is no such device here.
        """
        if not isinstance(self.map_location, (str, torch.device)):
            return None
        restore = torch.serialization._get_restore_location(self.map_location)  # type: ignore[no-untyped-call]
        device: torch.device = restore(torch.UntypedStorage(0), "cpu").device  # type: ignore[no-untyped-call]
        return device

    def device_of(self, location: str) -> torch.device | None:
        """The accelerator that a storage saved at a location goes to straight from the file.

        None where it goes to the host first: it stays there, goes to ``meta``, or a function decides.

        Raises:
            RuntimeError: there is no such device here.
        """
        if not torch.accelerator.is_available() or self._is_function:
            return None
        restore = torch.serialization._get_restore_location(self.map_location)  # type: ignore[no-untyped-call]
        device: torch.device = restore(torch.UntypedStorage(0), location).device  # type: ignore[no-untyped-call]
        return device if device.type not in ("cpu", "meta") else None

    @property
    def _is_function(self) -> bool:
        return self.map_location is not None and not isinstance(self.map_location, (str, bytes, torch.device, dict))


class MapLocationError(Exception):
    """Carries an exception out of a ``map_location`` function, through whatever calls it."""


def guarded(map_location: MapLocation) -> MapLocation:
    """The same; what a function raises comes out as the cause of a `MapLocationError`, and is told from damage."""
    if map_location is None or isinstance(map_location, (str, bytes, torch.device, dict)):
        return map_location
    function = map_location

    def call(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        try:
            return function(storage, location)
        except Exception as error:
            raise MapLocationError from error

    return call


def is_about_devices(error: Exception) -> bool:
    """Whether torch says that a storage cannot be brought to its device: then the file is sound."""
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
        return True
    text = str(error)
    return "deserialize object on" in text or "don't know how to restore data location" in text


def raise_damage(file: FileReader, checksums: Checksums, parts: Callable[[], list[Part]]) -> None:
    """Raise an error for a check that failed, one of a single tensor if there is any; ``parts`` says what lies where.

    Raises:
        CorruptCheckpointError: a check failed; names tensor, offset, expected and found.
    """
    failed = checksums.failed()
    if not failed:
        return
    check, found = max(failed, key=lambda item: item[0].is_exact)
    raise damage_error(file.path, check.begin, check.end, check.expected, found, safe_parts(parts))


def verify(file: FileReader, regions: Sequence[Region], checksums: Checksums, is_whole: bool) -> None:
    """Read regions, or the whole file, through a few buffers, and compare them with their checksums.

    Raises:
        CorruptCheckpointError: a check failed, or the file ends before.
        StorageError: the device or file system fails.
    """
    if not checksums.checks:
        return
    tiles = between((), file.nbytes) if is_whole else scanning_tiles(regions)
    run(file, tiles, checksums)
    raise_damage(file, checksums, lambda: parts_of(file))


def verify_whole(file: FileReader, slabs: Sequence[Check]) -> None:
    """Read all of a file that has no checksums of its own, and compare it with those of its checkpoint, if any.

    Raises:
        CorruptCheckpointError: a check failed, or the file ends before.
        StorageError: the device or file system fails.
    """
    verify(file, (), Checksums(slabs), is_whole=True)


def safe_parts(parts: Callable[[], list[Part]]) -> list[Part]:
    """The parts of a damaged file; none where even they cannot be told."""
    try:
        return parts()
    except CorruptCheckpointError:
        return []


def damage_error(
    path: str, begin: int, end: int, expected: int, found: int, parts: list[Part]
) -> CorruptCheckpointError:
    """The error for bytes whose checksum is wrong."""
    names = names_within(parts, begin, end)
    fqn = names[0] if any(part.is_tensor and part.name == names[0] for part in parts) else ""
    return CorruptCheckpointError(
        f"{path}: {listed(names)} is damaged: bytes {begin} to {end} have CRC-32 {found:08x}, expected {expected:08x}; "
        "load another checkpoint, or pass check=False to load what is there",
        path,
        fqn,
        begin,
    )


def no_such_tensor(path: str, what: Any) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: the state refers to {what}, which is not in the file", path)
