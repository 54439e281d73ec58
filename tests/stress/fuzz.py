"""Files that are nearly right: valid ones, changed at random where it hurts, each loaded in one of all ways.

Everything follows from a number, so that what was found once is found again. A loader may give a state or one of
`REFUSALS`; anything else is a fault of the loader, and so are much memory and much time.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import resource
import struct
import time
import traceback
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from datastates import list_file, load
from datastates.errors import CorruptCheckpointError, ForeignObjectError, MismatchError
from datastates.formats import plan
from datastates.state import capture_host, default_is_eager
from formats.images import image_of

REFUSALS = (CorruptCheckpointError, ForeignObjectError, MismatchError, pickle.UnpicklingError)
"""`MismatchError` only with ``keys`` and ``into``: a name may be what was changed."""

CPU_SECONDS = 2.0
"""No file of a few kilobytes may take longer, whatever it says."""

_LENGTHS = (0, 1, 7, 255, 4095, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
_DEPTHS = (10, 30, 100, 300, 1000, 2000) * 8 + (100_000,)
"""The deepest ones take most of the time, and all fail alike: few of them leave time for many others."""


def make_state() -> dict[str, Any]:
    weight = torch.arange(24, dtype=torch.float32).view(4, 6)
    return {
        "model": OrderedDict({"w": weight, "tied": weight, "t": weight[1:3].t(), "b": torch.ones(3).bfloat16()}),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "m": weight + 1}}, "groups": [{"lr": 0.1}]},
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "values": (1, "text", None, True, b"bytes", 2**70, 1.5, {3, 4}, [[], {}]),
    }


def corpus() -> list[bytes]:
    """The valid files: of both formats, and of torch.save."""
    state = make_state()
    found = [image_of(plan(state, kind, capture_host, default_is_eager(50))) for kind in ("torch", "safetensors")]
    theirs = io.BytesIO()
    torch.save(state, theirs)
    foreign = io.BytesIO()
    torch.save({"x": torch.ones(2), "args": Path("a")}, foreign)
    flat = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    return [*found, theirs.getvalue(), foreign.getvalue(), struct.pack("<Q", len(flat)) + flat + bytes(24)]


def changed(data: bytes, seed: int) -> bytes:
    """A file that is not quite ``data``."""
    rng = random.Random(seed)
    is_zip = data.startswith(b"PK")
    kinds: list[Callable[[bytes, random.Random], bytes]] = [_bits, _bits, _cut, _spliced, _numbers]
    kinds += [_pickle_bits, _pickle_bits, _pickle_bomb, _entry_twice] if is_zip else [_header, _header, _header_bomb]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(kinds)(data, rng)
    return data


def attempt(path: Path, data: bytes, seed: int) -> str:
    """Load a file in a way that follows from the seed; the name of how it was refused, or ``"loaded"``.

    Raises:
        Exception: whatever else the loader raised.
    """
    path.write_bytes(data)
    way, is_checked = seed % 5, seed % 2 == 0
    try:
        if way in (0, 1):
            load(path, check=is_checked)
        elif way == 2:
            load(path, keys=["model", "optimizer.state.0.step"], check=is_checked)
        elif way == 3:
            load(path, into={"model": {"w": torch.zeros(4, 6), "t": torch.zeros(6, 2)}}, strict=False, check=is_checked)
        else:
            list_file(path)
    except REFUSALS as error:
        return type(error).__name__
    except RuntimeError as error:
        if "don't know how to restore data location" not in str(error):
            raise
        return "RuntimeError of a device that is not here"  # the file says where each storage was
    return "loaded"


@dataclass
class Outcome:
    """What came of many files: how often each answer, the faults by seed, and the most memory."""

    answers: Counter[str] = field(default_factory=Counter)
    faults: dict[int, str] = field(default_factory=dict)
    peak_nbytes: int = 0

    def add(self, other: Outcome) -> None:
        self.answers += other.answers
        self.faults |= other.faults
        self.peak_nbytes = max(self.peak_nbytes, other.peak_nbytes)


def run(seeds: Iterable[int], path: Path, begin: Callable[[int], None] = lambda _seed: None) -> Outcome:
    """Try the files of some seeds, one after the other; ``begin`` hears of each before it is tried."""
    files, outcome = corpus(), Outcome()
    for seed in seeds:
        begin(seed)
        cpu = time.process_time()
        try:
            outcome.answers[attempt(path, changed(files[seed % len(files)], seed), seed // len(files))] += 1
        except Exception as error:  # noqa: BLE001  # that is what is looked for
            outcome.faults[seed] = "".join(traceback.format_exception(error)[-3:])
        cpu = time.process_time() - cpu
        if cpu > CPU_SECONDS:
            outcome.faults[seed] = f"took {cpu:.1f} s of processor time"
    path.unlink(missing_ok=True)
    outcome.peak_nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return outcome


def _bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    return rng.choice((data[:place], data[place:], data + data[:place], data[:place] + bytes(rng.randrange(200))))


def _spliced(data: bytes, rng: random.Random) -> bytes:
    """A part moved, doubled, or left out."""
    begin, end, place = (rng.randrange(len(data) + 1) for _ in range(3))
    part = data[min(begin, end) : max(begin, end)][:300]
    rest = data[: min(begin, end)] + data[min(begin, end) + len(part) :]
    return rng.choice((rest, data[:place] + part + data[place:], rest[:place] + part + rest[place:]))


def _numbers(data: bytes, rng: random.Random) -> bytes:
    """A number of two, four or eight bytes becomes a telling one, as a rule in the last part, where directories are."""
    changed = bytearray(data)
    width = rng.choice((2, 4, 4, 8))
    if len(changed) <= width:
        return data
    first = rng.choice((0, max(0, len(changed) - 1500)))
    place = rng.randrange(first, len(changed) - width + 1)
    changed[place : place + width] = (rng.choice(_LENGTHS) % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(changed)


def _with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The same archive, sound again, with another pickle."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            content = {info.filename: archive.read(info) for info in archive.infolist()}
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, RuntimeError, struct.error):
        return data  # it is damaged already
    except Exception as error:  # noqa: BLE001  # the zipfile of the standard library on a damaged archive
        assert not isinstance(error, AssertionError)
        return data
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, value in content.items():
            archive.writestr(name, change(value) if name.endswith("data.pkl") else value)
    return made.getvalue()


def _pickle_bits(data: bytes, rng: random.Random) -> bytes:
    return _with_pickle(data, lambda pickled: rng.choice((_bits, _bits, _spliced, _numbers))(pickled, rng))


def _pickle_bomb(data: bytes, rng: random.Random) -> bytes:
    depth = rng.choice(_DEPTHS)
    bombs = [
        b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".",
        b"\x80\x02" + b"K\x01" + b"\x85" * depth + b".",
        b"\x80\x02" + b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(40)) + b".",
        b"\x80\x02)q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60)) + b"}h\x3cK\x01s.",
        b"\x80\x02cbuiltins\nbytearray\n" + b"\x8a\x06" + (2**41).to_bytes(6, "little") + b"\x85R.",
        b"\x80\x02]r" + rng.choice(_LENGTHS[6:9]).to_bytes(4, "little") + b".",
        b"\x80\x02X" + rng.choice(_LENGTHS[6:9]).to_bytes(4, "little") + b"abc.",
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
    ]
    bomb = rng.choice(bombs)
    return _with_pickle(data, lambda _pickled: bomb)


def _entry_twice(data: bytes, rng: random.Random) -> bytes:
    """The directory names an entry again, or one at the place of another."""
    place = data.rfind(b"PK\1\2", 0, rng.randrange(len(data) + 1))
    if place < 0:
        return data
    entry = data[place : place + 46 + 30]
    other = data.find(b"PK\1\2")
    changed = bytearray(data)
    changed[other + 42 : other + 46] = entry[42:46]
    return rng.choice((data[:place] + entry + data[place:], bytes(changed)))


def _header(data: bytes, rng: random.Random) -> bytes:
    """One value of the header, or of the tree in it, becomes another."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        metadata = header.get("__metadata__", {})
        if "datastates" in metadata and rng.random() < 0.6:
            tree = json.loads(metadata["datastates"])
            _change_value(tree, rng)
            metadata["datastates"] = json.dumps(tree)
        else:
            _change_value(header, rng)
        text = json.dumps(header).encode()
    except (ValueError, AttributeError, TypeError, RecursionError, KeyError):
        return data
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _change_value(node: Any, rng: random.Random) -> None:
    """Go down at random, and replace what is there."""
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        if not keys:
            return
        key = rng.choice(list(keys))
        child = node[key]
        if isinstance(child, (dict, list)) and child and rng.random() < 0.85:
            node = child
            continue
        values = [None, True, -1, 0.5, "", "F32", "bool", [], {}, [0, 2**60], [[]], {"tensor": 0}, {"int": "z"}]
        values += [*_LENGTHS, child, {"dict": [[child, child]]}, {"tuple": [child]}, {"array": ["<f8", [2**40], ""]}]
        node[key] = rng.choice(values)
        return


def _header_bomb(data: bytes, rng: random.Random) -> bytes:
    depth = rng.choice(_DEPTHS)
    node = b"[" * depth + b"]" * depth
    tree = b'{"version":1,"tensors":[],"root":' + node + b"}"
    texts = [
        b'{"a":' + node + b"}",
        json.dumps({"__metadata__": {"datastates": tree.decode()}}).encode(),
        b'{"a":' * depth + b"1" + b"}" * depth,
        b'{"a":{"dtype":"U8","shape":[' + b"9" * min(depth, 5000) + b'],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":' + json.dumps([0] + [2**62] * 8).encode() + b',"data_offsets":[0,0]}}',
    ]
    text = rng.choice(texts)
    return rng.choice((len(text), len(text), *_LENGTHS)).to_bytes(8, "little") + text + data[-24:]
