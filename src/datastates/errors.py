"""The exceptions of datastates.

::

    DataStatesError
    ├── ConfigError            (ValueError)      a setting is unknown, of the wrong type or out of range
    ├── StateError             (TypeError)       a leaf of the state cannot be saved; names its fqn
    ├── ClosedError            (RuntimeError)    the object was closed, or belongs to another process
    ├── ReentranceError        (RuntimeError)    a signal handler has called what it has interrupted
    ├── TornSnapshotError      (RuntimeError)    a tensor changed between save() and its copy
    ├── GraphCaptureError      (RuntimeError)    a save, or a wait for one, in the midst of recording a graph
    ├── HostCacheError         (MemoryError)     the host cache cannot be made as large as asked
    ├── SaveSkippedError       (RuntimeError)    a save was not made, or was dropped, as ``when_busy`` asks
    ├── StorageError           (OSError)         a file could not be written; carries path, errno, rank, tag
    ├── FlusherDiedError       (RuntimeError)    the flusher process ended and could not be replaced
    ├── ProtocolError          (ValueError)      trainer and flusher do not understand each other
    ├── CommitError            (RuntimeError)    a checkpoint was not committed; names ranks and causes
    ├── WaitTimeoutError       (TimeoutError)    a wait ended before what it waited for
    ├── MismatchError          (LookupError)     names or shapes asked for are not those of the file; lists them
    ├── TopologyError          (RuntimeError)    a checkpoint does not fit these ranks or this model
    ├── CheckpointNotFoundError (FileNotFoundError)  no (complete) checkpoint where one was asked for
    ├── ForeignObjectError     (UnpicklingError) a leaf is no plain data and was not, or cannot be, loaded
    └── CorruptCheckpointError (ValueError)      a file's structure, size or checksum is wrong

Every leaf is a builtin exception, too, where one fits, can be pickled, and names in its message what
failed, where, what was found and what was expected, and what to do about it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping


class DataStatesError(Exception):
    """Root of every exception that this package raises on purpose."""


class ConfigError(DataStatesError, ValueError):
    """A setting is unknown, of the wrong type, or out of range."""


class StateError(DataStatesError, TypeError):
    """A leaf of the state cannot be saved.

    Attributes:
        fqn: dotted name of the leaf, empty when it is not known.
    """

    def __init__(self, message: str, fqn: str = "") -> None:
        super().__init__(message, fqn)
        self.fqn = fqn

    def __str__(self) -> str:
        return str(self.args[0])


class ClosedError(DataStatesError, RuntimeError):
    """The object was closed, or is used in a process that did not make it."""


class ReentranceError(DataStatesError, RuntimeError):
    """A signal handler called into a save that is half made: it has interrupted it. Nothing was done."""

    ADVICE = (
        "a signal handler has interrupted a save, and cannot save, wait or close before that is made: let it set a "
        "flag, and save at the next step (Checkpointer.preemption does)"
    )


class TornSnapshotError(DataStatesError, RuntimeError):
    """A tensor was changed between ``save()`` and the copy of its bytes.

    Attributes:
        fqns: dotted names of the tensors that changed.
    """

    def __init__(self, message: str, fqns: tuple[str, ...] = ()) -> None:
        super().__init__(message, fqns)
        self.fqns = fqns

    def __str__(self) -> str:
        return str(self.args[0])


class GraphCaptureError(DataStatesError, RuntimeError):
    """``save()`` was called, or a save waited for, while the device's current stream was recording a graph."""


class SaveSkippedError(DataStatesError, RuntimeError):
    """A save was not made, or was dropped for a younger one, because earlier ones were in flight (``when_busy``)."""


class HostCacheError(DataStatesError, MemoryError):
    """The host cache cannot be made as large as the configuration asks."""


class StorageError(DataStatesError, OSError):
    """A file of a checkpoint could not be written, made durable, or published.

    Attributes:
        errno: the operating system's error number, None where it was not the system's word.
        path: the file or directory concerned.
        rank: the rank whose part failed, None where no rank is concerned.
        tag: the checkpoint's, empty for a lone file or where it is not known yet.
    """

    def __init__(
        self, message: str, errno: int | None = None, path: str = "", rank: int | None = None, tag: str = ""
    ) -> None:
        super().__init__(message, errno, path, rank, tag)
        self.message = message
        self.errno = errno
        self.path = path
        self.rank = rank
        self.tag = tag

    def __str__(self) -> str:
        where = [] if self.rank is None else [f"rank {self.rank}"]
        where += [f"checkpoint {self.tag!r}"] if self.tag else []
        return f"{self.message} ({', '.join(where)})" if where else self.message

    def __reduce__(self) -> tuple[type[StorageError], tuple[object, ...]]:
        return type(self), (self.message, self.errno, self.path, self.rank, self.tag)


class FlusherDiedError(DataStatesError, RuntimeError):
    """The flusher process ended, and no other could take over its work."""


class ProtocolError(DataStatesError, ValueError):
    """A message between trainer and flusher is unknown, malformed, or out of order."""


class CommitError(DataStatesError, RuntimeError):
    """A checkpoint was not committed because the part of at least one rank is missing or failed.

    Attributes:
        ranks: cause by rank, as far as known.
        tag: the checkpoint's, where it is known.
    """

    def __init__(self, message: str, ranks: Mapping[int, str] | None = None, tag: str = "") -> None:
        self.ranks = dict(ranks or {})
        self.tag = tag
        super().__init__(message, self.ranks, tag)

    def __str__(self) -> str:
        return f"checkpoint {self.tag!r}: {self.args[0]}" if self.tag else str(self.args[0])


class WaitTimeoutError(DataStatesError, TimeoutError):
    """A wait ended before what it waited for; the work itself goes on."""


class TopologyError(DataStatesError, RuntimeError):
    """A checkpoint cannot be brought to this number of ranks, or to this model, or into this layout."""


class MismatchError(DataStatesError, LookupError):
    """What a file holds and what it is to be loaded into, or what was asked for, do not fit. Nothing was changed.

    Attributes:
        missing: fqns of the tensors that were asked for, and are not in the file.
        unexpected: fqns of the tensors of the file that nobody asked for.
        mismatched: what is wrong, by fqn, with tensors that are on both sides.
    """

    def __init__(
        self,
        message: str,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        self.missing = missing
        self.unexpected = unexpected
        self.mismatched = dict(mismatched or {})
        super().__init__(message, missing, unexpected, self.mismatched)

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointNotFoundError(DataStatesError, FileNotFoundError):
    """There is no complete checkpoint where one was asked for."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __str__(self) -> str:
        return str(self.args[0])


class ForeignObjectError(DataStatesError, pickle.UnpicklingError):
    """A leaf is no plain data: loading it runs code, which was not asked for or failed.

    Attributes:
        fqn: dotted name of the leaf.
        class_name: module and name of its class.
    """

    def __init__(self, message: str, fqn: str = "", class_name: str = "") -> None:
        super().__init__(message, fqn, class_name)
        self.fqn = fqn
        self.class_name = class_name

    def __str__(self) -> str:
        return str(self.args[0])


class CorruptCheckpointError(DataStatesError, ValueError):
    """The structure, the size or a checksum of a file is wrong.

    Attributes:
        path: the file.
        fqn: the tensor concerned, empty when it is not one tensor.
        offset: byte offset from the start of the file, None when it is not one place.
    """

    def __init__(self, message: str, path: str = "", fqn: str = "", offset: int | None = None) -> None:
        super().__init__(message, path, fqn, offset)
        self.path = path
        self.fqn = fqn
        self.offset = offset

    def __str__(self) -> str:
        return str(self.args[0])
