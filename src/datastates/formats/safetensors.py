"""The safetensors format: eight bytes of length, a JSON header, and the tensors without a hole.

The file opens with the stock library. The tree of the state (`formats.tree`) is a string in ``__metadata__``, or
a U8 tensor of its own where it is large. Source: the README of huggingface/safetensors, "Format".
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import torch

from datastates.contents.safetensors_header import MAX_HEADER_BYTES, METADATA_NAME
from datastates.contents.state_tree import METADATA_KEY, PAD_NAME, TREE_NAME, TREE_VERSION
from datastates.errors import StateError
from datastates.formats.dtypes import SAFETENSORS_NAMES
from datastates.formats.image import Block, ImageBuilder, capture_block, lazy_block
from datastates.formats.tensor_table import Stored, TensorTable, in_file_order
from datastates.formats.tree import TreeEncoder
from datastates.plan import FilePlan
from datastates.state import Capture, IsEager, named_tensors

NAME = "safetensors"

#: The tensors begin at a page, so that direct reads need no copy.
_ALIGNMENT = 4096
_MAX_ITEMSIZE = 16

#: Above this the tree is a tensor: readers parse the whole header before anything else.
_MAX_METADATA_BYTES = 8 << 20


def plan(state: object, capture: Capture, is_eager: IsEager) -> FilePlan:
    """Lay out a safetensors file.

    Raises:
        StateError: a leaf cannot be saved, or the names of the tensors fill more than a header may hold.
    """
    named = named_tensors(state)
    table = TensorTable(capture, is_eager)
    try:
        root = TreeEncoder(table, named).encode(state)
    except RecursionError as error:
        raise StateError("the state is nested too deeply to be saved") from error
    tree = json.dumps({"version": TREE_VERSION, "root": root, "tensors": table.records}, separators=(",", ":"))
    metadata = {"format": "pt"}
    stored = table.stored
    if len(tree) <= _MAX_METADATA_BYTES:
        metadata[METADATA_KEY] = tree
    else:
        metadata[METADATA_KEY] = json.dumps({"version": TREE_VERSION, "tensor": TREE_NAME})
        data = tree.encode("ascii")
        stored = [*stored, Stored(TREE_NAME, "U8", (len(data),), 1, Block(len(data), data, ""))]
    return _lay_out(_padded(in_file_order(stored)), metadata)


def plan_flat(
    tensors: Mapping[str, torch.Tensor], capture: Capture | None = None, is_eager: IsEager | None = None
) -> FilePlan:
    """Lay out a safetensors file as others do: the tensors by name, no tree, no shared bytes, nothing beside them.

    Args:
        tensors: by the names that they get.
        capture: takes the bytes of an eager tensor; None: all are lazy.
        is_eager: says which tensors are eager; None: none.

    Raises:
        StateError: safetensors has no such dtype or no such name; or the names fill more than a header may hold.
    """
    stored = []
    for name, tensor in tensors.items():
        dtype = SAFETENSORS_NAMES.get(tensor.dtype)
        if name == METADATA_NAME or any(map(_is_surrogate, name)):
            raise StateError(f"{name!a} cannot be the name of a tensor in a safetensors file", name)
        if dtype is None:
            raise StateError(f"{name}: safetensors has no dtype {tensor.dtype}", name)
        if capture is None or is_eager is None or not is_eager(name, tensor):
            block = lazy_block(tensor, name)
        else:
            block = capture_block(tensor.detach(), name, capture)
        stored.append(Stored(name, dtype, tuple(tensor.shape), tensor.itemsize, block))
    ordered = in_file_order(stored)
    if not _are_aligned(ordered):  # pending ones first would need padding, and that is a tensor
        ordered = sorted(stored, key=lambda one: -one.itemsize)
    return _lay_out(ordered, {"format": "pt"})


def _are_aligned(stored: list[Stored]) -> bool:
    """Whether each tensor, one behind the other, begins at a multiple of its item size."""
    begins = itertools.accumulate((one.block.nbytes for one in stored), initial=0)
    return all(begin % one.itemsize == 0 for begin, one in zip(begins, stored, strict=False))


def _is_surrogate(character: str) -> bool:
    """Whether it is half of a character, which UTF-8 cannot hold."""
    return "\ud800" <= character <= "\udfff"


def _padded(stored: list[Stored]) -> list[Stored]:
    """Where the pending tensors end off the grid, a few bytes of padding keep the later ones aligned.

    The padding is a tensor, because the format allows no hole.
    """
    pending = [one for one in stored if one.block.is_pending]
    missing = -sum(one.block.nbytes for one in pending) % _MAX_ITEMSIZE
    if not missing:
        return stored
    pad = Stored(PAD_NAME, "U8", (missing,), 1, Block(missing, bytes(missing), ""))
    return [*pending, pad, *stored[len(pending) :]]


def _lay_out(stored: list[Stored], metadata: dict[str, str]) -> FilePlan:
    entries: dict[str, Any] = {METADATA_NAME: metadata}
    end = 0
    for one in stored:
        begin, end = end, end + one.block.nbytes
        entries[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    if len(header) > MAX_HEADER_BYTES:
        raise StateError(
            f"the names of {len(stored)} tensors need a header of {len(header)} bytes, safetensors allows "
            f"{MAX_HEADER_BYTES}; save the state in several files or in the torch format"
        )
    image = ImageBuilder()
    image.literal(len(header).to_bytes(8, "little") + header)
    for one in stored:
        image.block(one.block)
    return FilePlan(NAME, image.nbytes, image.segments(), image.seals(), image.eager_end)
