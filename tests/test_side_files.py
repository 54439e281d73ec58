"""Files of somebody else's in a checkpoint: byte for byte, lazily, committed with the rest."""

from __future__ import annotations

import errno
import os
import threading

import pytest
import torch

from datastates import manifest
from datastates.checkpoint_engine import CheckpointEngine
from datastates.errors import ClosedError, StorageError, TornSnapshotError
from datastates.integrity import verify
from datastates.side_files import SideFile, plan_side_file

SMALL = {"host_cache_size": 2**-8, "slab_bytes": 1 << 20}  # 4 MiB


@pytest.fixture
def engine():
    made = CheckpointEngine(SMALL, rank=0)
    yield made
    made.close()


@pytest.fixture
def held(engine):
    """Nothing is staged before the event is set."""
    opened, fill = threading.Event(), engine.saver._stager._fill
    engine.saver._stager._fill = lambda *arguments: (opened.wait(30), fill(*arguments))[1]
    yield opened
    opened.set()


def write(path, nbytes: int, seed: int = 0) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    path.write_bytes(data)
    return data


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 1 << 20, (9 << 20) + 5])
def test_a_file_of_any_size_becomes_part_of_a_checkpoint(engine, tmp_path, nbytes):
    source, directory = tmp_path / "swapped.swp", tmp_path / "step1"
    data = write(source, nbytes)
    with engine.checkpoint(str(directory), "step1"):
        engine.save({"weight": torch.ones(1000)}, str(directory / "state.pt"))
        engine.save_file(str(source), str(directory / "side" / "rank00" / "a.swp"))
    engine.wait(persist=True)
    assert (directory / "side" / "rank00" / "a.swp").read_bytes() == data
    record = manifest.read_commit(str(directory))
    assert record.file_nbytes["side/rank00/a.swp"] == nbytes
    assert verify(str(directory)) == []


def test_a_lone_file_is_copied(engine, tmp_path):
    data = write(tmp_path / "a", 3 << 20)
    engine.save_file(str(tmp_path / "a"), str(tmp_path / "b"))
    engine.wait(persist=True)
    assert (tmp_path / "b").read_bytes() == data


def test_an_existing_checkpoint_is_replaced_with_its_files(engine, tmp_path):
    directory = tmp_path / "step1"
    for seed, names in enumerate((("a", "b"), ("b", "c"))):
        data = {name: write(tmp_path / name, 100_000, seed) for name in names}
        with engine.checkpoint(str(directory), "step1"):
            for name in names:
                engine.save_file(str(tmp_path / name), str(directory / "side" / name))
        engine.wait(persist=True)
    assert {path.name: path.read_bytes() for path in (directory / "side").iterdir()} == data


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_source_that_goes_away_after_the_save_is_saved(engine, held, tmp_path, change):
    source, copy = tmp_path / "source", tmp_path / "copy"
    data = write(source, 100_000)
    engine.save_file(str(source), str(copy))
    if change == "deleted":
        source.unlink()
    else:
        write(tmp_path / "other", 50_000, seed=1)
        os.replace(tmp_path / "other", source)
    held.set()
    engine.wait(persist=True)
    assert copy.read_bytes() == data


@pytest.mark.parametrize("change", ["same size", "longer", "shorter"])
def test_a_source_that_is_written_to_before_the_copy_loses_the_save_and_no_other(engine, held, tmp_path, change):
    source, directory = tmp_path / "source", tmp_path / "step1"
    write(source, 100_000)
    with engine.checkpoint(str(directory), "step1"):
        engine.save_file(str(source), str(directory / "a"))
    with source.open("r+b") as file:
        file.truncate({"same size": 100_000, "longer": 200_000, "shorter": 10}[change])
        file.write(b"x")
    held.set()
    with pytest.raises(TornSnapshotError, match="was written to between"):
        engine.wait(persist=True)
    assert not (directory / "a").exists()
    with engine.checkpoint(str(directory), "step1"):
        engine.save_file(str(source), str(directory / "a"))
    engine.wait(persist=True)
    assert (directory / "a").read_bytes() == source.read_bytes()


def test_the_fence_holds_the_writer_back_until_the_file_is_copied(engine, held, tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    data = write(source, 100_000)
    engine.save_file(str(source), str(copy))
    threading.Timer(0, held.set).start()
    engine.fence.close()
    write(source, 100_000, seed=1)
    engine.wait(persist=True)
    assert copy.read_bytes() == data


def test_what_cannot_be_read_is_an_error_of_the_call(engine, tmp_path):
    with pytest.raises(StorageError) as caught:
        engine.save_file(str(tmp_path / "none"), str(tmp_path / "b"))
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(StorageError, match="is no regular file"):
        engine.save_file(str(tmp_path), str(tmp_path / "b"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="is no regular file"):
        engine.save_file(str(tmp_path / "pipe"), str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_a_closed_engine_saves_no_file(engine, tmp_path):
    write(tmp_path / "a", 10)
    engine.close()
    with pytest.raises(ClosedError):
        engine.save_file(str(tmp_path / "a"), str(tmp_path / "b"))


def test_with_verify_staging_a_side_file_is_read_again(tmp_path):
    data = write(tmp_path / "a", 3 << 20)
    with CheckpointEngine({**SMALL, "verify_staging": True}, rank=0) as engine:
        engine.save_file(str(tmp_path / "a"), str(tmp_path / "b"))
        engine.wait(persist=True)
    assert (tmp_path / "b").read_bytes() == data


def test_the_source_is_open_as_long_as_its_image_lives(tmp_path):
    write(tmp_path / "a", 10)
    plan = plan_side_file(str(tmp_path / "a"))
    source = plan.segments[0].source
    assert isinstance(source, SideFile)
    descriptor = source._descriptor
    assert os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path / "a")
    del plan, source
    with pytest.raises(OSError):
        os.fstat(descriptor)
