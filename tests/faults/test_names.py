"""Names of any kind, symbolic links, and permissions of what is written."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastates import storage
from datastates.errors import StorageError
from datastates.integrity import verify
from datastates.leftovers import remove_leftovers
from datastates.manifest import read_latest
from datastates.partial_names import partial_attempt, partial_path
from datastates.recovery import clean_leftovers
from flusher.rig import SLAB, TIMEOUT, Rig, image_of, partials

IMAGE = image_of(SLAB + 100)
NAMES = {
    "spaces": b" a b ",
    "brackets": b"[a]*{b}?",
    "unicode": "é∂模型".encode(),
    "newline": b"a\nb",
    "no-text": b"\xff\xfe\x80",
    "quote": b"a'\"\\b",
    "dash": b"-rf",
    "200-bytes": b"n" * 200,
    "255-bytes": b"n" * 255,
    "255-bytes-of-unicode": "é".encode() * 127 + b"x",
    "255-bytes-that-are-no-text": b"\xff" * 255,
}


@pytest.fixture
def umask() -> Iterator[None]:
    """The umask may be changed inside; it is what it was afterwards."""
    old = os.umask(0o022)
    yield
    os.umask(old)


@pytest.mark.parametrize("raw", NAMES.values(), ids=NAMES)
def test_a_name(tmp_path: Path, raw: bytes) -> None:
    name = os.fsdecode(raw)
    with Rig() as rig:
        rig.save(tmp_path / name, IMAGE, "run-1")
        rig.client.publish("run-1").result(TIMEOUT)
        directory = tmp_path / "checkpoints" / name
        rig.checkpoint(directory, {name: IMAGE, "other": b"abc"}, "run-2")
        rig.checkpoint(directory, {name: b"again"}, "run-3")
    assert (tmp_path / name).read_bytes() == IMAGE
    assert (directory / name).read_bytes() == b"again"
    assert verify(str(directory)) == []
    assert os.fsencode((tmp_path / "checkpoints" / "latest").read_bytes()) == raw
    assert read_latest(str(tmp_path / "checkpoints")) == name.strip()


def test_a_long_name_fails_and_leaves_nothing(tmp_path: Path) -> None:
    with Rig() as rig:
        rig.save(tmp_path / ("n" * 256), IMAGE, "run-1")
        error = rig.client.publish("run-1").exception(TIMEOUT)
    assert isinstance(error, StorageError) and error.errno == errno.ENAMETOOLONG
    assert os.listdir(tmp_path) == []


def test_partial_names_of_long_names_differ(tmp_path: Path) -> None:
    first, second = (str(tmp_path / ("n" * 250 + end)) for end in "ab")
    names = {os.path.basename(partial_path(path, "r" * 64)) for path in (first, second)}
    assert len(names) == 2
    assert all(len(name) <= 255 and partial_attempt(name) == "r" * 64 for name in names)
    storage.create_partial(first, "run-1", 0).close()
    assert remove_leftovers(str(tmp_path), os.path.basename(second)) == []
    assert len(remove_leftovers(str(tmp_path), os.path.basename(first))) == 1


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path, is_dangling: bool) -> None:
    target = tmp_path / "elsewhere"
    if not is_dangling:
        target.write_bytes(b"precious")
        target.chmod(0o600)
    directory = tmp_path / "s1"
    directory.mkdir()
    for name in ("f", "../latest", "../.latest.tmp"):
        (directory / name).symlink_to(target)
    with Rig() as rig:
        rig.checkpoint(directory, {"f": IMAGE}, "run-1")
    assert not (directory / "f").is_symlink() and (directory / "f").read_bytes() == IMAGE
    assert (directory / "f").stat().st_mode & 0o777 != 0o600, "the link's target has nothing to say"
    assert not (tmp_path / "latest").is_symlink() and (tmp_path / "latest").read_text() == "s1"
    assert target.exists() is not is_dangling
    assert is_dangling or target.read_bytes() == b"precious"


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_in_the_place_of_a_partial_file_is_refused(tmp_path: Path, is_dangling: bool) -> None:
    target = tmp_path / "elsewhere"
    if not is_dangling:
        target.write_bytes(b"precious")
    partial = Path(partial_path(str(tmp_path / "f"), "run-1"))
    partial.symlink_to(target)
    with Rig() as rig:
        rig.save(tmp_path / "f", IMAGE, "run-1")
        error = rig.client.publish("run-1").exception(TIMEOUT)
        assert isinstance(error, StorageError) and error.errno == errno.ELOOP
        assert error.path == str(partial) and "symbolic link" in str(error)
        rig.save(tmp_path / "f", IMAGE, "run-2")
        rig.client.publish("run-2").result(TIMEOUT)
    assert target.exists() is not is_dangling
    assert is_dangling or target.read_bytes() == b"precious"
    partial.unlink()


def test_a_linked_folder_is_entered_and_cleaning_stays_inside(tmp_path: Path) -> None:
    real, outside = tmp_path / "real", tmp_path / "outside"
    real.mkdir()
    outside.mkdir()
    precious = outside / ".f.dead-1.datastates.partial"
    precious.write_bytes(b"precious")
    (tmp_path / "runs").symlink_to(real)
    with Rig() as rig:
        rig.checkpoint(tmp_path / "runs" / "s1", {"f": IMAGE}, "run-1")
        (real / "s1" / ".datastates" / "dead-1").symlink_to(outside)
        (real / "s1" / "sub").symlink_to(outside)
        (real / "s2").symlink_to(outside)
        clean_leftovers(str(tmp_path / "runs"))
        rig.checkpoint(tmp_path / "runs" / "s1", {"f": b"new"}, "run-2")
    assert (real / "s1" / "f").read_bytes() == b"new" and verify(str(real / "s1")) == []
    assert os.listdir(outside) == [precious.name]
    precious.unlink()


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_a_folder_with_setgid_hands_its_group_on(tmp_path: Path, umask: None, mask: int) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    try:
        os.chown(root, -1, 54321)
    except PermissionError:
        pytest.skip("a folder cannot be given to another group here")
    root.chmod(0o2775)
    os.umask(mask)
    with Rig() as rig:
        rig.checkpoint(root / "deep" / "s1", {"f": IMAGE, "sub/g": b"abc"}, "run-1")
    for path in root.rglob("*"):
        mode = path.stat().st_mode
        assert path.stat().st_gid == 54321, path
        assert mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path
        assert bool(mode & stat.S_ISGID) is path.is_dir(), path


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o646, 0o444])
def test_no_moment_at_which_more_may_be_read_than_before(
    tmp_path: Path, umask: None, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    seen = []
    original = os.open

    def look(path: str, flags: int, *arguments: int) -> int:
        descriptor = original(path, flags, *arguments)
        if flags & os.O_CREAT:
            seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    os.umask(0)
    path = tmp_path / "f"
    path.write_bytes(b"secret")
    path.chmod(mode)
    monkeypatch.setattr(os, "open", look)
    file = storage.create_partial(str(path), "run-1", 0)
    file.make_durable()
    file.publish()
    storage.write_atomically(str(path), b"new")
    assert len(seen) == 2 and all(found & ~mode == 0 for found in seen), json.dumps(seen)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert partials(tmp_path) == []
