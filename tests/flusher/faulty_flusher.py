"""A flusher process in which system calls misbehave: ``python faulty_flusher.py SPEC SETTINGS``.

SPEC is JSON: a list of rules ``{"call": "pwrite", "then": what, ...}``, or the path of a file that holds such a list
and may be replaced at any time (counts begin anew then). A rule counts the calls that it applies to and acts from
number ``first`` (default 0) for ``times`` calls (default: all that follow). What it does:

- an errno's name: the call fails with it
- ``"short"``: a write stores only ``nbytes``
- ``"zero"``: a write stores nothing and says so
- ``"kill"``: SIGKILL instead of the call
- ``"killafter"``: SIGKILL after the call
- ``"slow"``: the call takes ``seconds`` longer
- ``"hold"``: the call waits until somebody writes to the FIFO ``gate``

``call``: a function of `os`, or ``flock``, or ``read`` (a small file is opened for reading). Which calls it applies to:

- ``only``: those with this text in an argument; a descriptor counts with the path that it is open for
- ``ends``: those of which the last argument, or that path, ends so
- ``after``: those that come after a file was renamed of which a path holds this text
- ``once``: a path; the rule acts in the first process that can create this file, and in no other

``met``: a path that is created when the rule acts.

With a file of rules the process is impatient: what it would try again for seconds it tries again for milliseconds.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from datastates import directories, locks, system_calls
from datastates.flusher import committer
from datastates.flusher.process import main

CALLS = (
    "open posix_fallocate fstatvfs pwrite ftruncate fsync replace unlink mkdir listdir scandir rmdir fchmod flock read"
)
_open, _stat, _close, _readlink = os.open, os.stat, os.close, os.readlink
_takes_descriptor = {"posix_fallocate", "fstatvfs", "pwrite", "ftruncate", "fsync", "fchmod", "flock"}


class Rules:
    """The rules in force and how often each has applied, for all threads."""

    def __init__(self, spec: str) -> None:
        self._lock = threading.Lock()
        self._path = spec if spec.startswith("/") else None
        self._seen: tuple[int, int] | None = None
        self._rules: list[dict[str, Any]] = [] if self._path else json.loads(spec)

    def match(self, name: str, arguments: tuple[Any, ...]) -> dict[str, Any] | None:
        """The rule that acts on this call, None when it shall go through."""
        with self._lock:
            self._read()
            for rule in self._rules:
                if name == "replace" and rule.get("after", "\n") in text_of(name, arguments):
                    del rule["after"]
            return next((rule for rule in self._rules if rule["call"] == name and self._acts(rule, arguments)), None)

    def _read(self) -> None:
        if self._path is None:
            return
        status = _stat(self._path)
        if self._seen != (status.st_ino, status.st_mtime_ns):
            self._seen = (status.st_ino, status.st_mtime_ns)
            descriptor = _open(self._path, os.O_RDONLY)
            self._rules = json.loads(os.read(descriptor, status.st_size))
            _close(descriptor)

    def _acts(self, rule: dict[str, Any], arguments: tuple[Any, ...]) -> bool:
        if "after" in rule:
            return False
        if not {"only", "ends"}.isdisjoint(rule):
            text = text_of(rule["call"], arguments)
            if rule.get("only", "") not in text or not text.endswith(rule.get("ends", "")):
                return False
        number = rule.get("count", 0)
        rule["count"] = number + 1
        first = rule.get("first", 0)
        if not first <= number < first + rule.get("times", sys.maxsize) or not claim(rule):
            return False
        if "met" in rule:
            _close(_open(rule["met"], os.O_CREAT))
        return True


def text_of(name: str, arguments: tuple[Any, ...]) -> str:
    texts = [argument for argument in arguments if isinstance(argument, str)]
    if name in _takes_descriptor:
        texts.append(_readlink(f"/proc/self/fd/{arguments[0]}"))
    return " ".join(texts)


def claim(rule: dict[str, Any]) -> bool:
    if "once" not in rule:
        return True
    try:
        _close(_open(rule["once"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def wrap(name: str, original: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        rule = rules.match(name, arguments)
        if rule is None:
            return original(*arguments, **options)
        then = rule["then"]
        if then == "zero":
            return 0
        if then == "short":
            descriptor, data, offset = arguments
            return original(descriptor, memoryview(data)[: rule["nbytes"]], offset)
        if then == "slow":
            time.sleep(rule["seconds"])
            return original(*arguments, **options)
        if then == "hold":
            _close(_open(rule["gate"], os.O_RDONLY))  # waits for a writer
            return original(*arguments, **options)
        if then == "killafter":
            original(*arguments, **options)
        if then in ("kill", "killafter"):
            os.kill(os.getpid(), signal.SIGKILL)
        code = getattr(errno, then)
        raise OSError(code, os.strerror(code), arguments[0] if isinstance(arguments[0], str) else None)

    return call


def install(rules: Rules) -> None:
    for name in CALLS.split():
        owner, attribute = {"flock": (fcntl, "flock"), "read": (builtins, "open")}.get(name, (os, name))
        setattr(owner, attribute, wrap(name, getattr(owner, attribute), rules))


if __name__ == "__main__":
    if sys.argv[1].startswith("/"):
        system_calls.RETRY_SECONDS = 0.0005
        locks._TIMEOUT_SECONDS = 0.01
        directories._TRIES = 4
        committer._FIRST_POLL_SECONDS = 0.001
    install(Rules(sys.argv[1]))
    main(sys.argv[2:])
