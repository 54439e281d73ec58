"""Records every call that changes storage: ``python storage_recorder.py LOG ROOT SETTINGS`` is a flusher that does.

Recorded is what happens below ROOT, by inode, in the order in which it really happened: each recorded call holds
a lock that all threads and processes with the same LOG share. LOG is a stream of pickled tuples:

- ``("create", folder, name, inode)``, ``("mkdir", folder, name, inode)``, ``("remove", folder, name)``
- ``("rename", folder, name, new_folder, new_name)``
- ``("write", inode, offset, data)``, ``("truncate", inode, nbytes)``, ``("allocate", inode, end)``
- ``("sync", inode)``: of a file or of a folder
- ``("mark",)``: whoever records has learned that a save is committed
- ``("retire", tag)``: from here on it removes a checkpoint
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

from datastates import spares
from datastates.flusher.process import main

Call: TypeAlias = tuple[Any, ...]
Place: TypeAlias = tuple[int, str]

SPARE_BYTES = 4096
"""Files of removed checkpoints are written over if they have that many."""

_NAMES = (
    "open",
    "pwrite",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "unlink",
    "remove",
    "rmdir",
    "mkdir",
)


class Recorder:
    """Stands in for functions of `os`: each does the real thing, and records it if it was done below ``root``."""

    def __init__(self, log: str, root: str) -> None:
        self._root = os.path.realpath(root)
        self._real = {name: getattr(os, name) for name in _NAMES}
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()

    def close(self) -> None:
        os.close(self._log)

    def install(self) -> None:
        for name in _NAMES:
            setattr(os, name, getattr(self, name))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Record what the body does in this process."""
        self.install()
        try:
            yield
        finally:
            for name, real in self._real.items():
                setattr(os, name, real)

    def mark(self) -> None:
        with self._turn():
            self._append("mark")

    def retire(self, tag: str) -> None:
        with self._turn():
            self._append("retire", tag)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & (os.O_CREAT | os.O_TRUNC):
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)
        with self._turn():
            place = self._place(path, dir_fd)
            existed = os.path.lexists(path)
            descriptor = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            if place is not None and not existed:
                self._append("create", *place, os.fstat(descriptor).st_ino)
            elif place is not None and flags & os.O_TRUNC:
                self._append("truncate", os.fstat(descriptor).st_ino, 0)
            return descriptor

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        with self._turn():
            written = self._real["pwrite"](descriptor, data, offset)
            self._of_file("write", descriptor, offset, bytes(memoryview(data)[:written]))
            return written

    def ftruncate(self, descriptor: int, nbytes: int) -> None:
        with self._turn():
            self._real["ftruncate"](descriptor, nbytes)
            self._of_file("truncate", descriptor, nbytes)

    def posix_fallocate(self, descriptor: int, begin: int, nbytes: int) -> None:
        with self._turn():
            self._real["posix_fallocate"](descriptor, begin, nbytes)
            self._of_file("allocate", descriptor, begin + nbytes)

    def fsync(self, descriptor: int) -> None:
        with self._turn():
            self._real["fsync"](descriptor)
            self._of_file("sync", descriptor)

    fdatasync = fsync  # the size counts as data for both

    def replace(self, source: Any, target: Any) -> None:
        with self._turn():
            places = self._place(source), self._place(target)
            self._real["replace"](source, target)
            if places[0] is not None and places[1] is not None:
                self._append("rename", *places[0], *places[1])

    rename = replace

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("unlink", path, dir_fd)

    remove = unlink

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("rmdir", path, dir_fd)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with self._turn():
            place = self._place(path, dir_fd)
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            if place is not None:
                self._append("mkdir", *place, os.stat(path, dir_fd=dir_fd).st_ino)

    def _remove(self, name: str, path: Any, dir_fd: int | None) -> None:
        with self._turn():
            place = self._place(path, dir_fd)
            self._real[name](path, dir_fd=dir_fd)
            if place is not None:
                self._append("remove", *place)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            fcntl.flock(self._log, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._log, fcntl.LOCK_UN)

    def _append(self, *call: Any) -> None:
        os.write(self._log, pickle.dumps(call))

    def _of_file(self, kind: str, descriptor: int, *rest: Any) -> None:
        if self._is_inside(os.readlink(f"/proc/self/fd/{descriptor}")):
            self._append(kind, os.fstat(descriptor).st_ino, *rest)

    def _place(self, path: Any, dir_fd: int | None = None) -> Place | None:
        folder, name = os.path.split(os.fspath(path))
        if dir_fd is not None:
            folder = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), folder)
        folder = os.path.realpath(folder)
        return (os.stat(folder).st_ino, name) if self._is_inside(folder) else None

    def _is_inside(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + os.sep)


def read_log(log: str) -> list[Call]:
    calls = []
    with open(log, "rb") as file, contextlib.suppress(EOFError):
        while True:
            calls.append(pickle.load(file))
    return calls


if __name__ == "__main__":
    spares.MIN_SPARE_BYTES = SPARE_BYTES
    Recorder(sys.argv[1], sys.argv[2]).install()
    main(sys.argv[3:])
