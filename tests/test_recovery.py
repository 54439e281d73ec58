"""A directory that a crash left anywhere between two checkpoints holds one of them again afterwards."""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from datastates.attempt_folder import AttemptLock, is_promised
from datastates.catalog import list_checkpoints
from datastates.commit import roll_forward
from datastates.integrity import check, verify
from datastates.manifest import ABORTED_NAME, FileRecord, Manifest, read_commit, write_causes, write_manifest
from datastates.partial_names import partial_path
from datastates.recovery import Recovery, clean_leftovers, recover
from datastates.storage import create_partial

OLD = {"f": b"old", "g": b"old"}
NEW = {"f": b"new", "sub/h": b"newer"}


class CutError(Exception):
    """The process ends here."""


def prepare(directory: Path, attempt: str, files: dict[str, bytes], ranks: int = 1) -> list[tuple[Manifest, int]]:
    """The first phase of an attempt: all ranks durable. The first rank has all files."""
    folder = directory / ".datastates" / attempt
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    found = []
    for rank in range(ranks):
        records = []
        for name, data in files.items() if rank == 0 else ():
            path = Path(partial_path(str(directory / name), attempt))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            records.append(FileRecord(name, len(data), 4096, (zlib.crc32(data),)))
        manifest = Manifest(attempt, rank, ranks, "tag", tuple(records), float(attempt[-1]))
        write_manifest(str(directory), manifest)
        found.append((manifest, zlib.crc32(manifest.to_bytes())))
    return found


def commit(directory: Path, attempt: str, files: dict[str, bytes]) -> None:
    roll_forward(str(directory), prepare(directory, attempt, files), "tag")


def holds(directory: Path, files: dict[str, bytes]) -> bool:
    return verify(str(directory)) == [] and all((directory / name).read_bytes() == data for name, data in files.items())


@pytest.mark.leaves_partial_files
def test_what_is_completed_later_is_not_taken_for_younger(tmp_path):
    prepare(tmp_path / "step9", "attempt-1", OLD)
    commit(tmp_path / "step10", "attempt-2", NEW)
    assert clean_leftovers(str(tmp_path)) == [str(tmp_path / "step9")]
    assert [os.path.basename(record.path) for record in list_checkpoints(tmp_path)] == ["step9", "step10"]


def left(directory: Path) -> list[str]:
    return [str(path.relative_to(directory)) for path in directory.rglob(".*.partial")]


def cut_after(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Let the given number of system calls that change names pass, then end the process."""
    count = 0

    def guard(original: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object, **options: object) -> None:
            nonlocal count
            if count == number:
                raise CutError
            count += 1
            original(*arguments, **options)

        return call

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, guard(getattr(os, name)))
    return lambda: count


@pytest.mark.parametrize("number", range(7))
def test_a_cut_anywhere_in_the_second_phase(tmp_path: Path, number: int) -> None:
    commit(tmp_path, "a-1", OLD)
    manifests = prepare(tmp_path, "a-2", NEW, ranks=2)
    with pytest.MonkeyPatch.context() as patch:
        passed = cut_after(patch, number)
        try:
            roll_forward(str(tmp_path), manifests, "tag")
        except CutError:
            assert passed() == number
        else:
            assert number == 5 + 1  # staged, withdrawn, two renamed, committed
    (tmp_path / ".datastates" / "a-2" / ".commit.json.tmp").unlink(missing_ok=True)
    expected = OLD if number == 0 else NEW
    assert recover(str(tmp_path)) is not Recovery.OWNED
    assert holds(tmp_path, expected)
    assert read_commit(str(tmp_path)).attempt == ("a-1" if number == 0 else "a-2")
    assert left(tmp_path) == []
    assert recover(str(tmp_path)) is Recovery.NOTHING_TO_DO
    assert len(os.listdir(tmp_path / ".datastates")) == 2


def test_a_first_checkpoint_that_only_lacks_its_record(tmp_path: Path) -> None:
    prepare(tmp_path, "a-1", NEW, ranks=3)
    assert recover(str(tmp_path)) is Recovery.ROLLED_FORWARD
    assert holds(tmp_path, NEW)


def test_the_youngest_of_two(tmp_path: Path) -> None:
    prepare(tmp_path, "a-2", NEW)
    prepare(tmp_path, "a-1", OLD)
    assert recover(str(tmp_path)) is Recovery.ROLLED_FORWARD
    assert holds(tmp_path, NEW) and left(tmp_path) == []


@pytest.mark.parametrize("what", ["missing-rank", "failed-rank", "aborted", "short-file", "missing-file"])
def test_what_is_incomplete_goes(tmp_path: Path, what: str) -> None:
    commit(tmp_path, "a-1", OLD)
    prepare(tmp_path, "a-2", NEW, ranks=2)
    folder = tmp_path / ".datastates" / "a-2"
    partial = Path(partial_path(str(tmp_path / "f"), "a-2"))
    if what == "missing-rank":
        (folder / "rank-00001.json").unlink()
    elif what == "failed-rank":
        failure = Manifest("a-2", 1, 2, "tag", (), 1.0, None)
        data = failure.to_bytes().replace(b'"failed": null', b'"failed": {"message": "disk full"}')
        (folder / "rank-00001.json").write_bytes(data)
    elif what == "aborted":
        write_causes(str(tmp_path), "a-2", ABORTED_NAME, {1: "torn"})
    elif what == "short-file":
        partial.write_bytes(b"n")
    else:
        partial.unlink()
    assert recover(str(tmp_path)) is Recovery.CLEANED
    assert holds(tmp_path, OLD) and left(tmp_path) == []
    assert sorted(os.listdir(tmp_path / ".datastates")) == ["a-1", "commit.json"]


@pytest.mark.parametrize(("number", "expected"), [(3, Recovery.ROLLED_FORWARD), (4, Recovery.CLEANED)])
def test_files_of_equal_size_are_not_mixed(tmp_path: Path, number: int, expected: Recovery) -> None:
    commit(tmp_path, "a-1", OLD)
    manifests = prepare(tmp_path, "a-2", {"f": b"new", "g": b"new"})
    with pytest.MonkeyPatch.context() as patch:
        cut_after(patch, number)  # staged, two places withdrawn; with the fourth f is renamed
        with pytest.raises(CutError):
            roll_forward(str(tmp_path), manifests, "tag")
    Path(partial_path(str(tmp_path / "g"), "a-2")).unlink()  # by a job that began to save g again
    assert recover(str(tmp_path)) is expected
    if expected is Recovery.ROLLED_FORWARD:  # the older checkpoint is still whole
        assert holds(tmp_path, OLD) and read_commit(str(tmp_path)).attempt == "a-1"
    else:
        assert (tmp_path / "f").read_bytes() == b"new" and (tmp_path / "g").read_bytes() == b"old"
        assert read_commit(str(tmp_path)) is None
    assert left(tmp_path) == []


def test_what_a_living_process_owns_stays(tmp_path: Path) -> None:
    prepare(tmp_path, "a-1", NEW)
    lock = AttemptLock(str(tmp_path), "a-1")
    file = create_partial(str(tmp_path / "k"), "a-2", 5)
    assert recover(str(tmp_path)) is Recovery.OWNED
    assert sorted(left(tmp_path)) == [
        ".f.a-1.datastates.partial",
        ".k.a-2.datastates.partial",
        "sub/.h.a-1.datastates.partial",
    ]
    assert check(str(tmp_path)) != []
    lock.release()
    assert recover(str(tmp_path)) is Recovery.ROLLED_FORWARD
    assert left(tmp_path) == [".k.a-2.datastates.partial"]
    file.close()
    assert recover(str(tmp_path)) is Recovery.CLEANED
    assert left(tmp_path) == [] and holds(tmp_path, NEW)


def test_two_may_share_an_attempt(tmp_path: Path) -> None:
    first, second = AttemptLock(str(tmp_path), "a-1"), AttemptLock(str(tmp_path), "a-1")
    first.release()
    first.release()
    assert recover(str(tmp_path)) is Recovery.OWNED
    second.release()
    assert recover(str(tmp_path)) is Recovery.CLEANED
    assert os.listdir(tmp_path / ".datastates") == []


def test_clean_leftovers(tmp_path: Path) -> None:
    commit(tmp_path / "s1", "a-1", OLD)
    prepare(tmp_path / "s2", "a-2", NEW)
    (tmp_path / "s2" / ".datastates" / "a-2" / "rank-00000.json").unlink()
    commit(tmp_path / "s3", "a-3", OLD)
    (tmp_path / "s3" / ".f.a-0.datastates.partial").write_bytes(b"dead")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".model.bin.partial").touch()  # somebody else's
    (tmp_path / "s4").mkdir()
    (tmp_path / "s4" / ".f.a-0.datastates.partial").touch()  # the job died before it had asked for a commit
    (tmp_path / "file").touch()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    commit(outside, "a-1", OLD)
    (outside / ".f.a-0.datastates.partial").touch()
    (tmp_path / "link").symlink_to(outside)
    assert clean_leftovers(str(tmp_path)) == [str(tmp_path / name) for name in ("s2", "s3", "s4")]
    assert holds(tmp_path / "s1", OLD) and holds(tmp_path / "s3", OLD)
    assert left(tmp_path / "s3") == []
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "mine", "s1", "s2", "s3"], "what is empty is gone"
    assert os.listdir(tmp_path / "s2") == ["sub"], "a folder of the dead job's is none of ours"
    for path in (outside / ".f.a-0.datastates.partial", tmp_path / "mine" / ".model.bin.partial"):
        path.unlink()  # neither was touched


def test_clean_leftovers_removes_the_latest_of_a_dead_writer_only(tmp_path: Path) -> None:
    temporary = tmp_path / ".latest.tmp"
    temporary.write_bytes(b"step")
    descriptor = os.open(temporary, os.O_WRONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    clean_leftovers(str(tmp_path))
    assert temporary.exists()
    os.close(descriptor)
    clean_leftovers(str(tmp_path))
    assert not temporary.exists()


def test_a_new_save_leaves_a_decided_attempt_to_recovery(tmp_path: Path) -> None:
    """The job was cut between two renames; the next one saves the same name without loading, and dies, too."""
    commit(tmp_path, "a-1", OLD)
    manifests = prepare(tmp_path, "a-2", {"f": b"new", "g": b"new"})
    with pytest.raises(CutError), pytest.MonkeyPatch.context() as patch:
        renames = iter([os.replace, os.replace])

        def cut(source: str, target: str) -> None:
            rename = next(renames, None)
            if rename is None:
                raise CutError
            rename(source, target)

        patch.setattr("datastates.commit.os.replace", cut)
        patch.setattr("datastates.storage.os.replace", cut)
        roll_forward(str(tmp_path), manifests, "tag")
    file = create_partial(
        str(tmp_path / "g"), "a-3", 3, keep=lambda attempt: is_promised(str(tmp_path), attempt), check_free=False
    )
    file.close()  # dies here
    recover(str(tmp_path))
    assert holds(tmp_path, {"f": b"new", "g": b"new"})
    assert left(tmp_path) == []
