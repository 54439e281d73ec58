"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from pathlib import Path

import pytest

from datastates import locks, storage
from datastates.directories import make_directories
from datastates.errors import StorageError
from datastates.leftovers import remove_leftovers
from datastates.partial_names import is_attempt, partial_attempt, partial_path


def aligned(data: bytes) -> memoryview:
    """Memory on a page boundary, padded to whole blocks, as direct I/O needs it."""
    nbytes = max(-(-len(data) // 4096) * 4096, 4096)
    memory = memoryview(mmap.mmap(-1, nbytes))
    memory[: len(data)] = data
    return memory


def test_partial_names(tmp_path: Path) -> None:
    assert partial_path("/d/f.pt", "run-1") == "/d/.f.pt.run-1.datastates.partial"
    assert partial_attempt(".f.pt.run-1.datastates.partial") == "run-1"
    for name in ("f.pt", ".f.partial", "f.run-1.partial", ".f.run-1.partial.x"):
        assert partial_attempt(name) is None
    assert is_attempt("run_1-000002")
    assert not any(map(is_attempt, ("", "a/b", "a.b", "é", "a" * 65)))


@pytest.mark.parametrize("data", [b"", b"abc", bytes(range(256)) * 33])
def test_a_file_is_invisible_until_it_is_published(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a" / "b" / "f"
    file = storage.create_partial(str(path), "x-1", len(data))
    if data:
        file.write(aligned(data), 0)
    file.make_durable()
    assert os.listdir(path.parent) == [".f.x-1.datastates.partial"]
    file.publish()
    file.remove()
    assert path.read_bytes() == data


def test_unaligned_memory_is_written_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "f"
    file = storage.create_partial(str(path), "x-1", 5000)
    file.write(memoryview(bytes(range(200)) * 25), 0)
    assert not file.is_direct
    file.make_durable()
    file.publish()
    assert path.read_bytes() == bytes(range(200)) * 25


def test_a_partial_file_is_locked_by_its_owner(tmp_path: Path) -> None:
    file = storage.create_partial(str(tmp_path / "f"), "x-1", 10)
    assert remove_leftovers(str(tmp_path)) == []
    file.close()
    (tmp_path / ".other").touch()
    assert remove_leftovers(str(tmp_path), "g") == []
    assert remove_leftovers(str(tmp_path), "f") == [str(tmp_path / ".f.x-1.datastates.partial")]
    assert os.listdir(tmp_path) == [".other"]


def test_a_file_system_without_locks_has_no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".f.x-1.datastates.partial").touch()
    assert remove_leftovers(str(tmp_path)) == []
    file = storage.create_partial(str(tmp_path / "g"), "x-1", 3)
    file.remove()
    assert os.listdir(tmp_path) == [".f.x-1.datastates.partial"]
    os.unlink(tmp_path / ".f.x-1.datastates.partial")


def test_an_owned_file_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_TIMEOUT_SECONDS", 0.02)
    file = storage.create_partial(str(tmp_path / "f"), "x-1", 10)
    with pytest.raises(StorageError) as caught:
        storage.reopen_partial(str(tmp_path / "f"), "x-1", 10)
    assert caught.value.errno == errno.EBUSY
    file.remove()


def test_a_lock_is_taken_as_soon_as_its_owner_ends(tmp_path: Path) -> None:
    file = storage.create_partial(str(tmp_path / "f"), "x-1", 10)
    timer = threading.Timer(0.05, file.close)
    timer.start()
    again = storage.reopen_partial(str(tmp_path / "f"), "x-1", 10)
    timer.join()
    again.remove()
    assert os.listdir(tmp_path) == []


def test_no_space(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        storage.create_partial(str(tmp_path / "f"), "x-1", 1 << 60)
    assert caught.value.errno == errno.ENOSPC and str(1 << 60) in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "d").touch()
    with pytest.raises(StorageError) as caught:
        storage.create_partial(str(tmp_path / "d" / "f"), "x-1", 1)
    assert caught.value.errno in (errno.EEXIST, errno.ENOTDIR)
    with pytest.raises(FileExistsError):
        make_directories(str(tmp_path / "d"))


def test_write_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    storage.write_atomically(str(path), b"old")
    path.chmod(0o600)
    storage.write_atomically(str(path), b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError) as caught:
        storage.write_atomically(str(path), b"newer")
    assert caught.value.path == str(path) and caught.value.errno == errno.EIO
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["record"]


def test_read_chunks(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(100)))
    assert b"".join(map(bytes, storage.read_chunks(str(path), 10, 95, 20))) == bytes(range(10, 95))
    with pytest.raises(StorageError, match="ends at 100, expected 101"):
        list(storage.read_chunks(str(path), 10, 101, 20))


def test_a_folder_below_a_file_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no folder of another host that will show up."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits for a folder that cannot come"))
    with pytest.raises(FileExistsError):
        make_directories(str(tmp_path / "file" / "step1" / "deeper"))
