"""Functions that read a checkpoint's files by themselves: they wait for the saves in flight first.

``torch.load`` waits only where the file that it is asked for is in flight in this process. The functions of DeepSpeed
wait for all saves; whoever calls one of them has imported it by name as a rule, long before this package's engine is
made. So it is not the name that is replaced but the code of the function, which all references share.

Source: deepspeed 0.19.8, utils/zero_to_fp32.py, where all ways to read a checkpoint go through one function, and
checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from datastates.integrations.agreement import settle
from datastates.saver import open_savers

_MARK = "_is_of_datastates"


def repair() -> None:
    """Make the functions wait until every save of this process is committed, or has failed; idempotent."""
    if not hasattr(torch.load, _MARK):
        torch.load = torch.serialization.load = _load(torch.load)
    for function in (get_fp32_state_dict_from_zero_checkpoint, ds_to_universal.main):
        _drain(function)


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)) and any(saver.has_in_flight(os.fspath(f)) for saver in open_savers()):
            settle()
        return original(f, *args, **kwargs)

    setattr(load, _MARK, True)
    return load


def _drain(function: types.FunctionType) -> None:
    """Give a function without a closure, of which there is one per module, the code of `_settled`."""
    names = function.__globals__
    if "_datastates_original" in names:
        return
    original = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    names["_datastates_settle"], names["_datastates_original"] = settle, original
    function.__code__, function.__defaults__, function.__kwdefaults__ = _settled.__code__, None, None


def _datastates_settle() -> None:
    """Stands for `settle`."""


def _datastates_original(*args: Any, **kwargs: Any) -> Any:
    """Stands for the function as it was."""


def _settled(*args: Any, **kwargs: Any) -> Any:
    """What the function becomes: its names are looked up in the module of the function."""
    _datastates_settle()
    return _datastates_original(*args, **kwargs)
