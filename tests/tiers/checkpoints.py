"""Committed checkpoints, made on disk as flushers make them."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

from datastates.checksum import crc32
from datastates.commit import roll_forward
from datastates.config import MIB
from datastates.manifest import FileRecord, Manifest, attempt_directory, write_manifest
from datastates.partial_names import partial_path

SLAB = 1 * MIB


def content(nbytes: int, seed: object) -> bytes:
    """Bytes that differ from place to place, the same for the same seed."""
    names = (f"{seed}/{index}".encode("utf-8", "surrogateescape") for index in range(1024))
    block = b"".join(zlib.crc32(name).to_bytes(4, "little") for name in names)
    return (block * (nbytes // len(block) + 1))[:nbytes]


def make_checkpoint(
    root: Path,
    name: str,
    sizes: tuple[int, ...] = (3 * SLAB + 5, 100, 0),
    *,
    world_size: int = 1,
    tag: str | None = None,
    seed: object = 0,
    at: float | None = None,
    latest: bool = True,
) -> Path:
    """A checkpoint below a root, with ``latest`` beside it. Returns its folder.

    Args:
        root: the first tier.
        name: relative to it.
        sizes: of the files of each rank.
        world_size: number of ranks.
        tag: its tag; None: the last part of the name.
        seed: of what is in the files, and of the attempt's name.
        at: Unix time of the commit.
        latest: whether to let ``latest`` name it.
    """
    directory = root / name
    number = zlib.crc32(f"{name}/{seed}".encode("utf-8", "surrogateescape"))
    attempt = f"run-{number:08x}-0001"
    tag = tag or directory.name
    manifests = []
    os.makedirs(attempt_directory(str(directory), attempt), exist_ok=True)
    for rank in range(world_size):
        files = []
        for index, nbytes in enumerate(sizes):
            file, data = f"part{index}-rank{rank}.pt", content(nbytes, f"{name}/{seed}/{rank}/{index}")
            Path(partial_path(str(directory / file), attempt)).write_bytes(data)
            values = tuple(crc32(data[begin : begin + SLAB]) for begin in range(0, nbytes, SLAB))
            files.append(FileRecord(file, nbytes, SLAB, values))
        manifest = Manifest(attempt, rank, world_size, tag, tuple(files), time.time())
        write_manifest(str(directory), manifest)
        manifests.append((manifest, crc32(manifest.to_bytes())))
    roll_forward(str(directory), manifests, tag, at)
    if latest:
        (directory.parent / "latest").write_text(tag)
    return directory
