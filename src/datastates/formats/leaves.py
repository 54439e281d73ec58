"""Plain values as JSON nodes and back; see `formats.tree` for what a node is."""

from __future__ import annotations

import base64
import collections
import datetime
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import torch

from datastates.formats.torch_names import dtype_named, torch_name, torch_named

Node = Any

#: Factories of ``defaultdict`` that are data rather than code, by name.
FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str, bytes, collections.OrderedDict)
}
_PATHS = {
    kind.__name__: kind
    for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath)
}
_JSON_INTEGERS = range(-(2**63), 2**64)


def to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def string_node(value: str) -> Node:
    """JSON joins two lone surrogates to one character, so a string with any travels as bytes."""
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"str": to_base64(value.encode("utf-8", "surrogatepass"))}
    return value


def string_of(node: Node) -> str:
    """The inverse of `string_node`."""
    return node if isinstance(node, str) else from_base64(node["str"]).decode("utf-8", "surrogatepass")


def _integer(value: int) -> Node:
    """Decimal digits of a very large integer take quadratic time, and Python refuses more than 4300."""
    return value if value in _JSON_INTEGERS else {"int": hex(value)}


def _float(value: float) -> Node:
    """JSON has no infinities and no NaN, whose payload counts, too: those travel as their eight bytes."""
    return value if value - value == 0.0 else {"float": struct.pack(">d", value).hex()}


def _time(value: datetime.time) -> Node:
    clock = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return {"time": [*clock, None if value.tzinfo is None else _zone(value.tzinfo)]}


def _datetime(value: datetime.datetime) -> Node:
    return {"datetime": [[value.year, value.month, value.day], _time(value.timetz())["time"]]}


def _zone(value: datetime.tzinfo) -> list[Node]:
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    return [_delta(offset)["timedelta"], *map(string_node, name)]


def _delta(value: datetime.timedelta) -> dict[str, list[int]]:
    return {"timedelta": [value.days, value.seconds, value.microseconds]}


def _path(value: pathlib.PurePath) -> Node:
    return {"path": [type(value).__name__, string_node(str(value))]}


LEAF_ENCODERS: dict[type, Callable[[Any], Node]] = {
    int: _integer,
    float: _float,
    complex: lambda value: {"complex": struct.pack(">dd", value.real, value.imag).hex()},
    str: string_node,
    bytes: lambda value: {"bytes": to_base64(value)},
    bytearray: lambda value: {"bytearray": to_base64(value)},
    range: lambda value: {"range": [_integer(part) for part in (value.start, value.stop, value.step)]},
    type(Ellipsis): lambda _value: {"ellipsis": True},
    torch.Size: lambda value: {"size": list(value)},
    torch.dtype: lambda value: {"dtype": torch_name(value)},
    torch.layout: lambda value: {"layout": torch_name(value)},
    torch.memory_format: lambda value: {"memory_format": torch_name(value)},
    torch.device: lambda value: {"device": str(value)},
    datetime.date: lambda value: {"date": [value.year, value.month, value.day]},
    datetime.timedelta: _delta,
    datetime.timezone: lambda value: {"timezone": _zone(value)},
    **dict.fromkeys(_PATHS.values(), _path),
}


def has_plain_zone(value: datetime.time | datetime.datetime) -> bool:
    """Whether `encode_instant` can hold the value: zones other than ``datetime.timezone`` are code."""
    return value.tzinfo is None or type(value.tzinfo) is datetime.timezone


def encode_instant(value: datetime.time | datetime.datetime) -> Node:
    """The node of a time or a datetime with a plain zone."""
    return _datetime(value) if isinstance(value, datetime.datetime) else _time(value)


def _integer_of(node: Node) -> int:
    return node if isinstance(node, int) else int(node["int"], 16)


def _zone_of(node: list[Node]) -> datetime.timezone:
    return datetime.timezone(datetime.timedelta(*node[0]), *map(string_of, node[1:]))


def _time_of(node: list[Node]) -> datetime.time:
    hour, minute, second, microsecond, fold, zone = node
    return datetime.time(hour, minute, second, microsecond, None if zone is None else _zone_of(zone), fold=fold)


def _complex_of(text: str) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(text)))


LEAF_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "complex": _complex_of,
    "str": lambda text: string_of({"str": text}),
    "bytes": from_base64,
    "bytearray": lambda text: bytearray(from_base64(text)),
    "range": lambda parts: range(*map(_integer_of, parts)),
    "ellipsis": lambda _value: ...,
    "size": torch.Size,
    "dtype": dtype_named,
    "layout": torch_named(torch.layout),
    "memory_format": torch_named(torch.memory_format),
    "device": torch.device,
    "date": lambda parts: datetime.date(*parts),
    "datetime": lambda parts: datetime.datetime.combine(datetime.date(*parts[0]), _time_of(parts[1])),
    "time": _time_of,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "timezone": _zone_of,
    "path": lambda parts: _PATHS[parts[0]](string_of(parts[1])),
}
