"""``torch.save`` and safetensors' ``save_file``, diverted while a framework saves a checkpoint.

Frameworks that know no plugin for writing call these two, from many places. Where the thread is inside of `diverted`,
each call is offered to somebody else first; all other calls go where they always went.

Source: safetensors 0.8, torch.py: who calls ``save_file`` has imported it by name (transformers as ``safe_save_file``,
PEFT, too). So it is not the name that is replaced but the code of the function, which all references share.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import safetensors.torch
import torch

Divert = Callable[[object, str], bool]
"""Is offered a state and the path it is to be saved to; True: it has seen to that."""

_MARK = "_is_of_datastates"
_METADATA = {"format": "pt"}  # what our own files say
_divert: ContextVar[Divert | None] = ContextVar("datastates_divert", default=None)
_installing = threading.Lock()


@contextlib.contextmanager
def diverted(divert: Divert) -> Iterator[None]:
    """Inside, plain calls of this thread that save to a path are offered to ``divert``.

    Not offered are calls with further options (another pickle, metadata of one's own) and those with open files.
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


def _offer(state: object, target: object) -> bool:
    divert = _divert.get()
    return divert is not None and isinstance(target, (str, os.PathLike)) and divert(state, os.fspath(target))


def _torch_save(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if args or kwargs or not _offer(obj, f):
            original(obj, f, *args, **kwargs)

    setattr(save, _MARK, True)
    return save


def _save_file(original: Callable[..., None]) -> Callable[..., None]:
    def save_file(tensors: Any, filename: Any, metadata: dict[str, str] | None = None) -> None:
        if metadata not in (None, _METADATA) or not _offer(tensors, filename):
            original(tensors, filename, metadata)

    return save_file


def _datastates_save_file(*args: Any, **kwargs: Any) -> None:
    """Stands for what `_save_file` gives."""


def _replacement(*args: Any, **kwargs: Any) -> None:
    """What the function becomes: its names are looked up in the module of the function."""
    _datastates_save_file(*args, **kwargs)
