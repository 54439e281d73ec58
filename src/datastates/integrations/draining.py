"""Functions of DeepSpeed that read a checkpoint's files by themselves: they wait for the saves in flight first.

Whoever calls one of them has imported it by name as a rule, long before this package's engine is made. So it is not the
name that is replaced but the code of the function, which all references share.

Source: deepspeed 0.19.8, utils/zero_to_fp32.py, where all ways to read a checkpoint go through one function, and
checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import types
from typing import Any

from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from datastates.integrations.agreement import settle


def repair() -> None:
    """Make the functions wait until every save of this process is committed, or has failed; idempotent."""
    for function in (get_fp32_state_dict_from_zero_checkpoint, ds_to_universal.main):
        _drain(function)


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
