"""Storage that is full, short, interrupted or refuses: an error with path and errno, or the right bytes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastates.errors import CommitError, StorageError
from datastates.integrity import check, verify
from flusher.rig import SLAB, TIMEOUT, Rig, faulty, image_of, partials

IMAGE = image_of(5 * SLAB + 100)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    if (
        not shutil.which("mount")
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], capture_output=True).returncode
    ):
        pytest.skip("a file system cannot be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("free_bytes_check", [True, False])
def test_full(small_disk: Path, free_bytes_check: bool) -> None:
    with Rig() as rig:
        rig.checkpoint(small_disk / "s1", {"f": IMAGE}, "run-1")
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(400_000))
        big = image_of(8 * SLAB)
        path = small_disk / "s2" / "big"
        file = rig.client.open_file(str(path), len(big), SLAB, (), "run-2", free_bytes_check)
        rig.send(file, big)
        committed = rig.commit(small_disk / "s2", "run-2", tag="s2")
        for future in (file.durable, committed):
            error = future.exception(TIMEOUT)
            assert isinstance(error, StorageError)
            assert error.errno == errno.ENOSPC
            assert str(path.parent / ".big") in error.path and str(len(big)) in str(error)
        rig.wait_all_free()
        assert partials(small_disk) == []
        assert verify(str(small_disk / "s1")) == []
        assert (small_disk / "latest").read_text() == "s1"
        ballast.unlink()
        rig.checkpoint(small_disk / "s2", {"big": big[: 6 * SLAB]}, "run-3")
        assert (small_disk / "latest").read_text() == "s2"
        assert verify(str(small_disk / "s2")) == []


@pytest.mark.parametrize(
    "rules",
    [
        [{"call": "pwrite", "then": "short", "nbytes": 7, "times": 30}],
        [{"call": "pwrite", "then": "short", "nbytes": 4096}],
        [{"call": "pwrite", "then": "EINTR", "times": 3}, {"call": "pwrite", "then": "EAGAIN", "first": 4, "times": 2}],
        [{"call": "pwrite", "then": "EINVAL", "times": 1}],
        [{"call": "posix_fallocate", "then": "EOPNOTSUPP"}],
        [{"call": "posix_fallocate", "then": "EINVAL"}],
        [{"call": "fsync", "then": "EINVAL", "times": 1}],  # of a new directory
        [{"call": "mkdir", "then": "EEXIST", "times": 1}],
        [{"call": "mkdir", "then": "ESTALE", "times": 2}],
    ],
    ids=[
        "7-bytes",
        "one-block",
        "interrupted",
        "no-direct-io",
        "no-fallocate",
        "fallocate-refused",
        "no-directory-fsync",
        "race",
        "stale",
    ],
)
def test_worked_around(tmp_path: Path, rules: list[dict[str, object]]) -> None:
    with Rig(command=faulty(json.dumps(rules))) as rig:
        rig.checkpoint(tmp_path / "s1", {"f": IMAGE, "g": IMAGE[:100]}, "run-1")
    assert verify(str(tmp_path / "s1")) == []
    assert (tmp_path / "s1" / "f").read_bytes() == IMAGE
    assert (tmp_path / "s1" / "g").read_bytes() == IMAGE[:100]


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ({"call": "pwrite", "then": "zero", "first": 3}, errno.EIO),
        ({"call": "pwrite", "then": "EIO", "first": 2, "times": 1}, errno.EIO),
        ({"call": "pwrite", "then": "ENOSPC", "first": 5, "times": 1}, errno.ENOSPC),
        ({"call": "pwrite", "then": "EINVAL", "times": 20}, errno.EINVAL),
        ({"call": "ftruncate", "then": "EIO", "first": 1, "times": 1}, errno.EIO),
        ({"call": "fsync", "then": "EIO", "times": 30}, errno.EIO),
        ({"call": "mkdir", "then": "EACCES", "times": 2}, errno.EACCES),
        ({"call": "posix_fallocate", "then": "EDQUOT", "times": 1}, errno.EDQUOT),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else errno.errorcode[value],
)
def test_reported(tmp_path: Path, rule: dict[str, object], code: int) -> None:
    directory = tmp_path / "s1"
    with Rig(command=faulty(json.dumps([rule]))) as rig:
        rig.save(directory / "f", IMAGE)
        error = rig.commit(directory).exception(TIMEOUT)
        assert isinstance(error, StorageError)
        assert error.errno == code and error.path.startswith(str(tmp_path)) and error.path in str(error)
        rig.wait_all_free()
    assert partials(tmp_path) == []
    assert not (directory / "f").exists() and not (tmp_path / "latest").exists()


@pytest.mark.parametrize("only", ["commit.json", "rank-00000.json"])
def test_no_room_for_the_records_leaves_the_old_checkpoint(tmp_path: Path, only: str) -> None:
    directory = tmp_path / "s1"
    with Rig() as rig:
        rig.checkpoint(directory, {"f": IMAGE}, "run-1")
    rule = {"call": "open", "then": "ENOSPC", "only": only}
    with Rig(command=faulty(json.dumps([rule]))) as rig:
        rig.save(directory / "f", b"new", "run-2")
        error = rig.commit(directory, "run-2").exception(TIMEOUT)
    assert isinstance(error, StorageError) and error.errno == errno.ENOSPC
    assert verify(str(directory)) == []
    assert (directory / "f").read_bytes() == IMAGE


def test_one_of_several_files_fails(tmp_path: Path) -> None:
    rule = {"call": "posix_fallocate", "then": "EIO", "first": 1, "times": 1}
    with Rig(command=faulty(json.dumps([rule])), num_writers=1) as rig:
        good = rig.save(tmp_path / "s1" / "good", IMAGE)
        bad = rig.save(tmp_path / "s1" / "bad", IMAGE)
        with pytest.raises(StorageError):
            bad.durable.result(TIMEOUT)
        assert good.durable.exception(TIMEOUT) is None
        error = rig.commit(tmp_path / "s1").exception(TIMEOUT)
        assert error is bad.error
        rig.wait_all_free()
    assert partials(tmp_path) == []
    assert check(str(tmp_path / "s1"))[0].message.startswith("not a complete checkpoint")


def test_aborted_before_and_after_commit(tmp_path: Path) -> None:
    with Rig() as rig:
        first = rig.open(tmp_path / "s1" / "f", IMAGE, "a-1")
        rig.send(first, IMAGE, 0, 2)
        committed = rig.commit(tmp_path / "s1", "a-1")
        rig.client.abort("a-1", "torn")
        rig.client.abort("a-2", "not planned")
        late = rig.commit(tmp_path / "s2", "a-2")
        for future, cause in ((committed, "torn"), (first.durable, "torn"), (late, "not planned")):
            with pytest.raises(CommitError, match=cause):
                future.result(TIMEOUT)
        rig.send(first, IMAGE, 2)
        rig.wait_all_free()
    for name in ("s1", "s2"):
        manifest = json.loads(next((tmp_path / name / ".datastates").glob("*/rank-00000.json")).read_text())
        assert manifest["failed"]["message"] in ("torn", "not planned")
        assert next((tmp_path / name / ".datastates").glob("*/aborted.json")).exists()
    assert partials(tmp_path) == []


def test_a_leftover_of_the_same_target_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "s1"
    directory.mkdir()
    (directory / ".f.old-7.datastates.partial").write_bytes(b"dead")
    (directory / "f").write_bytes(b"final")
    (directory / "f").chmod(0o444)
    (directory / ".datastates").mkdir()
    (directory / ".datastates" / "commit.json").write_text("garbage")
    with Rig() as rig:
        rig.checkpoint(directory, {"f": IMAGE}, "run-1")
    assert verify(str(directory)) == []
    assert sorted(os.listdir(directory)) == [".datastates", "f"]
