"""A flusher process in which system calls misbehave: ``python faulty_flusher.py SPEC SETTINGS``.

SPEC is JSON: a list of rules ``{"call": "pwrite", "then": what, ...}``. A rule counts the calls that it applies
to and acts from number ``first`` (default 0) for ``times`` calls (default: all that follow). What it does:

- an errno's name: the call fails with it
- ``"short"``: a write stores only ``nbytes``
- ``"zero"``: a write stores nothing and says so
- ``"kill"``: SIGKILL instead of the call
- ``"killafter"``: SIGKILL after the call

``only``: the rule applies only to calls with this text in an argument; ``once``: a path; the rule acts in the
first process that can create this file, and in no other.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from datastates.flusher.process import main


def wrap(original: Callable[..., Any], rule: dict[str, Any]) -> Callable[..., Any]:
    count = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        if rule.get("only", "") not in " ".join(str(argument) for argument in arguments):
            return original(*arguments, **options)
        number, count = count, count + 1
        first = rule.get("first", 0)
        if not first <= number < first + rule.get("times", sys.maxsize) or not claim(rule):
            return original(*arguments, **options)
        then = rule["then"]
        if then == "zero":
            return 0
        if then == "short":
            descriptor, data, offset = arguments
            return original(descriptor, memoryview(data)[: rule["nbytes"]], offset)
        if then == "killafter":
            original(*arguments, **options)
        if then in ("kill", "killafter"):
            os.kill(os.getpid(), signal.SIGKILL)
        code = getattr(errno, then)
        raise OSError(code, os.strerror(code))

    return call


def claim(rule: dict[str, Any]) -> bool:
    if "once" not in rule:
        return True
    try:
        os.close(os.open(rule["once"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    for rule in json.loads(sys.argv[1]):
        setattr(os, rule["call"], wrap(getattr(os, rule["call"]), rule))
    main(sys.argv[2:])
