"""Which checkpoints of a framework are deleted, when, and what is there when that is cut."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal

import pytest
import torch

from datastates import CheckpointEngine, integrity, removal
from datastates.attempt_folder import AttemptLock
from datastates.errors import StorageError
from datastates.integrations import rotation as rotation_module
from datastates.integrations.rotation import Rotation, set_aside
from datastates.integrations.series import Series, finish_interrupted, is_complete, youngest_complete


@pytest.fixture
def rotation():
    rotation = Rotation()
    yield rotation
    rotation.finish(30)


@pytest.fixture
def engine():
    with CheckpointEngine({"host_cache_size": 0.00390625, "pin_host_cache": False}) as engine:
        yield engine


def series(folder, limit, *protected):
    keep = frozenset(os.path.realpath(folder / f"checkpoint-{number}") for number in protected)
    return Series(os.path.realpath(folder), "checkpoint-", limit, keep)


def last_checkpoint(folder):
    return youngest_complete(str(folder), "checkpoint-")


def save(engine, folder, number):
    """What a Trainer writes, with a DeepSpeed part that is in flight when this returns."""
    checkpoint = folder / f"checkpoint-{number}"
    tag = f"global_step{number}"
    with engine.checkpoint(str(checkpoint / tag), tag):
        state = {"w": torch.full((1000,), float(number))}
        engine.save(state, str(checkpoint / tag / "mp_rank_00_model_states.pt"))
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint / "rng_state.pth").write_text("random")
    return checkpoint


def numbers(folder):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def write(folder, number):
    """What a Trainer writes whose DeepSpeed saves with an engine of its own."""
    part = folder / f"checkpoint-{number}" / f"global_step{number}"
    part.mkdir(parents=True)
    (part / "mp_rank_00_model_states.pt").write_text("weights")
    (part.parent / "latest").write_text(part.name)
    (part.parent / "trainer_state.json").write_text("{}")
    (part.parent / "rng_state.pth").write_text("random")
    return part.parent


def write_all(rotation, folder, steps, limit, *protected):
    for step in steps:
        rotation.note_saved(str(write(folder, step)))
        rotation.ask(series(folder, limit, *(number for number in protected if number <= step)))
        rotation.finish(30)


@pytest.mark.parametrize(("limit", "best"), list(itertools.product([1, 2, 3], [None, 1, 3, 5])))
def test_the_youngest_and_the_best_stay(rotation, tmp_path, limit, best):
    write_all(rotation, tmp_path, range(1, 6), limit, *([best] if best else []))
    youngest = [5, 4, 3, 2, 1]
    expected = {5, best} - {None}
    expected |= set([number for number in youngest if number not in expected][: max(limit - len(expected), 0)])
    assert numbers(tmp_path) == sorted(expected)


@pytest.mark.parametrize("seed", range(3))
def test_the_times_of_folders_do_not_matter(rotation, tmp_path, seed):
    chance = random.Random(seed)
    for step in (8, 9, 10, 11, 100):
        rotation.note_saved(str(write(tmp_path, step)))
        for path in tmp_path.glob("checkpoint-*"):
            os.utime(path, (0, chance.choice([0, 1, 10**10, chance.random()])))
        rotation.ask(series(tmp_path, 3))
    assert numbers(tmp_path) == [10, 11, 100]


def test_checkpoints_of_an_earlier_run_are_older_than_those_of_this_whatever_their_number(rotation, tmp_path):
    write(tmp_path, 500)
    write(tmp_path, 600)
    write_all(rotation, tmp_path, [10, 20], 2)
    assert numbers(tmp_path) == [10, 20]


def test_what_a_further_tier_is_still_to_get_stays(rotation, tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    far.write_text("in the way")
    near.mkdir()
    with CheckpointEngine({"host_cache_size": 0.00390625, "tiers": [near, far]}) as engine:
        for number in (1, 2):
            save(engine, near, number)
            rotation.ask(series(near, 1))
        rotation.finish(60)
        assert numbers(near) == [1, 2]
        far.unlink()
        engine.wait_carried(120)
        rotation.ask(series(near, 1))
    rotation.finish(60)
    assert numbers(near) == [2]
    assert integrity.verify(str(far / "checkpoint-1" / "global_step1")) == []


def test_what_is_in_no_tier_is_not_waited_for(rotation, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with CheckpointEngine({"host_cache_size": 0.00390625, "tiers": [tmp_path / "near", tmp_path / "far"]}) as engine:
        for number in (1, 2):
            save(engine, tmp_path / "elsewhere", number)
            rotation.ask(series(tmp_path / "elsewhere", 1))
        rotation.finish(60)
        assert numbers(tmp_path / "elsewhere") == [2]


def test_the_older_one_stays_until_the_younger_is_complete(engine, rotation, tmp_path):
    save(engine, tmp_path, 1)
    engine.wait(persist=True)
    os.kill(engine.saver.flusher_pid, signal.SIGSTOP)
    try:
        save(engine, tmp_path, 2)
        rotation.ask(series(tmp_path, 1))
        assert numbers(tmp_path) == [1, 2]
        save(engine, tmp_path, 3)
        rotation.ask(series(tmp_path, 1))
        assert numbers(tmp_path) == [1, 2, 3]
        assert integrity.verify(str(tmp_path / "checkpoint-1" / "global_step1")) == []
    finally:
        os.kill(engine.saver.flusher_pid, signal.SIGCONT)
    rotation.finish(30)
    assert numbers(tmp_path) == [3]
    assert integrity.verify(str(tmp_path / "checkpoint-3" / "global_step3")) == []


def test_the_older_one_stays_when_the_younger_is_lost(engine, rotation, tmp_path):
    save(engine, tmp_path, 1)
    engine.wait(persist=True)
    with pytest.raises(ZeroDivisionError), engine.checkpoint(str(tmp_path / "checkpoint-2" / "global_step2"), "2"):
        raise ZeroDivisionError
    (tmp_path / "checkpoint-2").mkdir(exist_ok=True)
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-2" / "rng_state.pth").write_text("random")
    rotation.ask(series(tmp_path, 1))
    assert numbers(tmp_path) == [1, 2]
    assert last_checkpoint(tmp_path) == os.path.realpath(tmp_path / "checkpoint-1")
    rotation.note_saved(str(save(engine, tmp_path, 3)))
    rotation.ask(series(tmp_path, 1))
    rotation.finish(30)
    assert numbers(tmp_path) == [3]  # the lost one goes with the others


def test_a_folder_that_cannot_be_deleted_is_told_of_and_harms_nothing(rotation, tmp_path, monkeypatch, caplog):
    write(tmp_path, 1)

    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(removal.os, "rename", refuse)
    write_all(rotation, tmp_path, [2], 1)
    assert numbers(tmp_path) == [1, 2]
    assert "old checkpoints stay" in caplog.text
    assert "checkpoint-1" in caplog.text


def test_a_defect_on_the_thread_is_told_of_and_the_next_wish_is_fulfilled(
    engine, rotation, tmp_path, monkeypatch, caplog
):
    def break_down(*_):
        raise ZeroDivisionError

    for step in (1, 2):
        with monkeypatch.context() as patched:
            if step == 1:
                patched.setattr(rotation_module, "is_complete", break_down)
            os.kill(engine.saver.flusher_pid, signal.SIGSTOP)
            try:
                save(engine, tmp_path, step)
                rotation.ask(series(tmp_path, 1))
            finally:
                os.kill(engine.saver.flusher_pid, signal.SIGCONT)
            rotation.finish(30)
    assert "ZeroDivisionError" in caplog.text
    assert numbers(tmp_path) == [2]


def test_files_of_the_youngest_are_durable_before_an_older_one_goes(rotation, tmp_path, monkeypatch):
    write(tmp_path, 1)
    order = []
    real_fsync, real_rename = rotation_module.fsync, os.rename
    monkeypatch.setattr(
        rotation_module,
        "fsync",
        lambda descriptor: (order.append(os.readlink(f"/proc/self/fd/{descriptor}")), real_fsync(descriptor)),
    )
    monkeypatch.setattr(removal.os, "rename", lambda *paths: (order.append(os.fspath(paths[0])), real_rename(*paths)))
    write_all(rotation, tmp_path, [2], 1)
    youngest, older = (os.path.realpath(tmp_path / f"checkpoint-{number}") for number in (2, 1))
    assert order.index(f"{youngest}/trainer_state.json") < order.index(older)
    assert order.index(f"{youngest}/rng_state.pth") < order.index(older)


def test_a_deletion_that_is_cut_leaves_no_half_checkpoint(rotation, tmp_path, monkeypatch):
    checkpoint = write(tmp_path, 1)

    def cut(path):
        os.unlink(os.path.join(path, "rng_state.pth"))
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    rotation.note_saved(str(write(tmp_path, 2)))
    with monkeypatch.context() as patch:
        patch.setattr(removal.shutil, "rmtree", cut)
        rotation.ask(series(tmp_path, 1))
    assert checkpoint.exists() is False
    assert numbers(tmp_path) == [2]
    assert len(os.listdir(tmp_path)) == 2
    write_all(rotation, tmp_path, [3], 1)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-3"]  # what was left of the deletion is gone, too


def test_other_folders_and_links_are_left_alone(rotation, tmp_path):
    others = ["checkpoint-x", "checkpoint-1-copy", "my-checkpoint-1", "checkpoint--3", "elsewhere"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-4").symlink_to(tmp_path / "elsewhere")
    write_all(rotation, tmp_path, [5, 6], 1)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "checkpoint-4", "checkpoint-6"])


# -------------------------------------------------------------------------- which checkpoint is complete


def test_a_checkpoint_is_complete_when_all_its_parts_are(engine, tmp_path):
    checkpoint = save(engine, tmp_path, 1)
    engine.wait(persist=True)
    assert is_complete(str(checkpoint))
    os.rename(checkpoint / "trainer_state.json", checkpoint / "x")
    assert not is_complete(str(checkpoint))  # the Trainer writes it last
    os.rename(checkpoint / "x", checkpoint / "trainer_state.json")
    (checkpoint / "global_step1" / ".datastates" / "commit.json").write_text("no record")
    assert not is_complete(str(checkpoint))
    (checkpoint / "global_step1" / ".datastates" / "commit.json").unlink()
    assert not is_complete(str(checkpoint))
    shutil.rmtree(checkpoint / "global_step1")
    assert not is_complete(str(checkpoint))  # the random states say that there was a DeepSpeed part
    (checkpoint / "rng_state.pth").unlink()
    assert is_complete(str(checkpoint))  # save_only_model


def test_a_checkpoint_of_another_engine_counts(tmp_path):
    folder = tmp_path / "checkpoint-3" / "global_step3"
    folder.mkdir(parents=True)
    (folder.parent / "trainer_state.json").write_text("{}")
    assert not is_complete(str(folder.parent))
    (folder / "mp_rank_00_model_states.pt").write_text("")
    assert not is_complete(str(folder.parent))
    (folder.parent / "latest").write_text("global_step3")
    assert is_complete(str(folder.parent))
    assert last_checkpoint(tmp_path) == os.path.realpath(folder.parent)


def test_the_last_checkpoint_is_found_by_number_among_those_that_are_complete(engine, tmp_path):
    assert last_checkpoint(tmp_path / "nowhere") is None
    for step in (9, 10, 99, 100):
        save(engine, tmp_path, step)
    engine.wait(persist=True)
    assert last_checkpoint(tmp_path) == os.path.realpath(tmp_path / "checkpoint-100")
    (tmp_path / "checkpoint-100" / "global_step100" / ".datastates" / "commit.json").unlink()
    assert last_checkpoint(tmp_path) == os.path.realpath(tmp_path / "checkpoint-100")  # all is there: completed
    os.unlink(tmp_path / "checkpoint-100" / "global_step100" / ".datastates" / "commit.json")
    os.unlink(tmp_path / "checkpoint-100" / "global_step100" / "mp_rank_00_model_states.pt")
    assert last_checkpoint(tmp_path) == os.path.realpath(tmp_path / "checkpoint-99")


def test_a_commit_that_is_finished_at_the_next_start_gets_the_latest_that_it_lacks(engine, tmp_path):
    checkpoint = save(engine, tmp_path, 6)
    engine.wait(persist=True)
    (checkpoint / "global_step6" / ".datastates" / "commit.json").unlink()
    (checkpoint / "latest").unlink()
    assert not is_complete(str(checkpoint))
    assert last_checkpoint(tmp_path) == os.path.realpath(checkpoint)
    assert (checkpoint / "latest").read_text() == "global_step6"


def test_a_flusher_that_outlives_its_trainer_is_waited_for(engine, tmp_path):
    checkpoint = save(engine, tmp_path, 1)
    engine.wait(persist=True)
    os.kill(engine.saver.flusher_pid, signal.SIGSTOP)
    try:
        checkpoint = save(engine, tmp_path, 2)
        lock = AttemptLock(str(checkpoint / "global_step2"), "0123456789ab-01234567-0001")
        assert finish_interrupted(str(checkpoint), timeout=0.1)
        assert not is_complete(str(checkpoint))
        lock.release()
    finally:
        os.kill(engine.saver.flusher_pid, signal.SIGCONT)
    engine.wait(persist=True)
    assert not finish_interrupted(str(checkpoint))
    assert is_complete(str(checkpoint))


def test_what_is_set_aside_gets_a_name_that_is_free(tmp_path):
    for number in (1, 2, 3):
        (tmp_path / "checkpoint-7").mkdir()
        target = set_aside(str(tmp_path / "checkpoint-7"))
        assert os.path.basename(target) == "incomplete-checkpoint-7" + ("" if number == 1 else f"-{number}")
    with pytest.raises(StorageError, match="checkpoint-8"):
        set_aside(str(tmp_path / "checkpoint-8"))
