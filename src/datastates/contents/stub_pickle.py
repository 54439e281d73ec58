"""Reads a pickle without running it: what it would import or call stays a `Global` or a `Call`.

So the structure of a state is known where the classes in it are not, and whatever else the pickle holds does nothing.
Source: ``pickletools`` of the standard library, which describes and decodes every opcode.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LARGEST_KEY = 1000
"""A key of the state has at most so many parts: hashing nested tuples that repeat themselves never ends."""

_MARK = object()


@dataclass(frozen=True, slots=True)
class Global:
    """Something that the pickle imports by name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __call__(self) -> None:
        """Only there because picklers demand a callable."""
        raise pickle.UnpicklingError(f"{self} is not called")


@dataclass(slots=True, eq=False)
class Call:
    """An object that the pickle makes by calling something.

    Attributes:
        function: a `Global`, as a rule.
        args: its arguments.
        is_new: the object is made by ``__new__``; ``kwargs`` are given then, None where the opcode has none.
        state: what ``__setstate__`` or the attributes would get; `has_state` says whether there is any.
        items: members of a subclass of dict.
        elements: elements of a subclass of list, set or the like.
    """

    function: Any
    args: Any
    is_new: bool = False
    kwargs: Any = None
    state: Any = None
    has_state: bool = False
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)

    @property
    def class_name(self) -> str:
        return str(self.function) if isinstance(self.function, Global) else type(self.function).__name__


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """What the pickle says of a storage: its persistent id. Raises nothing if that is of another form."""

    pid: Any


_COMPOUND = (dict, list, tuple, set, frozenset, Call, Global, StorageRef)


@dataclass(frozen=True, slots=True)
class StubPickle:
    """What a pickle says.

    Attributes:
        root: the object, made of dict, list, tuple, set, plain values, `Global`, `Call` and `StorageRef`.
        calls: all calls that unpickling makes, also of objects that do not become part of the root.
        imports: all that it imports.
        nbytes: so many bytes it takes, up to its end.
    """

    root: Any
    calls: list[Call]
    imports: list[Global]
    nbytes: int


def read_pickle(data: bytes) -> Any:
    """The root of `read_whole`.

    Raises:
        pickle.UnpicklingError: the pickle is malformed, or of a kind that no torch writes.
    """
    return read_whole(data).root


def read_whole(data: bytes) -> StubPickle:
    """All that a pickle says. What stands behind its end is not looked at.

    Raises:
        pickle.UnpicklingError: the pickle is malformed, or of a kind that no torch writes.
    """
    machine = _Machine(data)
    try:
        root = machine.run()
    except pickle.UnpicklingError:
        raise
    except (LookupError, MemoryError, OverflowError, RecursionError, TypeError, ValueError, AttributeError) as error:
        raise pickle.UnpicklingError(f"malformed pickle: {error!s:.200}") from error
    return StubPickle(root, machine.calls, list(machine.imports.values()), machine.nbytes)


def objects_in(node: Any) -> Iterator[Any]:
    """The node and all that it is made of, however deep, each object once; plain values are left out."""
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        if not isinstance(current, _COMPOUND) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        if isinstance(current, Call):
            todo += [current.elements, current.items, current.state, current.kwargs, current.args, current.function]
        elif isinstance(current, dict):
            todo += [*current.values(), *current.keys()]
        elif not isinstance(current, (Global, StorageRef)):
            todo += current


class _Machine:
    """The stack and the memo of an unpickler."""

    def __init__(self, data: bytes) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.calls: list[Call] = []
        self.imports: dict[str, Global] = {}
        self.nbytes = 0
        self._data = data

    def run(self) -> Any:
        """Go through the opcodes; the result.

        Those that a tensor consists of are done here, because a state may have hundreds of thousands. Whatever is no
        such opcode, or lacks its argument, goes to `pickletools`, and to a handler.
        """
        data, stack, memo = self._data, self.stack, self.memo
        position = 0
        while True:
            code = data[position]
            if code == _BINGET:
                stack.append(memo[data[position + 1]])
                position += 2
            elif code == _LONG_BINGET:
                stack.append(memo[int.from_bytes(data[position + 1 : position + 5], "little")])
                position += 5
            elif code == _BINPUT:
                memo[data[position + 1]] = self.top()
                position += 2
            elif code == _LONG_BINPUT:
                self.put(int.from_bytes(data[position + 1 : position + 5], "little"))
                position += 5
            elif code == _BINUNICODE:
                end = position + 5 + int.from_bytes(data[position + 1 : position + 5], "little")
                if end >= len(data):
                    raise pickle.UnpicklingError("malformed pickle: it ends within a text")
                stack.append(str(data[position + 5 : end], "utf-8", "surrogatepass"))
                position = end
            elif code == _BININT1:
                stack.append(data[position + 1])
                position += 2
            elif code == _MARK_CODE:
                stack.append(_MARK)
                position += 1
            elif code == _TUPLE:
                stack.append(tuple(self.pop_mark()))
                position += 1
            elif code == _REDUCE:
                _reduce(self, None)
                position += 1
            elif code == _STOP:
                self.nbytes = position + 1
                return self.pop()
            else:
                position = self._step(position, code)

    def _step(self, position: int, code: int) -> int:
        """Do any opcode; where the next one begins."""
        opcode = _OPCODES.get(code)
        handler = None if opcode is None else _HANDLERS.get(opcode.name)
        if opcode is None or handler is None:
            raise pickle.UnpicklingError(f"the opcode {opcode.name if opcode else hex(code)} is not supported")
        if opcode.arg is None:
            handler(self, None)
            return position + 1
        stream = io.BytesIO(self._data)  # shares the bytes
        stream.seek(position + 1)
        handler(self, opcode.arg.reader(stream))
        return stream.tell()

    def put(self, index: int) -> None:
        """Remember the top of the stack. No writer numbers objects higher than a pickle has bytes."""
        if index > len(self._data):
            raise pickle.UnpicklingError(
                f"malformed pickle: number {index} for an object within {len(self._data)} bytes"
            )
        self.memo[index] = self.top()

    def called(self, call: Call) -> None:
        self.calls.append(call)
        self.stack.append(call)

    def pop_mark(self) -> list[Any]:
        position = len(self.stack) - 1
        while self.stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise pickle.UnpicklingError("malformed pickle: there is no mark on the stack")
        items = self.stack[position + 1 :]
        del self.stack[position:]
        return items

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise pickle.UnpicklingError("malformed pickle: a mark stands for a value")
        return value

    def top(self) -> Any:
        if self.stack[-1] is _MARK:
            raise pickle.UnpicklingError("malformed pickle: a mark stands for a value")
        return self.stack[-1]

    def set_items(self, pairs: Sequence[Any]) -> None:
        target = self.top()
        members = target.items if isinstance(target, Call) else target
        if type(members) is not dict or len(pairs) % 2:
            raise pickle.UnpicklingError(f"malformed pickle: items for a {type(target).__name__}")
        for position in range(0, len(pairs), 2):
            members[_checked_key(pairs[position])] = pairs[position + 1]

    def extend(self, items: Sequence[Any]) -> None:
        target = self.top()
        elements = target.elements if isinstance(target, Call) else target
        if type(elements) is not list:
            raise pickle.UnpicklingError(f"malformed pickle: elements for a {type(target).__name__}")
        elements.extend(items)


def _checked_key(key: Any) -> Any:
    count, todo = 0, [key]
    while todo:
        part = todo.pop()
        count += 1
        if count > _LARGEST_KEY:
            raise pickle.UnpicklingError(f"malformed pickle: a key of more than {_LARGEST_KEY} parts")
        if isinstance(part, (tuple, frozenset)):
            todo.extend(part)
    return key


def _push(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _constant(make: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _argument: machine.stack.append(make())


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    def handle(machine: _Machine, _argument: Any) -> None:
        items = tuple(machine.stack[-count:])
        if len(items) != count or _MARK in items:
            raise pickle.UnpicklingError("malformed pickle: a tuple lacks elements")
        del machine.stack[-count:]
        machine.stack.append(items)

    return handle


def _put(machine: _Machine, index: Any) -> None:
    machine.put(len(machine.memo) if index is None else index)


def _get(machine: _Machine, index: Any) -> None:
    machine.stack.append(machine.memo[index])


def _dict(machine: _Machine, _argument: Any) -> None:
    items = machine.pop_mark()
    machine.stack.append({})
    machine.set_items(items)


def _add_items(machine: _Machine, _argument: Any) -> None:
    items = machine.pop_mark()
    target = machine.top()
    if isinstance(target, Call):
        target.elements.extend(items)
    else:
        target.update(map(_checked_key, items))


def _global(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    _import(machine, module, name)


def _stack_global(machine: _Machine, _argument: Any) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        raise pickle.UnpicklingError("malformed pickle: an import without a name")
    _import(machine, module, name)


def _import(machine: _Machine, module: str, name: str) -> None:
    found = Global(module, name)
    machine.stack.append(machine.imports.setdefault(f"{module} {name}", found))


def _reduce(machine: _Machine, _argument: Any) -> None:
    args, function = machine.pop(), machine.pop()
    machine.called(Call(function, args))


def _new(machine: _Machine, _argument: Any) -> None:
    args, kind = machine.pop(), machine.pop()
    machine.called(Call(kind, args, is_new=True))


def _new_with_kwargs(machine: _Machine, _argument: Any) -> None:
    kwargs, args, kind = machine.pop(), machine.pop(), machine.pop()
    machine.called(Call(kind, args, is_new=True, kwargs=kwargs))


def _build(machine: _Machine, _argument: Any) -> None:
    state, target = machine.pop(), machine.top()
    if not isinstance(target, Call):
        raise pickle.UnpicklingError(f"malformed pickle: a state for a {type(target).__name__}")
    target.state, target.has_state = state, True


def _persistent(machine: _Machine, _argument: Any) -> None:
    machine.stack.append(StorageRef(machine.pop()))


_HANDLERS: dict[str, Callable[[_Machine, Any], object]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda _machine, _argument: None),
    **dict.fromkeys(
        (
            *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
            *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINSTRING", "SHORT_BINSTRING"),
        ),
        _push,
    ),
    "NONE": _constant(lambda: None),
    "NEWTRUE": _constant(lambda: True),
    "NEWFALSE": _constant(lambda: False),
    "EMPTY_LIST": _constant(list),
    "EMPTY_TUPLE": _constant(tuple),
    "EMPTY_DICT": _constant(dict),
    "EMPTY_SET": _constant(set),
    "MARK": _constant(lambda: _MARK),
    "POP": lambda machine, _argument: machine.stack.pop(),
    "POP_MARK": lambda machine, _argument: machine.pop_mark(),
    "DUP": lambda machine, _argument: machine.stack.append(machine.top()),
    "LIST": lambda machine, _argument: machine.stack.append(machine.pop_mark()),
    "TUPLE": lambda machine, _argument: machine.stack.append(tuple(machine.pop_mark())),
    "FROZENSET": lambda machine, _argument: machine.stack.append(frozenset(map(_checked_key, machine.pop_mark()))),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "DICT": _dict,
    "APPEND": lambda machine, _argument: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _argument: machine.extend(machine.pop_mark()),
    "SETITEM": lambda machine, _argument: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _argument: machine.set_items(machine.pop_mark()),
    "ADDITEMS": _add_items,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": _put,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "NEWOBJ": _new,
    "NEWOBJ_EX": _new_with_kwargs,
    "BUILD": _build,
    "BINPERSID": _persistent,
}


_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_BINGET, _LONG_BINGET, _BINPUT, _LONG_BINPUT = (_CODES[f"{n}BIN{m}"] for m in ("GET", "PUT") for n in ("", "LONG_"))
_BININT1, _BINUNICODE, _MARK_CODE, _TUPLE = (_CODES[name] for name in ("BININT1", "BINUNICODE", "MARK", "TUPLE"))
_REDUCE, _STOP = _CODES["REDUCE"], _CODES["STOP"]


class StubStructure:
    """How what `read_pickle` gives hangs together (`walk.Structure`): subclasses of dict are containers, too."""

    def children(self, node: Any) -> Sequence[tuple[object, Any]] | None:
        if isinstance(node, dict):
            return list(node.items())
        if isinstance(node, Call):
            return list(node.items.items()) or None
        return list(enumerate(node)) if isinstance(node, (list, tuple)) else None

    def is_sequence(self, node: Any) -> bool:
        return isinstance(node, (list, tuple))

    def rebuilt(self, node: Any, kept: Mapping[int, Any]) -> Any:
        if isinstance(node, (list, tuple)):
            items = [kept.get(position) for position in range(len(node))]
            return items if isinstance(node, list) else tuple(items)
        members = node.items if isinstance(node, Call) else node
        keys = list(members)
        chosen = {keys[position]: child for position, child in kept.items()}
        if not isinstance(node, Call):
            return chosen
        return Call(
            node.function, node.args, node.is_new, node.kwargs, node.state, node.has_state, chosen, node.elements
        )
