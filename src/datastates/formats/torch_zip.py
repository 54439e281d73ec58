"""The torch format: a file that ``torch.load`` opens as one of its own, laid out before any tensor moves.

Entries are stored, aligned to 64 bytes (to pages where large), and carry true CRC-32s. Storages are compact:
see `formats.extents`. Source: ``torch.serialization._save`` of torch 2.13.
"""

from __future__ import annotations

from datastates.formats.extents import Extent
from datastates.formats.image import Block, ImageBuilder, capture_block, lazy_block
from datastates.formats.torch_layout import (
    NAME,
    add_closing_records,
    add_first_records,
    add_opening_records,
    alignment_of,
    storage_name,
)
from datastates.formats.torch_pickle import pickle_state
from datastates.formats.zip_image import ZipImage
from datastates.plan import FilePlan
from datastates.state import Capture, IsEager


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
    add_first_records(archive, pickled)
    add_opening_records(archive)
    for key, block in blocks:
        archive.add(storage_name(key), block, alignment_of(block.nbytes))
    add_closing_records(archive, pickled)
    archive.finish()
    return FilePlan(NAME, image.nbytes, image.segments(), image.seals(), image.eager_end)


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
