"""Every error survives the way between processes, is a builtin, too, and stands in the tree that the module draws."""

from __future__ import annotations

import copy
import errno
import pickle
import re

import pytest

from datastates import errors
from datastates.errors import (
    CheckpointNotFoundError,
    ClosedError,
    CommitError,
    ConfigError,
    CorruptCheckpointError,
    DataStatesError,
    FlusherDiedError,
    ForeignObjectError,
    GraphCaptureError,
    HostCacheError,
    MismatchError,
    ProtocolError,
    ReentranceError,
    SaveSkippedError,
    StateError,
    StorageError,
    TopologyError,
    TornSnapshotError,
    WaitTimeoutError,
)

EXAMPLES = [
    (ConfigError("num_writers is 0"), ValueError, {}),
    (StateError("cannot save a lambda", "model.act"), TypeError, {"fqn": "model.act"}),
    (StateError("cannot save a lambda"), TypeError, {"fqn": ""}),
    (ClosedError("the engine was closed"), RuntimeError, {}),
    (ReentranceError("a handler has called what it has interrupted"), RuntimeError, {}),
    (TornSnapshotError("2 tensors changed", ("a.w", "a.b")), RuntimeError, {"fqns": ("a.w", "a.b")}),
    (GraphCaptureError("the current stream is recording a graph"), RuntimeError, {}),
    (HostCacheError("no room for 4 GiB"), MemoryError, {}),
    (
        StorageError("cannot write /x/a.pt: No space left on device", errno.ENOSPC, "/x/a.pt", 3),
        OSError,
        {"errno": errno.ENOSPC, "path": "/x/a.pt", "rank": 3},
    ),
    (StorageError("a write of 0 bytes"), OSError, {"errno": None, "path": "", "rank": None, "tag": ""}),
    (StorageError("short", None, "/x", 1, "s1"), OSError, {"errno": None, "path": "/x", "rank": 1, "tag": "s1"}),
    (FlusherDiedError("ended 3 times"), RuntimeError, {}),
    (
        CommitError("rank 1 failed", {1: "disk full", 0: "timeout"}, "s1"),
        RuntimeError,
        {"ranks": {1: "disk full", 0: "timeout"}, "tag": "s1"},
    ),
    (SaveSkippedError("2 saves are in flight"), RuntimeError, {}),
    (ProtocolError("unknown message 77"), ValueError, {}),
    (CommitError("not committed"), RuntimeError, {"ranks": {}}),
    (TopologyError("/x was saved by 2 ranks"), RuntimeError, {}),
    (
        MismatchError("names differ in /x", ("a",), ("b",), {"c": "has shape 2"}),
        LookupError,
        {"missing": ("a",), "unexpected": ("b",), "mismatched": {"c": "has shape 2"}},
    ),
    (WaitTimeoutError("waited 5 s for a slab"), TimeoutError, {}),
    (CheckpointNotFoundError("nothing at /x"), FileNotFoundError, {}),
    (
        CorruptCheckpointError("checksum differs", "/x/a.pt", "w", 4096),
        ValueError,
        {"path": "/x/a.pt", "fqn": "w", "offset": 4096},
    ),
    (
        ForeignObjectError("train.args is no plain data", "train.args", "argparse.Namespace"),
        pickle.UnpicklingError,
        {"fqn": "train.args", "class_name": "argparse.Namespace"},
    ),
    (CorruptCheckpointError("truncated"), ValueError, {"path": "", "fqn": "", "offset": None}),
    (DataStatesError("something"), Exception, {}),
]


def classes():
    return {
        member
        for member in vars(errors).values()
        if isinstance(member, type) and issubclass(member, Exception) and member.__module__ == errors.__name__
    }


def test_every_error_has_an_example():
    assert {type(error) for error, _, _ in EXAMPLES} == classes()


@pytest.mark.parametrize(("error", "builtin", "attributes"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_message_builtin_and_attributes(error, builtin, attributes):
    assert isinstance(error, builtin) and isinstance(error, DataStatesError)
    assert {name: getattr(error, name) for name in attributes} == attributes
    form = r"(checkpoint '\w+': )?[\w /.:]+( \(rank \d+(, checkpoint '\w+')?\))?"
    assert re.fullmatch(form, str(error)), "the message and whom it concerns, no tuple of arguments"


@pytest.mark.parametrize("remake", [copy.copy, *(lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in range(6))])
@pytest.mark.parametrize(("error", "builtin", "attributes"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_survives_pickling_and_copying(error, builtin, attributes, remake):
    again = remake(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert {name: getattr(again, name) for name in attributes} == attributes


def test_the_tree_of_the_module_is_the_real_one():
    drawn = dict(re.findall(r"[├└]── (\w+)\s+\((\w+)\)", errors.__doc__))
    real = {cls.__name__: cls.__mro__ for cls in classes() if cls is not DataStatesError}
    assert set(drawn) == set(real)
    for name, builtin in drawn.items():
        assert next(cls.__name__ for cls in real[name] if cls.__module__ != errors.__name__) == builtin, name


def test_ranks_of_a_commit_error_are_its_own():
    ranks = {0: "disk full"}
    error = CommitError("rank 0 failed", ranks)
    ranks[1] = "another"
    assert error.ranks == {0: "disk full"}
