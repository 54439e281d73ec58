"""Whether two checkpoints hold the same tensors, bit for bit; read by plain `torch.load`, without datastates."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch


def compare_checkpoints(expected: str, found: str) -> tuple[int, list[str]]:
    """Compare all tensors of all files of two folders.

    Returns:
        the number of tensors compared, and the differences, one sentence each.
    """
    names = _names(expected)
    if names != _names(found):
        return 0, [f"the files are {_names(found)}, expected {names}"]
    num_tensors, differences = 0, []
    for name in names:
        left, right = _tensors(os.path.join(expected, name)), _tensors(os.path.join(found, name))
        differences += [f"{name}: {fqn} is in one file only" for fqn in sorted(left.keys() ^ right.keys())]
        for fqn in left.keys() & right.keys():
            num_tensors += 1
            if not _is_identical(left[fqn], right[fqn]):
                differences.append(f"{name}: {fqn} differs")
    return num_tensors, differences if num_tensors else [*differences, "there are no tensors"]


def _names(folder: str) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_file() and not entry.name.startswith("."))


def _tensors(path: str) -> dict[str, torch.Tensor]:
    """All tensors of a file by dotted name. The files are the demo's own, so unpickling them is safe."""
    return dict(_walk(torch.load(path, map_location="cpu", mmap=True, weights_only=False), ""))


def _walk(node: object, fqn: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield fqn, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _walk(value, f"{fqn}.{key}" if fqn else str(key))
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _walk(value, f"{fqn}.{index}")


def _is_identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in dtype, shape and bits; so NaN equals itself, and 0.0 is not -0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(
        left.detach().contiguous().view(-1).view(torch.uint8), right.detach().contiguous().view(-1).view(torch.uint8)
    )
