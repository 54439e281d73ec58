"""Limits of the process and of the file system, as the system itself enforces them."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from datastates.errors import StorageError
from datastates.integrity import verify
from datastates.manifest import read_latest
from flusher.rig import SLAB, TIMEOUT, Rig, image_of, partials

IMAGE = image_of(3 * SLAB + 100)
NUM_FILES = 300


def lost(rig: Rig, directory: Path, attempt: str, files: dict[str, bytes]) -> StorageError:
    """Save a checkpoint that cannot be committed; gives its error."""
    for name, image in files.items():
        rig.save(directory / name, image, attempt)
    error = rig.commit(directory, attempt, directory.name).exception(TIMEOUT)
    rig.wait_all_free()
    assert isinstance(error, StorageError), repr(error)
    assert (error.rank, error.tag) == (0, directory.name)
    assert error.path in str(error) and error.path.startswith(str(directory.parent))
    return error


def test_a_full_disk_says_how_much_is_missing(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(1 << 20)
    with Rig() as rig:
        rig.checkpoint(disk / "s1", {"f": IMAGE}, "run-1")
        nbytes = 2 << 20
        error = lost(rig, disk / "s2", "run-2", {"f": image_of(nbytes)})
        assert error.errno == errno.ENOSPC
        found = re.search(r"(\d+) bytes needed, (\d+) free, (\d+) missing", str(error))
        assert found is not None, error
        needed, free, missing = map(int, found.groups())
        assert needed == nbytes and 0 < free < 1 << 20 and missing == needed - free
        assert read_latest(str(disk)) == "s1" and verify(str(disk / "s1")) == [] and partials(disk) == []
        rig.checkpoint(disk / "s3", {"f": IMAGE}, "run-3")


def test_a_file_system_that_turns_read_only(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(4 << 20)

    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True, capture_output=True)

    with Rig() as rig:
        rig.checkpoint(disk / "s1", {"f": IMAGE}, "run-1")
        remount("ro")
        try:
            assert lost(rig, disk / "s2", "run-2", {"f": IMAGE}).errno == errno.EROFS
            assert lost(rig, disk / "s1", "run-3", {"f": b"new"}).errno == errno.EROFS
        finally:
            remount("rw")
        assert sorted(os.listdir(disk)) == ["latest", "s1"]
        assert (disk / "s1" / "f").read_bytes() == IMAGE and verify(str(disk / "s1")) == []
        rig.checkpoint(disk / "s2", {"f": IMAGE}, "run-4")


def test_a_limit_on_the_size_of_a_file(tmp_path: Path) -> None:
    """SIGXFSZ would end the process; it gets EFBIG instead."""
    with Rig() as rig:
        rig.checkpoint(tmp_path / "s1", {"f": b"1"}, "run-1")
        pid = rig.client.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE, (2 * SLAB, resource.RLIM_INFINITY))
        error = lost(rig, tmp_path / "s2", "run-2", {"f": IMAGE})
        assert error.errno == errno.EFBIG and "ulimit -f" in str(error)
        assert partials(tmp_path) == [] and read_latest(str(tmp_path)) == "s1"
        rig.checkpoint(tmp_path / "s2", {"f": IMAGE[:SLAB]}, "run-3")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        rig.checkpoint(tmp_path / "s2", {"f": IMAGE}, "run-4")
        assert rig.client.pid == pid
    assert verify(str(tmp_path / "s2")) == []


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    files = {f"f{number}": b"%d" % number for number in range(NUM_FILES)}
    with Rig() as rig:
        rig.checkpoint(tmp_path / "s1", {"f": b"1"}, "run-1")
        pid = rig.client.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, hard))
        error = lost(rig, tmp_path / "s2", "run-2", files)
        assert error.errno == errno.EMFILE and "ulimit -n" in str(error)
        assert partials(tmp_path) == [] and read_latest(str(tmp_path)) == "s1"
        rig.checkpoint(tmp_path / "s2", {"f": b"2"}, "run-3")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        rig.checkpoint(tmp_path / "s3", files, "run-4")
        assert rig.client.pid == pid
    assert verify(str(tmp_path / "s3")) == []


def test_the_soft_limit_of_the_trainer_does_not_matter(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * NUM_FILES:
        pytest.skip(f"the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with Rig() as rig:
            rig.checkpoint(tmp_path / "s1", {f"f{number}": b"abc" for number in range(NUM_FILES)}, "run-1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert verify(str(tmp_path / "s1")) == []
