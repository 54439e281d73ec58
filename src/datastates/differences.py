"""What differs between two checkpoints, or two files: names, shapes, dtypes, values.

Read part by part, so that checkpoints larger than memory can be compared; nothing of the files is run.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import torch

from datastates.contents.fingerprints import value_fingerprints
from datastates.contents.listing import FileListing, TensorRecord, ValueRecord, list_file
from datastates.loading import tensors_by_name
from datastates.reader import load
from datastates.reading import Progress
from datastates.same_save import SameSave

PART_BYTES = 256 << 20
"""Tensors are loaded in parts of this size, or one at a time where one is larger."""

_BLOCK_ELEMENTS = 1 << 22  # compared as float64, 32 MiB at a time

Record = TypeVar("Record", TensorRecord, ValueRecord)
_Key = tuple[str, int]  # fqn, and how many leaves before have the same one


class Kind(Enum):
    """How something differs."""

    REMOVED = "removed"
    ADDED = "added"
    RESHAPED = "reshaped"
    RETYPED = "retyped"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs.

    Attributes:
        file: name of the file in the checkpoints; empty where two files were compared.
        fqn: the tensor or value; empty where a whole file was added or removed.
        old: what it was: dtype and shape, or the value; empty where it was added.
        new: what it is; empty where it was removed.
        num_changed: elements that differ, of ``num_elements``.
        max_difference: largest absolute difference of numbers; NaN where a NaN took the place of a number or gave way
            to one, None where values were not compared.
        mean_difference: mean absolute difference over all elements.
    """

    kind: Kind
    file: str
    fqn: str
    old: str = ""
    new: str = ""
    num_changed: int = 0
    num_elements: int = 0
    max_difference: float | None = None
    mean_difference: float | None = None


def differences_of(
    old: Mapping[str, str], new: Mapping[str, str], progress: Progress | None = None
) -> Iterator[Difference]:
    """Compare files by name: tensors to the last bit, other values by all that they are made of.

    Between a file of torch and one of safetensors, values that are no tensors are compared as far as a listing shows
    them. Attributes of dictionaries (``OrderedDict``) are not compared.

    Args:
        old: path of each file by its name in the checkpoint.
        new: likewise; the same names are compared with each other.
        progress: called with the number of bytes compared since the last call.

    Raises:
        CheckpointNotFoundError: a file is missing.
        CorruptCheckpointError: a file is damaged: all that is compared is checked.
        pickle.UnpicklingError: a file has a form that cannot be listed.
        StorageError: a file cannot be read, or its checkpoint was saved again or removed meanwhile (at the latest
            behind the last difference): those given so far may be of different saves.
    """
    with SameSave([*old.values(), *new.values()]) as same:
        for name in sorted(old.keys() | new.keys()):
            if name not in new:
                yield Difference(Kind.REMOVED, name, "", f"{os.path.getsize(old[name])} bytes")
            elif name not in old:
                yield Difference(Kind.ADDED, name, "", "", f"{os.path.getsize(new[name])} bytes")
            else:
                yield from _of_files(old[name], new[name], name, progress)
        same.check()


def _of_files(old_path: str, new_path: str, name: str, progress: Progress | None) -> Iterator[Difference]:
    old, new = list_file(old_path), list_file(new_path)
    yield from _of_values(old, new, name)
    before, after = _numbered(old.tensors), _numbered(new.tensors)
    for key in sorted(before.keys() - after.keys()):
        yield Difference(Kind.REMOVED, name, key[0], _form(before[key]))
    for key in sorted(after.keys() - before.keys()):
        yield Difference(Kind.ADDED, name, key[0], "", _form(after[key]))
    alike = []
    for key in sorted(before.keys() & after.keys()):
        if before[key].shape != after[key].shape:
            yield Difference(Kind.RESHAPED, name, key[0], _form(before[key]), _form(after[key]))
        else:
            alike.append(key)
    for part in _parts(alike, before):
        names = [fqn for fqn, _ in part]
        left, right = (_tensors(path, names) for path in (old_path, new_path))
        for key in part:
            found = _of_tensors(left[key], right[key], name, before[key], after[key])
            if found is not None:
                yield found
        if progress is not None:
            progress(sum(before[key].nbytes for key in part))


def _of_values(old: FileListing, new: FileListing, name: str) -> Iterator[Difference]:
    before, after = _numbered(old.values), _numbered(new.values)
    is_comparable = old.kind == new.kind
    prints = [dict(zip(_numbered(one.values), value_fingerprints(one.path), strict=True)) for one in (old, new)]
    for key in sorted(before.keys() | after.keys()):
        left, right = (
            f"{one[key].class_name} {one[key].text}".strip() if key in one else "" for one in (before, after)
        )
        if key not in before:
            yield Difference(Kind.ADDED, name, key[0], "", right)
        elif key not in after:
            yield Difference(Kind.REMOVED, name, key[0], left)
        elif prints[0][key] != prints[1][key] if is_comparable else left != right:
            yield Difference(Kind.CHANGED, name, key[0], left, right if left != right else f"{right} of other content")


def _numbered(records: Iterable[Record]) -> dict[_Key, Record]:
    """By name, and how often that has occurred before: ``1`` and ``"1"`` have the same one."""
    counts: Counter[str] = Counter()
    found = {}
    for record in records:
        found[record.fqn, counts[record.fqn]] = record
        counts[record.fqn] += 1
    return found


def _form(tensor: TensorRecord) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _parts(keys: Sequence[_Key], tensors: Mapping[_Key, TensorRecord]) -> Iterator[list[_Key]]:
    part: list[_Key] = []
    nbytes = 0
    for key in sorted(keys, key=lambda key: tensors[key].offset):
        if part and nbytes + tensors[key].nbytes > PART_BYTES:
            yield part
            part, nbytes = [], 0
        part.append(key)
        nbytes += tensors[key].nbytes
    if part:
        yield part


def _tensors(path: str, names: list[str]) -> dict[_Key, torch.Tensor]:
    named = tensors_by_name(load(path, "cpu", keys=names))
    return {(fqn, count): one.detach() for fqn, tensors in named.items() for count, one in enumerate(tensors)}


def _of_tensors(
    left: torch.Tensor, right: torch.Tensor, name: str, old: TensorRecord, new: TensorRecord
) -> Difference | None:
    """Compare element by element, to the last bit where the dtypes are the same."""
    changed, total, distances = 0, 0.0, [0.0]
    a, b = left.reshape(-1), right.reshape(-1)
    for begin in range(0, a.numel(), _BLOCK_ELEMENTS):
        one, other = a[begin : begin + _BLOCK_ELEMENTS], b[begin : begin + _BLOCK_ELEMENTS]
        count = _num_changed(one, other)
        if count:
            maximum, summed = _distance(one, other)
            changed, total = changed + count, total + summed
            distances.append(maximum)
    is_retyped = left.dtype is not right.dtype
    if not changed and not is_retyped:
        return None
    largest = math.nan if any(map(math.isnan, distances)) else max(distances)
    kind = Kind.RETYPED if is_retyped else Kind.CHANGED
    mean = total / max(a.numel(), 1)
    return Difference(kind, name, old.fqn, _form(old), _form(new), changed, a.numel(), largest, mean)


def _num_changed(one: torch.Tensor, other: torch.Tensor) -> int:
    if one.dtype is not other.dtype:
        a, b = _wide(one, other)
        return int((~((a == b) | (a.isnan() & b.isnan()))).sum())
    a, b = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    if torch.equal(a, b):
        return 0
    return int((a != b).view(-1, one.itemsize).any(dim=1).sum())


def _distance(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """The largest difference (NaN where one side alone has one), and the sum of the finite ones."""
    a, b = _wide(one, other)
    nan_a, nan_b = a.isnan(), b.isnan()
    distance = (a - b).abs().masked_fill((a == b) | (nan_a & nan_b), 0.0)
    maximum = math.nan if bool((nan_a ^ nan_b).any()) else float(distance.max())
    return maximum, float(distance.masked_fill(~distance.isfinite(), 0.0).sum())


def _wide(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    return one.resolve_conj().to(wide), other.resolve_conj().to(wide)
