"""Types beyond torch's own list that are plain data: numpy's arrays and scalars, and a few of the standard library.

Torch's restricted unpickler makes them while a file is loaded, and forgets them afterwards. None runs code of the file:
constructors of immutable values, and numpy's two functions that make an array or a scalar from bytes. Arrays of
objects stay foreign.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

try:
    import numpy
except ImportError:  # numpy is no dependency of torch; a file that needs it says so
    numpy = None  # type: ignore[assignment]

_NUMPY_FUNCTIONS = ("_reconstruct", "scalar")
_NUMPY_HOMES = ("numpy._core.multiarray", "numpy.core.multiarray")  # since and before numpy 2

_lock = threading.Lock()
_num_users = 0  # guarded by _lock


def _of_the_standard_library() -> Iterator[tuple[Any, str]]:
    for kind in (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone):
        yield kind, f"datetime.{kind.__name__}"
    for home in ("pathlib", "pathlib._local"):  # the second one in pickles of Python 3.13
        for path in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
            yield path, f"{home}.{path.__name__}"
    for builtin in (frozenset, range, slice):
        yield builtin, f"builtins.{builtin.__name__}"


def _of_numpy() -> Iterator[tuple[Any, str]]:
    if numpy is None:
        return
    multiarray = numpy.ndarray.__reduce__(numpy.empty(0))[0].__module__
    module = importlib.import_module(multiarray)
    for home in _NUMPY_HOMES:
        for name in _NUMPY_FUNCTIONS:
            yield getattr(module, name), f"{home}.{name}"
    yield numpy.ndarray, "numpy.ndarray"
    yield numpy.dtype, "numpy.dtype"
    for name, kind in vars(numpy.dtypes).items():
        if name.endswith("DType") and name != "ObjectDType":
            yield kind, f"numpy.dtypes.{name}"


PLAIN_TYPES = (*_of_the_standard_library(), *_of_numpy())
"""What is allowed, each with the name by which a pickle imports it."""


@contextlib.contextmanager
def plain_types_allowed() -> Iterator[None]:
    """Let torch's restricted unpickler make them during the body; several threads may be in it at once."""
    global _num_users
    with _lock:
        _num_users += 1
        if _num_users == 1:
            torch.serialization.add_safe_globals(list(PLAIN_TYPES))
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if _num_users == 0:  # as pairs with a name they are not those that the user may have added
                torch._weights_only_unpickler._remove_safe_globals(list(PLAIN_TYPES))
