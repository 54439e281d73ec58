"""Which checkpoints stay, and removing those that do not."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datastates import recovery, removal
from datastates.attempt_folder import AttemptLock
from datastates.checkpoint_engine import CheckpointEngine
from datastates.errors import CheckpointNotFoundError, ConfigError, StorageError
from datastates.manifest import read_commit
from datastates.removal import finish_removals, remove_checkpoint
from datastates.retention import RetentionPolicy, in_order


@dataclass(frozen=True)
class Known:
    tag: str
    step: int | None = None
    created_at: float = 0.0


def steps(*numbers: int) -> list[Known]:
    return [Known(f"global_step{number}", number) for number in numbers]


def kept(policy: RetentionPolicy, checkpoints: list[Known], **more: object) -> set[int]:
    return {int(tag.removeprefix("global_step")) for tag in policy.survivors(checkpoints, **more)}


def test_order_is_that_of_the_steps_whatever_the_clock_says():
    """huggingface/transformers#26961: the newest deleted because times on its file system were faked."""
    jumping = [Known(f"step{n}", n, (5 - n) * 86400.0) for n in (10, 9, 100, 1)]
    assert [one.tag for one in in_order(jumping)] == ["step1", "step9", "step10", "step100"]
    assert RetentionPolicy(keep_last=2).survivors(jumping) == {"step10", "step100"}


def test_tags_without_a_number_are_ordered_by_their_commits():
    named = [Known("final", None, 5.0), Known("best", None, 9.0), Known("x-1", 1, 1.0), Known("start", None, 1.0)]
    assert [one.tag for one in in_order(named)] == ["start", "final", "best", "x-1"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"keep_last": 1}, {60}),
        ({"keep_last": 3}, {40, 50, 60}),
        ({"keep_last": 9}, {10, 20, 30, 40, 50, 60}),
        ({"keep_last": 1, "keep_every": 20}, {20, 40, 60}),
        ({"keep_last": 1, "keep_every": 7}, {60}),
        ({"keep_last": 1, "keep_best": 1}, {30, 60}),
        ({"keep_last": 1, "keep_best": 2, "is_larger_better": True}, {10, 20, 60}),
        ({"keep_last": 1, "pinned": frozenset({"global_step20", "global_step99"})}, {20, 60}),
    ],
)
def test_rules(policy, expected):
    """Metrics: 30 is the smallest, 10 and 20 the largest, 40 is no number, the others have none."""
    metrics = {"global_step10": 3.0, "global_step20": 3.0, "global_step30": 1.0, "global_step40": float("nan")}
    assert kept(RetentionPolicy(**policy), steps(30, 10, 60, 20, 50, 40), metrics=metrics) == expected


def test_latest_stays_even_if_it_is_not_the_newest():
    assert kept(RetentionPolicy(), steps(1, 2, 3), latest="global_step1") == {1, 3}


@given(
    numbers=st.lists(st.integers(0, 50), unique=True),
    keep_last=st.integers(1, 4),
    keep_best=st.integers(0, 3),
    metrics=st.dictionaries(st.integers(0, 50), st.floats()),
)
def test_survivors_are_the_newest_and_the_best(numbers, keep_last, keep_best, metrics):
    """huggingface/transformers#11748: protecting the best deleted the newest, or all with a limit of one."""
    policy = RetentionPolicy(keep_last=keep_last, keep_best=keep_best)
    found = kept(policy, steps(*numbers), metrics={f"global_step{n}": value for n, value in metrics.items()})
    newest = set(sorted(numbers)[-keep_last:])
    rated = [n for n in numbers if n in metrics and metrics[n] == metrics[n]]
    best = set(sorted(rated, key=lambda n: (metrics[n], -n))[:keep_best])
    assert found == newest | best


@pytest.mark.parametrize(
    "wrong", [{"keep_last": 0}, {"keep_last": True}, {"keep_best": -1}, {"keep_every": 0}, {"keep_every": 1.5}]
)
def test_wrong_rules(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RetentionPolicy(**wrong)


# ------------------------------------------------------------------------------------------------ removal


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "run" / "step1"
    with CheckpointEngine({"host_cache_size": 2**-8}, rank=0) as engine, engine.checkpoint(str(folder), "step1"):
        engine.save({"w": torch.ones(100)}, str(folder / "a.pt"))
    return folder


def test_a_removed_checkpoint_leaves_nothing(checkpoint):
    elsewhere = checkpoint.parent.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    (checkpoint / "link").symlink_to(elsewhere)
    remove_checkpoint(str(checkpoint))
    assert os.listdir(checkpoint.parent) == ["latest"]
    assert (elsewhere / "precious").read_text() == "x"


@pytest.mark.parametrize("cut", ["rename", "_remove_tree"])
def test_a_removal_that_is_cut_is_finished_by_the_next_start(checkpoint, monkeypatch, cut):
    """At each moment the checkpoint is whole, or no tool takes what is left for one."""
    calls = []

    def killed(*args: object) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        if cut == "rename":
            rename(*args)

    rename = os.rename
    monkeypatch.setattr(removal.os if cut == "rename" else removal, cut, killed)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoint(str(checkpoint))
    monkeypatch.undo()
    if cut == "rename":
        recovery.recover(str(checkpoint))
        assert read_commit(str(checkpoint)) is not None
        return
    assert not checkpoint.exists()
    recovery.clean_leftovers(str(checkpoint.parent))
    assert os.listdir(checkpoint.parent) == ["latest"]


def test_a_removal_that_is_refused_changes_nothing(checkpoint, monkeypatch):
    """A parent folder without permission to write, or a mount point: the files could be removed, the name cannot."""
    rename, before = os.rename, sorted(map(str, checkpoint.rglob("*")))

    def refusing(source: str, target: str) -> None:
        if source == str(checkpoint):
            raise PermissionError(errno.EACCES, "Permission denied", source)
        rename(source, target)

    monkeypatch.setattr(removal.os, "rename", refusing)
    with pytest.raises(StorageError, match="Permission denied"):
        remove_checkpoint(str(checkpoint))
    assert sorted(map(str, checkpoint.rglob("*"))) == before
    assert read_commit(str(checkpoint)) is not None


def test_copies_of_one_checkpoint_count_once():
    copied = [*steps(10, 20), Known("global_step30", 30), Known("global_step30", 30, 5.0)]
    assert kept(RetentionPolicy(keep_last=2), copied) == {20, 30}


def test_only_our_own_hidden_names_are_cleaned(tmp_path):
    (tmp_path / ".x.datastates.removed").mkdir()
    (tmp_path / ".x.removed").mkdir()
    (tmp_path / "x.datastates.removed").mkdir()
    assert finish_removals(str(tmp_path)) == [str(tmp_path / "x")]
    assert sorted(os.listdir(tmp_path)) == [".x.removed", "x.datastates.removed"]


def test_what_is_still_being_saved_stays(checkpoint):
    """Saving an existing tag again: a flusher holds a lock in the folder."""
    lock = AttemptLock(str(checkpoint), "other-00000000-0001")
    with pytest.raises(StorageError, match="living job"):
        remove_checkpoint(str(checkpoint))
    lock.release()
    remove_checkpoint(str(checkpoint))


def test_links_are_not_removed(checkpoint):
    link = checkpoint.parent / "link"
    link.symlink_to(checkpoint)
    with pytest.raises(StorageError, match="link"):
        remove_checkpoint(str(link))
    assert (checkpoint / "a.pt").exists()


def test_no_such_checkpoint(tmp_path):
    with pytest.raises(StorageError, match="nowhere") as caught:
        remove_checkpoint(str(tmp_path / "nowhere"))
    assert not isinstance(caught.value, CheckpointNotFoundError)
