"""`Checkpointer` in one process: what is saved, what comes back, what stays, and what happens when something fails."""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import random
import re
import signal
import threading
from pathlib import Path

import numpy
import pytest
import torch

from datastates import CheckpointConfig, Checkpointer, integrity, removal
from datastates.errors import (
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
    CorruptCheckpointError,
    ForeignObjectError,
    MismatchError,
    StateError,
    StorageError,
    WaitTimeoutError,
)

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"host_cache_gb": 2**-8, "pin_host_cache": False}


@pytest.fixture
def make_checkpointer(tmp_path):
    """``make_checkpointer(**options)``: one for the folder ``run``; closed at the end of the test."""
    made = []

    def make(**options):
        made.append(Checkpointer(tmp_path / "run", **{**SETTINGS, **options}))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


class Training:
    """A model with buffers and dropout, its optimizer and schedule, and a place in the data."""

    def __init__(self, width=64):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.history = []
        self.width = width

    @property
    def state(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "history": self.history,
        }

    def step(self):
        inputs = torch.randn(8, self.width) + random.random() + float(numpy.random.rand())
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.history.append(loss.item())

    def content(self):
        model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return model, json.dumps(self.history), str(self.optimizer.state_dict()["state"])


def rank_file(tmp_path, step):
    return tmp_path / "run" / f"step{step}" / "rank-00000.pt"


def flip(path, offset=-2000):
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END)
        byte = file.read(1)
        file.seek(offset, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


# ----------------------------------------------------------------------------------- saving and resuming


def test_a_resumed_training_goes_on_to_the_bit(make_checkpointer, assert_same_state):
    random.seed(1), numpy.random.seed(1)
    training = Training()
    checkpointer = make_checkpointer()
    assert checkpointer.resume(training.state) is None
    for step in range(1, 7):
        training.step()
        if step == 3:
            handle = checkpointer.save(step, training.state)
    expected = training.content()
    checkpointer.close()
    assert handle.staged.done()
    assert handle.committed.result().num_files == 2

    other = Training()
    other.step()  # the optimizer has state, the random generators are elsewhere
    assert make_checkpointer().resume(other.state) == 3
    for _ in range(3):
        other.step()
    assert_same_state(list(other.content()), list(expected))


def test_files_are_ordinary_and_plain(make_checkpointer, tmp_path):
    training = Training()
    training.step()
    checkpointer = make_checkpointer()
    checkpointer.save(5, {**training.state, "note": {"π": (1, None)}}, metrics={"loss": 0.5}, block=True)
    loaded = torch.load(rank_file(tmp_path, 5), weights_only=True)
    assert list(loaded) == ["model", "optimizer", "schedule", "history", "note", "random_states"]
    Training().model.load_state_dict(loaded["model"])
    assert loaded["note"] == {"π": (1, None)}
    assert (tmp_path / "run" / "latest").read_text() == "step5"
    summary = torch.load(tmp_path / "run" / "step5" / "checkpoint.pt", weights_only=True)
    assert (summary["step"], summary["world_size"], summary["metrics"]) == (5, 1, {"loss": 0.5})
    assert integrity.verify(str(tmp_path / "run" / "step5")) == []


def test_safetensors_for_all(make_checkpointer, tmp_path, assert_same_state):
    training = Training()
    training.step()
    checkpointer = make_checkpointer(format="safetensors")
    checkpointer.save(1, training.state)
    expected = training.content()
    other = Training()
    assert checkpointer.resume(other.state) == 1
    assert_same_state(list(other.content()), list(expected))
    assert sorted(path.name for path in (tmp_path / "run" / "step1").glob("[!.]*")) == [
        "checkpoint.safetensors",
        "rank-00000.safetensors",
    ]


def test_training_goes_on_at_once_and_buffers_are_those_of_the_save(make_checkpointer, assert_same_state):
    """The flusher is stopped: only what `save` itself and the fence have waited for can be right."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    model.register_buffer("cache", torch.zeros(50_000))  # larger than what is copied at once for its size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = make_checkpointer(eager_bytes=0)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    os.kill(checkpointer._saver.flusher_pid, signal.SIGSTOP)
    try:
        checkpointer.save(1, {"model": model})
        with torch.no_grad():
            model.get_buffer("cache").add_(1.0)
        model[0](torch.randn(4, 300)).square().mean().backward()
        model(torch.randn(4, 300))  # moves the running mean
        optimizer.step()
    finally:
        os.kill(checkpointer._saver.flusher_pid, signal.SIGCONT)
    loaded = checkpointer.load(1).state["model"]
    assert_same_state(dict(loaded), expected)
    assert not torch.equal(loaded["0.weight"], model[0].weight)


def test_what_is_no_module_is_filled_in_place_or_replaced(make_checkpointer):
    weight, nested = torch.arange(4.0), {"a": [torch.ones(2)], "n": 1}
    state = {
        "weight": weight.clone(),
        "nested": nested,
        "epoch": 3,
        "seen": {1, 2},
        "log": [1, 2],
        "best": {"loss": 0.1},
        "pair": (1, 2),
        "state": {"w": torch.ones(3)},
    }
    checkpointer = make_checkpointer()
    checkpointer.save(1, state)
    checkpointer.wait_staged()
    target, inner, seen, log, best = torch.zeros(4), torch.zeros(2), set(), [7], {"x": 1}
    into = {"weight": target, "nested": {"a": [inner], "n": 0}, "epoch": 0, "seen": seen, "log": log, "best": best}
    into |= {"pair": None, "state": {}}
    found = checkpointer.load_latest(into)
    assert found.state is into
    assert torch.equal(target, weight)
    assert into["weight"] is target
    assert torch.equal(inner, torch.ones(2))
    assert into["nested"]["a"][0] is inner
    assert into["nested"]["n"] == 1
    assert (seen, log, best) == ({1, 2}, [1, 2], {"loss": 0.1})  # the objects that the caller may hold as well
    assert (into["epoch"], into["pair"]) == (3, (1, 2))
    assert torch.equal(into["state"]["w"], torch.ones(3))


def test_a_part_is_loaded_alone(make_checkpointer):
    training = Training()
    training.step()
    checkpointer = make_checkpointer()
    checkpointer.save(2, training.state)
    found = checkpointer.load(2, names=["model", "history"])
    assert list(found.state) == ["model", "history"]
    before = str(training.optimizer.state_dict())
    training.step()
    checkpointer.load_latest(training.state, names=["history"])
    assert len(training.history) == 1
    assert str(training.optimizer.state_dict()) != before
    with pytest.raises(MismatchError, match=r"no entry 'modle' of rank 0; near names: 'model'"):
        checkpointer.load(2, names=["modle"])


def test_a_module_of_other_names_or_shapes_is_not_loaded(make_checkpointer):
    checkpointer = make_checkpointer()
    checkpointer.save(1, {"model": torch.nn.Linear(2, 3)})
    other = torch.nn.Sequential(torch.nn.Linear(2, 3))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(
        MismatchError, match=r"'model' differ by name; missing in the checkpoint: model\.0\.bias"
    ) as told:
        checkpointer.load_latest({"model": other})
    assert told.value.unexpected == ("model.bias", "model.weight")
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(MismatchError, match=r"model\.weight has shape \(3, 2\) in the file, its target \(5, 2\)"):
        checkpointer.load_latest({"model": torch.nn.Linear(2, 5)})


def test_not_strict_fills_what_is_there(make_checkpointer):
    checkpointer = make_checkpointer()
    saved = torch.nn.Linear(2, 3)
    checkpointer.save(1, {"model": saved})
    other = torch.nn.Linear(2, 3)
    other.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    checkpointer.load_latest({"model": other}, strict=False)
    assert torch.equal(other.weight, saved.weight)
    with pytest.raises(MismatchError, match="scale"):
        checkpointer.load_latest({"model": other})


def test_a_module_with_a_state_beside_its_tensors(make_checkpointer):
    class Counting(torch.nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    module, other = Counting(2, 2), Counting(2, 2)
    module.count = 5
    checkpointer = make_checkpointer()
    checkpointer.save(1, {"model": module})
    checkpointer.load_latest({"model": other})
    assert other.count == 5
    assert torch.equal(other.weight, module.weight)
    with torch.device("meta"):
        empty = Counting(2, 2)
    with pytest.warns(UserWarning, match="no-op"):  # torch's own: such a module has to be given memory first
        checkpointer.load_latest({"model": empty})


def test_what_is_no_plain_data_needs_trust(make_checkpointer):
    checkpointer = make_checkpointer()
    options = argparse.Namespace(lr=0.1)
    checkpointer.save(1, {"options": options, "w": torch.ones(1)})
    with pytest.raises(ForeignObjectError, match=r"argparse\.Namespace"):
        checkpointer.load_latest({"options": None})
    assert checkpointer.load_latest({"options": None}, weights_only=False).state == {"options": options}
    assert torch.equal(checkpointer.load_latest(names=["w"]).state["w"], torch.ones(1))


# ---------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last is 0, expected a number from 1"),
        ({"keep_every": 0}, "keep_every is 0"),
        ({"keep_best": 2}, "keep_best is 2 and no metric is named"),
        ({"keep_last": None, "keep_every": 5}, "keep_last is None, so nothing is deleted"),
        ({"metric": ""}, "metric is ''"),
        ({"host_cache_gb": "4"}, "host_cache_gb is '4'"),
        ({"host_cache_gb": 1e-9}, "host_cache_gb is 1e-09 gigabytes"),
        ({"host_cash_gb": 4}, "unknown key 'host_cash_gb'; did you mean 'host_cache_gb'"),
        ({"replicated": "model"}, "replicated is 'model', expected names of entries"),
        ({"config": CheckpointConfig(host_cache_bytes=1 << 22), "format": "torch"}, "both config and"),
        ({"format": "zip"}, "format is 'zip'"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_made(tmp_path, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Checkpointer(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("step", "state", "message"),
    [
        (-1, {"w": torch.ones(1)}, "step is -1, expected a number from 0"),
        (True, {"w": torch.ones(1)}, "step is True"),
        (1.0, {"w": torch.ones(1)}, r"step is 1\.0"),
        (1, {}, "the state is a dict, expected names"),
        (1, torch.nn.Linear(1, 1), "the state is a Linear"),
        (1, {"a.b": 1}, r"an entry is called 'a\.b'"),
        (1, {3: 1}, "an entry is called 3"),
        (1, {"random_states": 1}, "'random_states' is the name of an entry that is added by itself"),
        (1, {"optimizers": [torch.nn.Linear(1, 1)]}, r"optimizers\.0 is a Linear: give it an entry of its own"),
        (1, {"w": torch.ones(1, device="meta")}, "w"),
        (1, {"f": lambda: 1}, "f"),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_nothing(make_checkpointer, tmp_path, step, state, message):
    checkpointer = make_checkpointer()
    with pytest.raises(StateError, match=message):
        checkpointer.save(step, state)
    checkpointer.save(7, {"w": torch.ones(1)})
    checkpointer.wait()
    assert checkpointer.steps() == [7]
    checkpointer.close()
    assert list((tmp_path / "run").glob("*/rank*")) == [rank_file(tmp_path, 7)]
    assert make_checkpointer().steps() == [7]
    assert sorted(os.listdir(tmp_path / "run")) == ["latest", "step7"]


def test_metrics_are_numbers_of_any_kind(make_checkpointer):
    checkpointer = make_checkpointer(metric="loss", keep_best=1)
    state = {"w": torch.ones(1)}
    values = {"loss": torch.tensor(0.25), "n": numpy.int64(3), "x": numpy.float32(0.5), "nan": float("nan"), "t": True}
    checkpointer.save(1, state, metrics=values)
    checkpointer.wait()
    found = checkpointer.metrics(1)
    assert found.pop("nan") != found["loss"]
    assert found == {"loss": 0.25, "n": 3.0, "x": 0.5, "t": 1.0}
    with pytest.raises(StateError, match="the metric 'loss' is tensor"):
        checkpointer.save(2, state, metrics={"loss": torch.ones(2)})
    with pytest.raises(StateError, match="the metrics have no 'loss', which the best"):
        checkpointer.save(2, state, metrics={"accuracy": 1})
    assert checkpointer.best_step() == 1


def test_closed_and_forked_ones_say_so(make_checkpointer):
    checkpointer = make_checkpointer()
    checkpointer.save(1, {"w": torch.ones(1)})
    child = os.fork()
    if child == 0:
        status = 1
        try:
            checkpointer.save(2, {"w": torch.ones(1)})
        except ClosedError as error:
            status = 0 if "belongs to process" in str(error) else 2
        try:
            checkpointer.close()  # nothing: it is the parent's
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    checkpointer.wait()
    checkpointer.close()
    checkpointer.close()
    assert checkpointer.steps() == [1]
    with pytest.raises(ClosedError, match="the saver is closed"):
        checkpointer.save(3, {"w": torch.ones(1)})


def test_a_forked_child_does_not_wait_for_what_only_the_parent_hears_of(make_checkpointer):
    checkpointer = make_checkpointer()
    flusher = checkpointer._saver.flusher_pid
    os.kill(flusher, signal.SIGSTOP)
    try:
        checkpointer.save(1, {"w": torch.ones(1)})
        calls = (checkpointer.wait, checkpointer.wait_staged, checkpointer.load_latest, lambda: checkpointer.pin(1))
        for call in calls:
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                status = 1
                try:
                    call()
                except ClosedError as error:
                    status = 0 if "belongs to process" in str(error) else 2
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        os.kill(flusher, signal.SIGCONT)


def test_steps_of_numpy_and_torch_are_numbers(make_checkpointer):
    checkpointer = make_checkpointer()
    checkpointer.save(numpy.int64(5), {"w": torch.ones(1)}, metrics={"loss": 1}, block=True)
    assert checkpointer.load(torch.tensor(5)).step == 5
    assert checkpointer.metrics(numpy.uint8(5)) == {"loss": 1.0}
    checkpointer.pin(numpy.int32(5))
    assert checkpointer.pinned() == [5]
    with pytest.raises(StateError, match=r"step is \d+, expected a number from 0 to 2\*\*63 - 1"):
        checkpointer.save(2**63, {"w": torch.ones(1)})
    with pytest.raises(StateError, match="metrics is 3, expected names and numbers"):
        checkpointer.save(6, {"w": torch.ones(1)}, metrics=3)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("model", "names is 'model', expected names of entries"),
        ([3], r"names is \[3\], expected names"),
        (["modle"], "names has 'modle', and there is no such entry to load into; near names: 'model'"),
    ],
)
def test_names_of_entries_that_are_none_are_named(make_checkpointer, names, message):
    checkpointer = make_checkpointer()
    checkpointer.save(1, {"model": torch.ones(1)})
    state = {"model": torch.zeros(1)}
    with pytest.raises(StateError, match=message):
        checkpointer.load_latest(state, names=names)
    assert state["model"] == 0


# ------------------------------------------------------------------------------- what stays and what goes


def save_all(checkpointer, steps, **metrics):
    for step in steps:
        checkpointer.save(step, {"w": torch.full((3,), float(step))}, metrics={k: v(step) for k, v in metrics.items()})


def test_the_last_every_best_and_pinned_stay_also_after_a_restart(make_checkpointer, tmp_path):
    rule = {"keep_last": 2, "keep_every": 10, "keep_best": 1, "metric": "loss"}
    checkpointer = make_checkpointer(**rule)
    save_all(checkpointer, range(1, 13), loss=lambda step: abs(step - 4))
    checkpointer.wait()
    assert checkpointer.steps() == [4, 10, 11, 12]
    checkpointer.pin(11)
    checkpointer.close()
    again = make_checkpointer(**rule)
    assert (again.pinned(), again.best_step(), again.latest_step) == ([11], 4, 12)
    save_all(again, (13, 14), loss=lambda step: 50)
    again.wait()
    assert again.steps() == [4, 10, 11, 13, 14]
    again.unpin(11)
    again.save(15, {"w": torch.ones(3)})
    again.wait()
    assert again.steps() == [4, 10, 14, 15]
    assert sorted(os.listdir(tmp_path / "run")) == ["latest", "step10", "step14", "step15", "step4"]


def test_the_older_one_stays_until_the_younger_is_committed(make_checkpointer, tmp_path):
    checkpointer = make_checkpointer(keep_last=1)
    checkpointer.save(1, {"w": torch.ones(3)}, block=True)
    flusher = checkpointer._saver.flusher_pid
    os.kill(flusher, signal.SIGSTOP)
    try:
        for step in (2, 3):
            checkpointer.save(step, {"w": torch.ones(3)})
        with pytest.raises(WaitTimeoutError):
            checkpointer.wait(0.2)
        assert checkpointer.steps() == [1]
        assert (tmp_path / "run" / "latest").read_text() == "step1"
    finally:
        os.kill(flusher, signal.SIGCONT)
    checkpointer.wait()
    assert checkpointer.steps() == [3]


def test_deleting_is_not_done_by_the_training_thread(make_checkpointer, tmp_path, monkeypatch, gate):
    checkpointer = make_checkpointer(keep_last=1)
    real, names = removal.remove_folder, []

    def held(path, **options):
        names.append(threading.current_thread().name)
        gate.hold()
        real(path, **options)

    monkeypatch.setattr(removal, "remove_folder", held)
    save_all(checkpointer, (1, 2))
    gate.wait_held()
    save_all(checkpointer, (3, 4))  # neither waits for the deletion
    assert (tmp_path / "run" / "step1").exists()
    gate.open()
    checkpointer.wait()
    assert checkpointer.steps() == [4]
    assert set(names) == {"datastates-deletions"}


def test_a_deletion_that_fails_is_logged_and_harms_nothing(make_checkpointer, monkeypatch, caplog):
    checkpointer = make_checkpointer(keep_last=1)
    real = removal.remove_folder

    def refuse(path, **options):
        if path.endswith("step1"):
            raise StorageError(f"cannot remove {path}: no")
        real(path, **options)

    monkeypatch.setattr(removal, "remove_folder", refuse)
    save_all(checkpointer, (1, 2, 3))
    checkpointer.wait()
    assert checkpointer.steps() == [1, 3]
    assert re.search(r"step1: an old checkpoint stays, it cannot be deleted: cannot remove .*step1: no", caplog.text)
    monkeypatch.undo()
    save_all(checkpointer, (4,))
    checkpointer.wait()
    assert checkpointer.steps() == [4]


def test_clocks_and_times_of_files_do_not_matter(make_checkpointer, tmp_path):
    checkpointer = make_checkpointer(keep_last=3)
    chance = random.Random(0)
    for step in range(1, 6):
        save_all(checkpointer, (step,))
        checkpointer.wait()
        for path in (tmp_path / "run").rglob("*"):
            os.utime(path, (0, chance.choice([0, 1, 10**10, 10**10])))
    assert checkpointer.steps() == [3, 4, 5]
    assert checkpointer.load_latest().step == 5


def test_going_back_to_an_older_step_makes_what_is_saved_then_the_newest(make_checkpointer):
    checkpointer = make_checkpointer(keep_last=3)
    save_all(checkpointer, (10, 20, 30))
    state = {"w": torch.zeros(3)}
    assert checkpointer.load(10, state).step == 10
    assert state["w"][0] == 10
    save_all(checkpointer, (15,))
    checkpointer.wait()
    assert checkpointer.steps() == [20, 30, 15]
    checkpointer.close()
    again = make_checkpointer(keep_last=3)
    assert again.load_latest().step == 15
    save_all(again, (20,))  # the step is there, of the time before
    again.wait()
    assert again.steps() == [30, 15, 20]
    assert (again.load_latest().step, again.latest_step) == (20, 20)


def test_what_another_one_has_saved_to_the_folder_meanwhile_is_older(make_checkpointer):
    first, second = make_checkpointer(keep_last=2), make_checkpointer(keep_last=2)
    for step in range(1, 6):
        first.save(step, {"w": torch.ones(3)}, block=True)
    save_all(second, (10,))
    second.wait()
    assert second.steps() == [5, 10]
    second.save(11, {"w": torch.ones(3)}, block=True)
    assert (second.steps(), second.load_latest().step) == ([10, 11], 11)
    first.save(6, {"w": torch.ones(3)}, block=True)
    assert (first.steps(), first.load_latest().step) == ([11, 6], 6)


def test_a_step_that_exists_is_replaced_when_the_new_one_is_durable(make_checkpointer):
    checkpointer = make_checkpointer()
    checkpointer.save(1, {"w": torch.ones(3)}, block=True)
    flusher = checkpointer._saver.flusher_pid
    os.kill(flusher, signal.SIGSTOP)
    try:
        checkpointer.save(1, {"w": torch.zeros(3)})
        checkpointer.wait_staged()
        assert torch.equal(
            torch.load(os.path.join(checkpointer.directory, "step1", "rank-00000.pt"))["w"], torch.ones(3)
        )
    finally:
        os.kill(flusher, signal.SIGCONT)
    assert torch.equal(checkpointer.load(1).state["w"], torch.zeros(3))


def test_a_pinned_step_is_not_replaced(make_checkpointer):
    checkpointer = make_checkpointer()
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint of step 1; complete steps: none"):
        checkpointer.pin(1)
    checkpointer.save(1, {"w": torch.ones(3)})
    checkpointer.pin(1)  # in flight: it is waited for
    with pytest.raises(StateError, match=r"step1 is pinned, and is not replaced: call unpin\(1\) first"):
        checkpointer.save(1, {"w": torch.zeros(3)})
    assert torch.equal(checkpointer.load(1).state["w"], torch.ones(3))
    checkpointer.unpin(1)
    checkpointer.save(1, {"w": torch.zeros(3)}, block=True)
    assert torch.equal(checkpointer.load(1).state["w"], torch.zeros(3))


def test_deleted_files_are_written_over_if_asked_for_until_the_end(make_checkpointer, tmp_path):
    checkpointer = make_checkpointer(keep_last=1, keep_spare=True)
    spare = tmp_path / "run" / ".datastates.spare"
    inode = 0
    for step in range(1, 5):
        checkpointer.save(step, {"w": torch.full((1_200_000,), float(step))})
        checkpointer.wait()
        if step == 2:
            [file] = spare.iterdir()
            inode = file.stat().st_ino
        if step == 3:
            assert rank_file(tmp_path, 3).stat().st_ino == inode
    assert checkpointer.load(4).state["w"].unique().tolist() == [4.0]
    assert spare.exists()
    checkpointer.close()
    assert sorted(os.listdir(tmp_path / "run")) == ["latest", "step4"]


def test_nothing_is_deleted_if_not_asked_for(make_checkpointer):
    checkpointer = make_checkpointer(keep_last=None)
    save_all(checkpointer, range(1, 8))
    checkpointer.wait()
    assert checkpointer.steps() == list(range(1, 8))


# -------------------------------------------------------------------------------------- damage and loss


def test_a_damaged_one_is_passed_over_by_name(make_checkpointer, tmp_path, caplog):
    checkpointer = make_checkpointer()
    training = Training(256)
    for step in (1, 2, 3):
        training.step()
        checkpointer.save(step, training.state)
    checkpointer.wait()
    flip(rank_file(tmp_path, 3), -300_000)
    rank_file(tmp_path, 2).unlink()
    other = Training(256)
    with caplog.at_level(logging.WARNING):
        found = checkpointer.load_latest(other.state)
    assert found.step == 1
    assert len(other.history) == 1
    assert "the file is missing" in found.skipped["step2"]
    assert "rank-00000.pt" in found.skipped["step3"]
    assert "step3 is not loaded" in caplog.text
    with pytest.raises(CorruptCheckpointError, match=r"step3/rank-00000\.pt"):
        checkpointer.load(3)
    with pytest.raises(CheckpointNotFoundError, match=r"step 2: the file is missing: .*; complete steps: 1, 3"):
        checkpointer.load(2)


def test_only_damaged_ones_are_no_fresh_start_unless_asked(make_checkpointer, tmp_path):
    checkpointer = make_checkpointer()
    state = {"w": torch.ones(30_000)}
    assert checkpointer.load_latest(missing_ok=True) is None
    with pytest.raises(CheckpointNotFoundError, match="holds no complete checkpoint: there are no checkpoints at all"):
        checkpointer.load_latest()
    assert checkpointer.resume(state) is None
    checkpointer.save(1, state, block=True)
    flip(rank_file(tmp_path, 1), -60_000)
    with pytest.raises(CheckpointNotFoundError, match=r"holds no complete checkpoint: step1: .*w is damaged"):
        checkpointer.resume(state)
    with pytest.raises(CheckpointNotFoundError):
        checkpointer.load_latest(missing_ok=True)
    assert checkpointer.resume(state, allow_fresh_start=True) is None
    assert torch.equal(state["w"], torch.ones(30_000))


def test_what_a_killed_run_has_left_is_finished_or_removed(make_checkpointer, tmp_path, run_script):
    run_script(
        "import os, signal, sys, torch\n"
        "from datastates import Checkpointer\n"
        "checkpointer = Checkpointer(sys.argv[1], host_cache_gb=2**-8, pin_host_cache=False)\n"
        "checkpointer.save(1, {'w': torch.ones(3)}, block=True)\n"
        "checkpointer.save(2, {'w': torch.full((3,), 2.0)})\n"
        "checkpointer.wait_staged()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        tmp_path / "run",
        expect=-9,
    )
    state = {"w": torch.zeros(3)}
    assert make_checkpointer().resume(state) == 2  # its flusher may still be at work
    assert state["w"][0] == 2


def test_a_lost_save_stops_nothing_and_is_told(make_checkpointer, tmp_path, caplog):
    checkpointer = make_checkpointer()
    checkpointer.save(1, {"w": torch.ones(3)}, block=True)
    (tmp_path / "run" / "step2").write_text("in the way")
    handle = checkpointer.save(2, {"w": torch.ones(3)})
    with pytest.raises(StorageError, match="step2"):
        handle.committed.result(30)
    assert "a save is lost" in caplog.text
    checkpointer.save(3, {"w": torch.ones(3)})
    checkpointer.wait()  # step 3 has made up for it
    handle = checkpointer.save(2, {"w": torch.ones(3)})
    with pytest.raises(StorageError, match="step2"):
        checkpointer.wait()
    totals = checkpointer.stats
    assert (totals.num_saves, totals.num_committed, totals.num_lost, totals.num_lost_in_a_row) == (4, 2, 2, 1)
    assert totals.last_committed == 3
    assert checkpointer.steps() == [1, 3]


def test_an_exception_in_the_block_is_not_masked_and_what_is_in_flight_is_committed(tmp_path, caplog):
    with pytest.raises(KeyError, match="training"), Checkpointer(tmp_path / "run", **SETTINGS) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)})
        raise KeyError("training")
    assert checkpointer.steps() == [1]
    (tmp_path / "run" / "step2").write_text("in the way")
    with pytest.raises(KeyError, match="again"), Checkpointer(tmp_path / "run", **SETTINGS) as checkpointer:
        checkpointer.save(2, {"w": torch.ones(3)})
        raise KeyError("again")
    assert "while KeyError ends the block" in caplog.text
    with pytest.raises(StorageError, match="step2"), Checkpointer(tmp_path / "run", **SETTINGS) as checkpointer:
        checkpointer.save(2, {"w": torch.ones(3)})


def test_busy_saves_are_skipped_as_asked(make_checkpointer):
    checkpointer = make_checkpointer(when_busy="skip")
    flusher = checkpointer._saver.flusher_pid
    os.kill(flusher, signal.SIGSTOP)
    try:
        checkpointer.save(1, {"w": torch.ones(3)})
        assert checkpointer.save(2, {"w": torch.ones(3)}).nbytes == 0
    finally:
        os.kill(flusher, signal.SIGCONT)
    checkpointer.wait()
    assert (checkpointer.steps(), checkpointer.stats.num_skipped) == ([1], 1)


def test_events_reach_the_listener(make_checkpointer):
    events = []
    checkpointer = make_checkpointer(on_event=events.append)
    checkpointer.save(1, {"w": torch.ones(3)}, block=True)
    counts = collections.Counter(event["event"] for event in events)
    assert counts["save"] == 2
    assert counts["committed"] == 1
    assert {event["path"] for event in events if event["event"] == "committed"} == {f"{checkpointer.directory}/step1"}


def test_the_end_of_the_script_finishes_saves_and_deletions(run_script, tmp_path):
    run_script(
        "import sys, torch\n"
        "from datastates import Checkpointer\n"
        "checkpointer = Checkpointer(sys.argv[1], host_cache_gb=2**-8, pin_host_cache=False, keep_last=1)\n"
        "for step in (1, 2, 3):\n"
        "    checkpointer.save(step, {'w': torch.ones(3)})\n",
        tmp_path / "run",
    )
    assert sorted(os.listdir(tmp_path / "run")) == ["latest", "step3"]


# ------------------------------------------------------------------------------------------ the documents


def readme_example():
    text = (ROOT / "README.md").read_text("utf-8")
    [block] = re.findall(r"```python\n(.*?)```", text.split("## Plain PyTorch")[1].split("\n## ")[0], re.DOTALL)[:1]
    return block


def test_the_example_of_the_readme_runs_and_resumes(run_script, tmp_path):
    code = readme_example()
    assert "Checkpointer" in code
    done = run_script(f"{code}\nprint(first, step)\n{code}\nprint(first, step)")
    assert done.stdout == "0 9\n10 19\n"
    assert sorted(os.listdir(tmp_path / "run")) == ["latest", "step18", "step19", "step20"]
