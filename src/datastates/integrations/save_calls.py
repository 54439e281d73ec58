"""``torch.save`` and safetensors' ``save_file``, diverted while a framework saves a checkpoint.

Frameworks that know no plugin for writing call these two, from many places. Where the thread is inside of `diverted`,
each call is offered to somebody else first; all other calls go where they always went.

Source: safetensors 0.8, torch.py: who calls ``save_file`` has imported it by name (transformers as ``safe_save_file``,
PEFT, too). So it is not the name that is replaced but the code of the function, which all references share.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import safetensors.torch
import torch

from datastates.formats.dtypes import SAFETENSORS_NAMES
from datastates.state import has_own_storage


class Divert(Protocol):
    """Is offered what a call saves, and the path; True: it has seen to that."""

    def __call__(self, state: object, path: str, *, is_flat: bool) -> bool:
        """``is_flat``: tensors by name, to be saved as ``save_file`` does it; else anything, as ``torch.save`` does."""


_MARK = "_is_of_datastates"
_METADATA = {"format": "pt"}  # what our own files say
_divert: ContextVar[Divert | None] = ContextVar("datastates_divert", default=None)
_installing = threading.Lock()


@contextlib.contextmanager
def diverted(divert: Divert) -> Iterator[None]:
    """Inside, plain calls of this thread that save to a path are offered to ``divert``.

    Not offered are calls with further options (another pickle, metadata of one's own), those with open files, and to
    ``save_file`` what it may refuse: tensors that share bytes, or that are no ordinary ones.
    """
    with _installing:
        _install()
    token = _divert.set(divert)
    try:
        yield
    finally:
        _divert.reset(token)


def _install() -> None:
    if not hasattr(torch.save, _MARK):
        torch.save = torch.serialization.save = _torch_save(torch.save)
    function = safetensors.torch.save_file
    names = function.__globals__
    if "_datastates_save_file" not in names:
        original = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        names["_datastates_save_file"] = _save_file(original)
        function.__code__, function.__defaults__ = _replacement.__code__, None


def _offer(state: object, target: object, *, is_flat: bool) -> bool:
    divert = _divert.get()
    if divert is None or not isinstance(target, (str, os.PathLike)) or (is_flat and not _are_separate(state)):
        return False
    return divert(state, os.fspath(target), is_flat=is_flat)


def _torch_save(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if args or kwargs or not _offer(obj, f, is_flat=False):
            original(obj, f, *args, **kwargs)

    setattr(save, _MARK, True)
    return save


def _save_file(original: Callable[..., None]) -> Callable[..., None]:
    def save_file(tensors: Any, filename: Any, metadata: dict[str, str] | None = None) -> None:
        if metadata not in (None, _METADATA) or not _offer(tensors, filename, is_flat=True):
            original(tensors, filename, metadata)

    return save_file


def _are_separate(tensors: object) -> bool:
    """Whether it is a dictionary of ordinary tensors by name, of dtypes that the format has, that share no byte."""
    if not isinstance(tensors, Mapping):
        return False
    spans = []
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or not has_own_storage(tensor):
            return False
        if tensor.dtype not in SAFETENSORS_NAMES or not tensor.is_contiguous():
            return False
        if tensor.numel():
            begin = tensor.data_ptr()
            spans.append((str(tensor.device), begin, begin + tensor.numel() * tensor.itemsize))
    spans.sort()
    return all(one[0] != other[0] or one[2] <= other[1] for one, other in itertools.pairwise(spans))


def _datastates_save_file(*args: Any, **kwargs: Any) -> None:
    """Stands for what `_save_file` gives."""


def _replacement(*args: Any, **kwargs: Any) -> None:
    """What the function becomes: its names are looked up in the module of the function."""
    _datastates_save_file(*args, **kwargs)
