"""The torch format: a file that ``torch.load`` opens as one of its own, laid out before any tensor moves.

Entries are stored, aligned to 64 bytes (to pages where large), and carry true CRC-32s. Storages are compact:
see `formats.extents`. Source: ``torch.serialization._save`` of torch 2.13.
"""

from __future__ import annotations

import hashlib
import sys

from datastates.formats.extents import Extent
from datastates.formats.image import Block, ImageBuilder, capture_block, lazy_block
from datastates.formats.torch_pickle import pickle_state
from datastates.formats.zip_image import ZipImage
from datastates.plan import FilePlan
from datastates.state import Capture, IsEager

NAME = "torch"

_ALIGNMENT = 64  # what torch.load assumes at least for mapped tensors
_PAGE_ALIGNMENT = 4096
_LARGE_BYTES = 1 << 20

#: "1" would promise that storages lie in the order of their keys at one alignment, from which torch.load
#: computes offsets without reading headers. Ours lie eager before lazy, so torch.load must look them up.
#: Source: the comment on ``.format_version`` in ``torch.serialization._save``.
_FORMAT_VERSION = b"0"
_ARCHIVE_VERSION = b"3\n"


def plan(state: object, capture: Capture, is_eager: IsEager) -> FilePlan:
    """Lay out a file of the torch format.

    Order: pickle and small records, eager storages, lazy storages, closing records, central directory.

    Raises:
        StateError: a leaf cannot be saved; names its fqn.
    """
    pickled, extents = pickle_state(state)
    blocks = [(extent.key, _block(extent, capture, is_eager)) for extent in extents]
    blocks.sort(key=lambda item: _rank(item[1]))
    image = ImageBuilder()
    archive = ZipImage(image)
    _add(archive, "data.pkl", pickled)
    _add(archive, ".format_version", _FORMAT_VERSION)
    _add(archive, ".storage_alignment", str(_ALIGNMENT).encode())
    _add(archive, "byteorder", sys.byteorder.encode())
    for key, block in blocks:
        alignment = _PAGE_ALIGNMENT if block.nbytes >= _LARGE_BYTES else _ALIGNMENT
        archive.add(f"archive/data/{key}", block, alignment)
    _add(archive, "version", _ARCHIVE_VERSION)
    _add(archive, ".data/serialization_id", _serialization_id(pickled))
    archive.finish()
    return FilePlan(NAME, image.nbytes, image.segments(), image.seals(), image.eager_end)


def _add(archive: ZipImage, name: str, data: bytes) -> None:
    archive.add(f"archive/{name}", Block(len(data), data, ""), _ALIGNMENT)


def _block(extent: Extent, capture: Capture, is_eager: IsEager) -> Block:
    """An extent is eager where any of its named views says so, judged by the bytes of the whole extent.

    Tensors that no container leads to are always eager: nobody can say of them when they change.
    """
    names = [view.fqn for view in extent.views if view.fqn is not None]
    fqn = names[0] if names else ""
    if extent.nbytes == 0:
        return Block(0, b"", fqn)
    source = extent.source()
    if not names or any(is_eager(name, source) for name in names):
        return capture_block(source, fqn, capture)
    return lazy_block(source, fqn)


def _rank(block: Block) -> int:
    """Pending blocks first, so that ``eager_end`` is small; then bytes, then what is copied later."""
    if block.is_pending:
        return 0
    return 1 if block.is_literal else 2


def _serialization_id(pickled: bytes) -> bytes:
    """Forty digits that depend on the content, as in torch's files, where they serve usage statistics only."""
    number = int.from_bytes(hashlib.blake2b(pickled, digest_size=16).digest(), "little")
    return b"%040d" % number
