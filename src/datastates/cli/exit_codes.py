"""The exit code of each kind of error: a stable part of the command line, listed in docs/cli.md."""

from __future__ import annotations

import pickle
from enum import Enum

from datastates.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DataStatesError,
    StateError,
    WaitTimeoutError,
)

SUCCESS = 0
NEGATIVE = 1
"""The command ran, and its answer is no: something is wrong or different."""

USAGE = 2
"""Wrong arguments. Source: click, ``UsageError.exit_code``."""

DEFECT = 70
"""An error that this package does not raise on purpose. Source: sysexits.h, ``EX_SOFTWARE``."""

INTERRUPTED = 130
"""Stopped by Ctrl-C. Source: the shells' 128 + the number of the signal."""

BY_ERROR: tuple[tuple[type[BaseException], int, str], ...] = (
    (ConfigError, 3, "a setting or a config file is wrong"),
    (CheckpointNotFoundError, 4, "there is no complete checkpoint, or no such file"),
    (CorruptCheckpointError, 5, "a checkpoint is damaged"),
    (pickle.UnpicklingError, 6, "a file holds more than plain data, which is not loaded"),
    (StateError, 7, "a state cannot be written in the form that was asked for"),
    (WaitTimeoutError, 8, "the time was up"),
    (OSError, 9, "storage refuses: no permission, no room, no such folder, a device error"),
    (DataStatesError, 10, "another error of datastates"),
)
"""Exit code by class, the first that fits; and what it means."""


class Fault(Enum):
    """What can be wrong with a checkpoint on the disk, the worst first."""

    INCOMPLETE = "incomplete"
    RECORDS = "records"
    MISSING = "missing"
    SIZE = "size"
    UNREADABLE = "unreadable"
    DAMAGED = "damaged"

    @property
    def exit_code(self) -> int:
        return _BY_FAULT[self][0]

    @property
    def meaning(self) -> str:
        return _BY_FAULT[self][1]


_BY_FAULT = {
    Fault.INCOMPLETE: (4, "a checkpoint was never completed"),
    Fault.RECORDS: (11, "the records of a checkpoint are missing or damaged"),
    Fault.MISSING: (12, "a file of a checkpoint is missing"),
    Fault.SIZE: (13, "a file of a checkpoint has the wrong size"),
    Fault.UNREADABLE: (9, "a file of a checkpoint cannot be read"),
    Fault.DAMAGED: (5, "bytes of a checkpoint are not those that were saved"),
}


def exit_code_of(error: BaseException) -> int:
    """The code that a command ends with when this error leaves it."""
    return next((code for kind, code, _ in BY_ERROR if isinstance(error, kind)), DEFECT)


def is_expected(error: BaseException) -> bool:
    """Whether the error is one that says by itself what is wrong, rather than a defect."""
    return exit_code_of(error) != DEFECT
