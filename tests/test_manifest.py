"""The records of a checkpoint, and what is found when files and records disagree."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

import pytest

from datastates.errors import CorruptCheckpointError
from datastates.integrity import check, verify
from datastates.manifest import (
    ABORTED_NAME,
    CommitRecord,
    Failure,
    FileRecord,
    Manifest,
    commit_path,
    committed_files,
    manifest_path,
    read_causes,
    read_commit,
    write_causes,
    write_manifest,
)

SLAB = 4096
FILES = {"f": bytes(range(256)) * 40, "sub/empty": b""}


def record_of(name: str, data: bytes) -> FileRecord:
    crcs = tuple(zlib.crc32(data[i : i + SLAB]) for i in range(0, len(data), SLAB))
    return FileRecord(name, len(data), SLAB, crcs)


def make_checkpoint(directory: Path, world_size: int = 2) -> None:
    """A committed checkpoint, made without the code that commits."""
    (directory / "sub").mkdir(parents=True)
    (directory / ".datastates" / "a-1").mkdir(parents=True)
    crcs = []
    for rank in range(world_size):
        files = {f"{name}{rank}": data for name, data in FILES.items()}
        for name, data in files.items():
            (directory / name).write_bytes(data)
        records = tuple(record_of(name, data) for name, data in files.items())
        manifest = Manifest("a-1", rank, world_size, "tag", records, 1.5)
        write_manifest(str(directory), manifest)
        crcs.append(zlib.crc32(manifest.to_bytes()))
    sizes = {f"{name}{rank}": len(data) for rank in range(world_size) for name, data in FILES.items()}
    record = CommitRecord("a-1", "tag", world_size, 2.5, tuple(crcs), sizes)
    (directory / ".datastates" / "commit.json").write_bytes(record.to_bytes())


def test_records_survive_their_files(tmp_path: Path) -> None:
    failure = Failure("disk \udcff full", 28, "/p")
    for failed in (None, failure):
        manifest = Manifest("a-1", 3, 4, "tag", (record_of("f", b"abc"),), 1.25, failed)
        assert Manifest.from_bytes(manifest.to_bytes(), "") == manifest
    (tmp_path / ".datastates" / "a-1").mkdir(parents=True)
    write_causes(str(tmp_path), "a-1", ABORTED_NAME, {1: "torn"})
    assert read_causes(str(tmp_path), "a-1", ABORTED_NAME) == {1: "torn"}
    assert read_causes(str(tmp_path), "a-2", ABORTED_NAME) is None


def test_a_complete_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "d")
    assert check(str(tmp_path / "d")) == verify(str(tmp_path / "d")) == []
    assert set(committed_files(str(tmp_path / "d"))) == {"f0", "f1", "sub/empty0", "sub/empty1"}
    shutil.copytree(tmp_path / "d", tmp_path / "copy")
    shutil.rmtree(tmp_path / "d")
    assert verify(str(tmp_path / "copy")) == []


def test_no_checkpoint(tmp_path: Path) -> None:
    assert read_commit(str(tmp_path)) is None
    assert committed_files(str(tmp_path)) == {}
    for examine in (check, verify):
        (problem,) = examine(str(tmp_path))
        assert "not a complete checkpoint" in problem.message


def test_a_changed_byte_is_found_by_verify_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    data = bytearray((tmp_path / "f1").read_bytes())
    data[2 * SLAB + 5] ^= 1
    (tmp_path / "f1").write_bytes(data)
    assert check(str(tmp_path)) == []
    (problem,) = verify(str(tmp_path))
    assert (problem.path, problem.offset) == (str(tmp_path / "f1"), 2 * SLAB)


@pytest.mark.parametrize("change", [-1, -4096, 7])
def test_a_wrong_length(tmp_path: Path, change: int) -> None:
    make_checkpoint(tmp_path)
    size = (tmp_path / "f0").stat().st_size
    os.truncate(tmp_path / "f0", size + change)
    for examine in (check, verify):
        (problem,) = examine(str(tmp_path))
        assert problem.path == str(tmp_path / "f0")
        assert f"{size + change} bytes, expected {size}" in problem.message


def test_a_missing_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "sub" / "empty1").unlink()
    for examine in (check, verify):
        (problem,) = examine(str(tmp_path))
        assert problem.path == str(tmp_path / "sub" / "empty1") and "missing" in problem.message


def test_a_missing_or_foreign_manifest(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    path = Path(manifest_path(str(tmp_path), "a-1", 1))
    path.write_bytes(path.read_bytes().replace(b'"written_at": 1.5', b'"written_at": 1.6'))
    assert "committed with" in check(str(tmp_path))[0].message
    path.unlink()
    assert "manifest of rank 1 is missing" in verify(str(tmp_path))[0].message
    with pytest.raises(CorruptCheckpointError):
        committed_files(str(tmp_path))


def test_a_damaged_commit_record(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    path = Path(commit_path(str(tmp_path)))
    for data in (b"", b"{}", b"[]", path.read_bytes().replace(b'"version": 1', b'"version": 9')):
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpointError) as caught:
            read_commit(str(tmp_path))
        assert caught.value.path == str(path)
        assert len(check(str(tmp_path))) == 1


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../f", "a/../../f", "a//b", "."])
def test_a_manifest_that_leaves_its_directory(name: str) -> None:
    fields = json.loads(Manifest("a-1", 0, 1, "tag", (record_of("f", b"abc"),), 1.0).to_bytes())
    fields["files"][0]["name"] = name
    with pytest.raises(CorruptCheckpointError, match="no name inside"):
        Manifest.from_bytes(json.dumps(fields).encode(), "m")


@pytest.mark.parametrize("change", [{"crc32": []}, {"nbytes": -1}, {"slab_nbytes": 0}, {"nbytes": 4097}])
def test_checksums_that_do_not_cover_the_file(change: dict[str, object]) -> None:
    fields = json.loads(Manifest("a-1", 0, 1, "tag", (record_of("f", b"abc"),), 1.0).to_bytes())
    fields["files"][0] |= change
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(json.dumps(fields).encode(), "m")
