"""Damage is found where it is, by loading and by `verify`, in every region of a file; nothing else is called damage."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from datastates import CheckpointEngine, integrity, load, reader, verify
from datastates.contents.listing import list_file
from datastates.errors import CorruptCheckpointError
from datastates.integrity import record_of, record_stamp
from datastates.manifest import commit_path, manifest_path, read_commit

NAMES = ("a.pt", "b.safetensors")


def make_state(seed: float = 0.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(1 << 19).float() + seed, "b": torch.full((1000,), seed)},
        "big": torch.arange(1 << 20).double() + seed,
        "step": 3,
        "note": "x" * 1000,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two committed checkpoints, ``step1`` and ``step2``, each with a file of both formats."""
    root = tmp_path_factory.mktemp("saved")
    with CheckpointEngine({"host_cache_size": 0.02}, rank=0) as engine:
        for step in (1, 2):
            folder = root / f"step{step}"
            with engine.checkpoint(str(folder), folder.name):
                for name in NAMES:
                    engine.save(make_state(float(step)), str(folder / name))
        engine.wait(persist=True)
    return root


@pytest.fixture
def checkpoint(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of ``step2`` to be damaged: a copied checkpoint is as complete as the original."""
    return pathlib.Path(shutil.copytree(saved / "step2", tmp_path / "step2"))


def flip(path: pathlib.Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 16]))


def place_of(path: pathlib.Path, fqn: str) -> int:
    return next(tensor.offset for tensor in list_file(path).tensors if tensor.fqn == fqn)


def in_the_middle_of(fqn: str) -> Callable[[pathlib.Path], int]:
    return lambda path: place_of(path, fqn) + 2000


REGIONS: dict[str, tuple[Callable[[pathlib.Path], int], str, str]] = {
    # where, what `verify` calls it in a.pt, and in b.safetensors
    "the-large-tensor": (in_the_middle_of("big"), "big", "big"),
    "another-tensor": (in_the_middle_of("model.w"), "model.w", "model.w"),
    "a-small-tensor": (in_the_middle_of("model.b"), "model.b", "model.b"),
    "the-objects": (lambda path: path.read_bytes().index(b"xxxxxxxx"), "objects", "header"),
    "the-first-header": (lambda _path: 20, "header", "header"),
    "padding": (lambda path: path.read_bytes().index(b"    " if path.suffix != ".pt" else b"ZZZZ"), "header", "header"),
}


def test_sound_files(checkpoint: pathlib.Path) -> None:
    assert verify(str(checkpoint)) == []
    for name in NAMES:
        assert load(checkpoint / name)["step"] == 3


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_bit(checkpoint: pathlib.Path, name: str, region: str) -> None:
    where, in_torch, in_safetensors = REGIONS[region]
    path, expected = checkpoint / name, in_torch if name == NAMES[0] else in_safetensors
    offset = where(path)
    flip(path, offset)
    (problem,) = verify(str(checkpoint))
    is_exact = name == NAMES[0] and expected not in ("header",)
    assert problem.path == str(path)
    assert expected in problem.message and f"expected {problem.expected:08x}" in problem.message
    assert problem.offset is not None and problem.offset <= offset < problem.offset + (1 << 23)
    if name == NAMES[0]:
        assert problem.fqn == (expected if expected not in ("header", "objects") else "")
    else:  # a slab covers several tensors: all of them are named
        assert problem.fqn in problem.message
    if is_exact:
        assert problem.message.startswith(f"{expected}: ")
    with pytest.raises(CorruptCheckpointError) as caught:
        load(path, weights_only=False)
    assert caught.value.path == str(path)
    if is_exact and expected != "objects":
        assert (caught.value.fqn, caught.value.offset) == (expected, problem.offset)


def test_the_record_of_a_file(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    record = record_of(str(checkpoint / NAMES[1]))
    assert (record.name, record.nbytes) == (NAMES[1], (checkpoint / NAMES[1]).stat().st_size)
    (checkpoint / "other.pt").write_bytes(b"x")
    assert record_of(str(checkpoint / "other.pt")) is None
    assert record_of(str(tmp_path / "elsewhere" / "x.pt")) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_checked_loads(checkpoint: pathlib.Path, name: str) -> None:
    path = checkpoint / name
    flip(path, place_of(path, "big") + 2000)
    loaded, state = load(path, check=False), make_state(2.0)
    assert not torch.equal(loaded["big"], state["big"])
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_tensor_hinders_only_who_asks_for_it(checkpoint: pathlib.Path, name: str) -> None:
    path = checkpoint / name
    flip(path, place_of(path, "big") + (1 << 22))
    assert torch.equal(load(path, keys="model")["model"]["w"], make_state(2.0)["model"]["w"])
    with pytest.raises(CorruptCheckpointError, match="big"):
        load(path, keys=["big"])


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_checkpoint_in_its_place(saved: pathlib.Path, checkpoint: pathlib.Path, name: str) -> None:
    shutil.copy(saved / "step1" / name, checkpoint / name)
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        load(checkpoint / name)
    assert verify(str(checkpoint)) != []


@pytest.mark.parametrize("change", [-1, -4096, 7])
@pytest.mark.parametrize("name", NAMES)
def test_cut_and_prolonged_files(checkpoint: pathlib.Path, name: str, change: int) -> None:
    path, data = checkpoint / name, (checkpoint / name).read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    for keys in (None, "model"):
        with pytest.raises(CorruptCheckpointError, match=f"{len(data) + change} bytes found, {len(data)} expected"):
            load(path, keys=keys)
        with pytest.raises(CorruptCheckpointError):
            load(path, keys=keys, check=False)  # the structure alone tells
    (problem,) = verify(str(checkpoint))
    assert problem.path == str(path) and str(len(data)) in problem.message


def test_a_damaged_manifest(checkpoint: pathlib.Path) -> None:
    record = read_commit(str(checkpoint))
    manifest = pathlib.Path(manifest_path(str(checkpoint), record.attempt, 0))
    manifest.write_bytes(manifest.read_bytes().replace(b'"rank": 0', b'"rank": 1'))
    with pytest.raises(CorruptCheckpointError, match="committed with") as caught:
        load(checkpoint / NAMES[0])
    assert caught.value.path == str(manifest)
    assert load(checkpoint / NAMES[0], check=False)["step"] == 3
    (problem,) = verify(str(checkpoint))
    assert problem.path == str(manifest)


def test_all_damage_is_listed_by_name(checkpoint: pathlib.Path) -> None:
    for name in NAMES:
        for fqn in ("model.w", "big"):
            flip(checkpoint / name, place_of(checkpoint / name, fqn) + 100)
    problems = verify(str(checkpoint))
    assert {(pathlib.Path(one.path).name, one.fqn) for one in problems} >= {("a.pt", "model.w"), ("a.pt", "big")}
    assert sum(problem.path.endswith(NAMES[1]) for problem in problems) >= 1


def test_progress_of_verify_adds_up(checkpoint: pathlib.Path) -> None:
    done: list[int] = []
    assert verify(str(checkpoint), num_threads=3, progress=done.append) == []
    assert sum(done) == sum((checkpoint / name).stat().st_size for name in NAMES)


def test_verify_of_a_missing_file(checkpoint: pathlib.Path) -> None:
    (checkpoint / NAMES[0]).unlink()
    assert [problem.message for problem in verify(str(checkpoint))] == ["the file is missing"]


def test_files_that_only_torch_reads_are_checked_as_parts_of_a_checkpoint(tmp_path: pathlib.Path) -> None:
    """They have no checksums of their own."""
    big = make_state()["big"]  # alone: the old form has storages in the order of their addresses
    torch.save({"big": big}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    path = tmp_path / "step1" / "old.pt"
    with CheckpointEngine({"host_cache_size": 0.02}, rank=0) as engine:
        with engine.checkpoint(str(path.parent), "step1"):
            engine.save_file(str(tmp_path / "old.pt"), str(path))
        engine.wait(persist=True)
    reader.verify(path)
    assert torch.equal(load(path)["big"], big)
    flip(path, path.stat().st_size - 9)
    for read in (reader.verify, load):
        with pytest.raises(CorruptCheckpointError, match="objects is damaged"):
            read(path)
    assert not torch.equal(load(path, check=False)["big"], big)


# --- files of torch.save


def test_a_flipped_bit_in_a_file_of_torch(tmp_path: pathlib.Path) -> None:
    torch.save(make_state(), tmp_path / "x.pt")
    assert torch.equal(load(tmp_path / "x.pt")["big"], make_state()["big"])
    offset = place_of(tmp_path / "x.pt", "model.b")
    flip(tmp_path / "x.pt", offset + 12)
    with pytest.raises(CorruptCheckpointError, match=rf"model\.b is damaged: bytes {offset} to {offset + 4000} "):
        load(tmp_path / "x.pt")
    assert not torch.equal(load(tmp_path / "x.pt", check=False)["model"]["b"], make_state()["model"]["b"])


def test_files_without_checksums_are_not_called_damaged(tmp_path: pathlib.Path) -> None:
    """``set_crc32_options(False)`` and ``skip_data`` leave the field empty."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(make_state(), tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with torch.serialization.skip_data():
        torch.save(make_state(), tmp_path / "y.pt")
    assert torch.equal(load(tmp_path / "x.pt")["big"], make_state()["big"])
    assert load(tmp_path / "y.pt")["big"].shape == make_state()["big"].shape


# --- a checkpoint that is saved again while it is read


@pytest.fixture
def twice(saved: pathlib.Path, tmp_path: pathlib.Path) -> tuple[pathlib.Path, Callable[[], None]]:
    """A checkpoint, and what commits another save of it: all files and the record are replaced."""
    folder = pathlib.Path(shutil.copytree(saved / "step1", tmp_path / "step"))

    def commit_again() -> None:
        shutil.copytree(saved / "step2", tmp_path / "next")
        folder.rename(tmp_path / f"former{len(list(tmp_path.iterdir()))}")
        (tmp_path / "next").rename(folder)

    return folder, commit_again


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("into", [False, True])
def test_a_commit_between_the_file_and_its_record_is_no_damage(
    twice: tuple[pathlib.Path, Callable[[], None]], monkeypatch: pytest.MonkeyPatch, name: str, into: bool
) -> None:
    folder, commit_again = twice
    calls = 0

    def late_record(path: str) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            commit_again()  # the file is open already
        return record_of(path)

    monkeypatch.setattr(reader, "record_of", late_record)
    targets = {"model": {key: torch.zeros_like(value) for key, value in make_state()["model"].items()}}
    targets["big"] = torch.zeros_like(make_state()["big"])
    found = load(folder / name, **({"into": targets} if into else {}))
    model = targets["model"] if into else found["model"]
    assert calls == 2 and torch.equal(model["w"], make_state(2.0)["model"]["w"])


@pytest.mark.parametrize("name", NAMES)
def test_verifying_one_file_starts_over_as_well(
    twice: tuple[pathlib.Path, Callable[[], None]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, commit_again = twice
    calls = 0

    def late_record(path: str) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            commit_again()
        return record_of(path)

    monkeypatch.setattr(reader, "record_of", late_record)
    reader.verify(folder / name)
    assert calls == 2


def test_verifying_a_checkpoint_that_is_saved_again(
    twice: tuple[pathlib.Path, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commit_again = twice
    original, calls = integrity.committed_files, 0

    def early_files(directory: str) -> object:
        nonlocal calls
        calls += 1
        files = original(directory)
        if calls == 1:
            commit_again()  # the files that are read next are of another save than these records
        return files

    monkeypatch.setattr(integrity, "committed_files", early_files)
    assert verify(str(folder)) == [] and calls == 2


def test_commits_without_end_are_given_up(
    saved: pathlib.Path, checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = record_of(str(saved / "step1" / NAMES[0]))
    stamps = iter(range(100))
    calls = 0

    def record(_path: str) -> object:
        nonlocal calls
        calls += 1
        return other

    monkeypatch.setattr(reader, "record_of", record)
    monkeypatch.setattr(reader, "record_stamp", lambda _path: (next(stamps), 0, 0))
    with pytest.raises(CorruptCheckpointError):
        load(checkpoint / NAMES[0])
    assert calls == 4


def test_the_same_record_is_not_read_twice(
    saved: pathlib.Path, checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def record(_path: str) -> object:
        nonlocal calls
        calls += 1
        return record_of(str(saved / "step1" / NAMES[0]))

    monkeypatch.setattr(reader, "record_of", record)
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        load(checkpoint / NAMES[0])
    assert calls == 1


def test_the_stamp_of_a_record(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = str(checkpoint / NAMES[0])
    stamp = record_stamp(path)
    assert stamp is not None and record_stamp(path) == stamp
    record = pathlib.Path(commit_path(str(checkpoint)))
    shutil.copy(record, tmp_path / "again")
    (tmp_path / "again").replace(record)
    assert record_stamp(path) not in (None, stamp)
    record.unlink()
    assert record_stamp(path) is None
    assert record_stamp(str(tmp_path / "elsewhere" / "x.pt")) is None
