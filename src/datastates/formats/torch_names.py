"""Names of torch's own constants: dtypes, layouts, memory formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Constant = TypeVar("Constant")


def torch_name(value: object) -> str:
    """``torch.sparse_coo`` as ``"sparse_coo"``."""
    return str(value).removeprefix("torch.")


def torch_named(kind: type[Constant]) -> Callable[[str], Constant]:
    """A function from a name to the object of that name in torch, which must be of the given kind.

    The function raises ValueError where this torch has none.
    """

    def named(name: str) -> Constant:
        value = getattr(torch, name, None)
        if not isinstance(value, kind):
            raise ValueError(f"torch {torch.__version__} has no {kind.__name__} named {name!r}")
        return value

    return named


dtype_named = torch_named(torch.dtype)
"""The dtype of a name, as `torch_name` gives it."""
