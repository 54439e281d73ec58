"""Writes what `stub_pickle` has read, or a part of it, as a pickle again: imports and calls as they were."""

from __future__ import annotations

import io
import pickle
from typing import Any, ClassVar

from datastates.contents.stub_pickle import Call, Global, StorageRef

_PROTOCOL = 2  # what the restricted unpickler of torch reads; of the later opcodes it knows none


#: The pickler of the standard library that is written in Python: only there an import can be of any name.
_PythonPickler: Any = pickle._Pickler


class _SubsetPickler(_PythonPickler):  # type: ignore[misc]
    """Writes imports and calls as they were read."""

    dispatch: ClassVar[dict[type, Any]] = dict(_PythonPickler.dispatch)

    def persistent_id(self, value: object) -> Any:
        return value.pid if isinstance(value, StorageRef) else None

    def save_import(self, value: Global) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def save_made(self, call: Call) -> None:
        if call.kwargs:
            raise pickle.PicklingError(f"{call.class_name} is made with keyword arguments")
        self.save(call.function)
        self.save(call.args)
        self.write(pickle.NEWOBJ if call.is_new else pickle.REDUCE)
        if id(call) in self.memo:  # a part of its arguments refers to it, and has made it on the way
            self.write(pickle.POP + self.get(self.memo[id(call)][0]))
            return
        self.memoize(call)
        if call.elements:
            self._batch_appends(call.elements)
        if call.items:
            self._batch_setitems(call.items.items())
        if call.has_state:
            self.save(call.state)
            self.write(pickle.BUILD)

    dispatch[Global] = save_import
    dispatch[Call] = save_made


def write_pickle(root: Any) -> bytes:
    """The pickle of a structure.

    Raises:
        pickle.PicklingError: it holds what only younger kinds of pickles can say, or is nested too deeply.
    """
    buffer = io.BytesIO()
    try:
        _SubsetPickler(buffer, protocol=_PROTOCOL).dump(root)
    except RecursionError as error:
        raise pickle.PicklingError("the state is nested too deeply") from error
    return buffer.getvalue()
