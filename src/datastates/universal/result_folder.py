"""A folder that appears whole or not at all, and whose making can be taken up again after a kill.

It is made beside its final place under a hidden name, with a journal of what is finished. Who makes it holds a lock in
it. Finished items are kept by the next one who makes the same from the same, after their bytes were compared with
their checksums; anything else found there is removed first.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import asdict

from datastates.checksum import crc32
from datastates.directories import fsync_directory, make_directories
from datastates.errors import StorageError
from datastates.locks import open_locked
from datastates.partial_names import partial_path
from datastates.storage import read_chunks, size_of
from datastates.system_calls import patiently, storage_errors
from datastates.universal.writing import Written

_ATTEMPT = "conversion"
_JOURNAL_NAME = ".journal"
_LOCK_NAME = ".lock"
_READ_BYTES = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Source: linux/fcntl.h, linux/fs.h
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


class ResultFolder:
    """The folder in the making. `record` and `is_finished` are thread safe.

    Attributes:
        path: where it will be.
        directory: where it is made.
    """

    def __init__(self, path: str, origin: str, *, replace: bool = False) -> None:
        """Begin, or take up what a process that died has begun.

        Args:
            path: the final place, absolute; nothing may be there.
            origin: says what is made of what; what was begun for another one is removed.
            replace: what is in the final place stays until the new folder is durable, and is removed then.

        Raises:
            StorageError: something is there already, another process makes the same, or storage refuses.
        """
        self.path = path
        self.directory = partial_path(path, _ATTEMPT)
        self._origin = origin
        self._replace = replace
        self._finished: dict[str, list[Written]] = {}
        self._is_begun = False
        self._mutex = threading.Lock()  # protects the order of lines in the journal
        self._check_free_place()
        self._lock = self._journal = self._filesystem = -1
        with storage_errors("make", self.directory):
            make_directories(self.directory)
            self._lock = open_locked(os.path.join(self.directory, _LOCK_NAME), os.O_RDWR | os.O_CREAT)
            try:
                self._take_up()
                self._filesystem = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except BaseException:
                self.close()
                raise

    def is_finished(self, item: str) -> bool:
        """Whether an earlier process has finished an item and its bytes are still right. Reads all of them."""
        files = self._finished.get(item)
        return files is not None and all(_is_intact(os.path.join(self.directory, file.name), file) for file in files)

    def record(self, item: str, files: Sequence[Written]) -> None:
        """Note that an item is finished."""
        line = json.dumps({"item": item, "files": [asdict(file) for file in files]}) + "\n"
        with storage_errors("write", os.path.join(self.directory, _JOURNAL_NAME)), self._mutex:
            os.write(self._journal, line.encode())
            self._is_begun = True

    def publish(self) -> None:
        """Make all of it durable and give it its final name.

        Raises:
            StorageError: storage refuses, or something has come into its place meanwhile.
        """
        self._check_free_place()
        with storage_errors("make durable", self.directory):
            _sync_filesystem(self._filesystem)
            os.unlink(os.path.join(self.directory, _JOURNAL_NAME))
            fsync_directory(self.directory)
        with storage_errors("publish", self.path):
            is_replaced = self._replace and os.path.lexists(self.path)
            if is_replaced:
                _exchange(self.directory, self.path)
            else:
                patiently(os.rename, self.directory, self.path)
            self._is_begun = True
            # not before: who waits for the lock would take what is finished for leftovers, and clear it away
            os.unlink(os.path.join(self.path, _LOCK_NAME))
            fsync_directory(self.path)
            fsync_directory(os.path.dirname(self.path))
            if is_replaced:
                _remove(self.directory)

    def close(self) -> None:
        """Let go of it; idempotent. If it was not published, what is finished stays for the next one."""
        if self._lock >= 0 and not self._is_begun:
            shutil.rmtree(self.directory, ignore_errors=True)  # nothing in it is worth keeping
        for name in ("_journal", "_filesystem", "_lock"):
            descriptor = getattr(self, name)
            setattr(self, name, -1)
            if descriptor >= 0:
                os.close(descriptor)

    def __enter__(self) -> ResultFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_free_place(self) -> None:
        if os.path.lexists(self.path) and not self._replace:
            raise StorageError(
                f"{self.path} is there already: remove it or choose another place", errno.EEXIST, self.path
            )

    def _take_up(self) -> None:
        """Read the journal; begin anew unless it is of the same origin."""
        journal = os.path.join(self.directory, _JOURNAL_NAME)
        found = _read_journal(journal, self._origin)
        if found is None:
            self._clear()
        else:
            _drop_torn_line(journal)
        self._finished = found or {}
        self._is_begun = bool(found)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._journal = os.open(journal, flags, 0o666)
        if found is None:
            os.write(self._journal, json.dumps({"origin": self._origin}).encode() + b"\n")

    def _clear(self) -> None:
        for entry in list(os.scandir(self.directory)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != _LOCK_NAME:
                os.unlink(entry.path)


def _exchange(one: str, other: str) -> None:
    """Let two names change places, at once where the file system can. Source: renameat2(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in _NO_EXCHANGE:
        raise OSError(code, os.strerror(code), other)
    aside = partial_path(other, "replaced")
    patiently(os.rename, other, aside)
    try:
        patiently(os.rename, one, other)
    except OSError:
        patiently(os.rename, aside, other)
        raise
    patiently(os.rename, aside, one)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _read_journal(path: str, origin: str) -> dict[str, list[Written]] | None:
    """Files by item, None where the journal is of another origin, missing or damaged. A torn last line is ignored."""
    try:
        with open(path, "rb") as file:
            head, *lines = file.read().split(b"\n")
        if json.loads(head) != {"origin": origin}:
            return None
        entries = [json.loads(line) for line in lines[:-1]]
        return {entry["item"]: [Written(**file) for file in entry["files"]] for entry in entries}
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None


def _drop_torn_line(path: str) -> None:
    """What a killed process had begun to write at the end of a journal must not become part of the next line."""
    with open(path, "rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _is_intact(path: str, file: Written) -> bool:
    if size_of(path) != file.nbytes:
        return False
    value = 0
    for chunk in read_chunks(path, 0, file.nbytes, _READ_BYTES):
        value = crc32(chunk, value)
    return value == file.crc32


def _sync_filesystem(descriptor: int) -> None:
    """Make all of a file system durable: one call for thousands of files. Source: syncfs(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(descriptor) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
