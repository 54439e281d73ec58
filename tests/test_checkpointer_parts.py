"""A replicated state shared out over ranks and put together, summaries, random states, and what is too many."""

from __future__ import annotations

import collections
import io
import json
import math
import random
import sys

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates import pins
from datastates.checkpoints import random_states
from datastates.checkpoints.excess import Claims, Excess
from datastates.checkpoints.parts import join_parts, split
from datastates.checkpoints.steps import StepFolder
from datastates.checkpoints.summary import Shared, Summary
from datastates.errors import CorruptCheckpointError, MismatchError, StateError
from datastates.retention import RetentionPolicy


def parts_of(state, world_size):
    parts = [split(state, rank, world_size) for rank in range(world_size)]
    assert {part.shared for part in parts} == {parts[0].shared}
    assert all(parts[rank].is_empty == (rank not in parts[0].shared.ranks) for rank in range(world_size))
    return [part.tree for part in parts if not part.is_empty], parts[0].shared


def tensors_in(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for child in children for tensor in tensors_in(child)]


leaves = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.integers(0, 5).map(lambda size: torch.arange(float(size))),
    st.just(torch.tensor(3.0)),
)
keys = st.one_of(st.text("ab", max_size=2), st.integers(0, 3), st.tuples(st.integers(0, 2)))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=15,
)


def test_the_parts_of_any_state_are_the_state(assert_same_state):
    @settings(max_examples=150, deadline=None)
    @given(states, st.integers(1, 4))
    def check(state, world_size):
        trees, shared = parts_of(state, world_size)
        assert_same_state(join_parts(trees, shared.ranks, "model"), state)

    check()


def test_the_bytes_are_shared_out_and_each_is_written_once():
    state = {f"layer{index}": torch.zeros(1000 + index) for index in range(40)}
    trees, shared = parts_of(state, 4)
    assert shared.ranks == (0, 1, 2, 3)
    sizes = [sum(tensor.numel() for tensor in tensors_in(tree)) for tree in trees]
    assert sum(sizes) == sum(tensor.numel() for tensor in state.values())
    assert max(sizes) < 1.02 * sum(sizes) / 4


def test_tensors_that_share_memory_stay_together():
    weight = torch.arange(12.0)
    state = {"embedding": weight, "other": torch.zeros(30), "more": torch.zeros(30), "head": weight, "row": weight[:4]}
    trees, shared = parts_of(state, 3)
    [owner] = [tree for tree in trees if isinstance(tree.get("embedding"), torch.Tensor)]
    assert owner["head"] is weight
    assert owner["row"].data_ptr() == weight.data_ptr()
    whole = join_parts(trees, shared.ranks, "model")
    assert whole["embedding"] is whole["head"]


def test_the_parts_of_a_module_are_a_module_without_this_package():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    trees, shared = parts_of(module.state_dict(), 3)
    merged = {name: value for tree in trees for name, value in tree.items() if value is not None}
    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).load_state_dict(merged)
    assert trees[0]._metadata == module.state_dict()._metadata  # versions, which loading needs
    assert list(join_parts(trees, shared.ranks, "model")) == list(module.state_dict())


def test_what_is_no_plain_container_stays_whole():
    counter = collections.Counter(a=1)
    group = collections.namedtuple("group", "weight")(torch.zeros(100))
    trees, shared = parts_of({"counter": counter, "group": group, "w": torch.zeros(1)}, 2)
    assert shared.ranks == (0,)
    assert trees[0]["counter"] is counter
    assert trees[0]["group"] is group


def test_a_state_that_contains_itself_is_named():
    state = {"w": torch.zeros(2), "loop": []}
    state["loop"].append(state["loop"])
    with pytest.raises(StateError, match=r"model\.loop\.0 contains itself"):
        split(state, 0, 2, "model")


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(8), "b": torch.zeros(8), "c": torch.zeros(8)},  # one more
        {"a": torch.zeros(8)},
        {"a": torch.zeros(8), "x": torch.zeros(8)},
        [torch.zeros(8), torch.zeros(8)],
    ],
    ids=["more", "less", "other names", "other kind"],
)
def test_states_that_are_not_the_same_on_all_ranks_are_not_put_together(other):
    state = {"a": torch.zeros(8), "b": torch.zeros(8)}
    first, second = split(state, 0, 2), split(other, 1, 2)
    assert first.shared.fingerprint != second.shared.fingerprint


def test_parts_that_do_not_fit_are_not_put_together():
    first = {"a": torch.zeros(8), "b": None, "c": [None]}
    for other, where in [
        ({"a": torch.zeros(8)}, "model.a"),
        ({"x": torch.zeros(8)}, "model"),
        ({"c": [1, 2]}, "model.c"),
    ]:
        with pytest.raises(MismatchError, match=f"^{where} was saved as replicated, and was not the same on all ranks"):
            join_parts([first, other], (0, 1), "model")


# ------------------------------------------------------------------------------------------- summaries


def test_a_summary_comes_back():
    metrics = {"loss": 0.1, "bad": math.nan, "worst": math.inf}
    summary = Summary(7, 3, 2, ".pt", ("model", "sampler"), {"model": Shared((0, 1), 9)}, metrics)
    found = Summary.from_state(summary.to_state(), "x")
    assert math.isnan(found.metrics["bad"])
    assert found.metrics["worst"] == math.inf
    assert (found.step, found.serial, found.replicated) == (7, 3, {"model": Shared((0, 1), 9)})


@pytest.mark.parametrize(
    "state", [None, {}, [], {"format": "other", "version": 1}, {"format": "datastates-checkpoint"}]
)
def test_what_is_no_summary_is_said(state):
    with pytest.raises(CorruptCheckpointError, match="x: not the summary of a checkpoint"):
        Summary.from_state(state, "x")


# --------------------------------------------------------------------------------------- random states


def draw():
    return random.random(), torch.rand(3).tolist(), numpy.random.rand(3).tolist(), numpy.random.randn()


def test_random_states_come_back():
    random.seed(1)
    torch.manual_seed(2)
    numpy.random.seed(3)
    draw()
    states = random_states.capture()
    expected = draw()
    random.seed(4)
    torch.manual_seed(5)
    numpy.random.seed(6)
    random_states.restore(states)
    assert draw() == expected


def test_numpy_is_neither_needed_nor_imported(monkeypatch):
    states = random_states.capture()
    monkeypatch.delitem(sys.modules, "numpy")
    assert "numpy" not in random_states.capture()
    random_states.restore(states)
    assert "numpy" not in sys.modules


class FakeDevices:
    """Stands for ``torch.cuda``: two devices with a generator each."""

    def __init__(self):
        self.states = [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)]

    def is_initialized(self):
        return True

    def get_rng_state_all(self):
        return list(self.states)

    def set_rng_state_all(self, states):
        self.states = list(states)

    def set_rng_state(self, state, device):
        self.states[device] = state


def test_random_states_of_all_devices_come_back_as_far_as_there_are(monkeypatch, caplog):
    devices = FakeDevices()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(devices.states))
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: devices)
    states = random_states.capture()
    devices.states = [torch.tensor([9], dtype=torch.uint8)] * 2
    random_states.restore(states)
    assert [state.item() for state in devices.states] == [1, 2]
    assert caplog.text == ""
    devices.states = [torch.tensor([9], dtype=torch.uint8)]
    random_states.restore(states)
    assert [state.item() for state in devices.states] == [1]
    assert "2 cuda devices were saved, 1 are here" in caplog.text


# ------------------------------------------------------------------------------------ what is too many


def write_step(folder, make_checkpoint, step, serial, **metrics):
    summary = io.BytesIO()
    torch.save(Summary(step, serial, 1, ".pt", (), {}, metrics).to_state(), summary)
    return make_checkpoint(folder / f"step{step}", f"step{step}", {"checkpoint.pt": summary.getvalue()})


@pytest.fixture
def make_checkpoint():
    """``make_checkpoint(path, tag, files)``: a committed checkpoint that holds these bytes."""
    from datastates.checksum import crc32
    from datastates.commit import roll_forward
    from datastates.manifest import FileRecord, Manifest, attempt_directory, read_manifest, write_manifest
    from datastates.partial_names import partial_path

    def make(path, tag, files):
        attempt = f"0123456789ab-{len(tag):08x}-0001"
        (path / ".datastates" / attempt).mkdir(parents=True)
        records = []
        for name, data in files.items():
            with open(partial_path(str(path / name), attempt), "wb") as file:
                file.write(data)
            records.append(FileRecord(name, len(data), 1 << 20, (crc32(data),)))
        write_manifest(str(path), Manifest(attempt, 0, 1, tag, tuple(records), 0.0))
        assert attempt_directory(str(path), attempt)
        roll_forward(str(path), [read_manifest(str(path), attempt, 0)], tag)
        return path

    return make


def doomed(folder, busy=(), metric=None, **policy):
    excess = Excess(StepFolder(str(folder)), RetentionPolicy(**policy), metric, Claims())
    return [record.step for record in excess.doomed([str(folder / f"step{step}") for step in busy])]


def test_order_is_that_of_the_saves_whatever_steps_and_clocks_say(tmp_path, make_checkpoint):
    for serial, step in enumerate([90, 100, 50, 60]):  # gone back to 50 after 100
        path = write_step(tmp_path, make_checkpoint, step, serial)
        record = path / ".datastates" / "commit.json"
        fields = json.loads(record.read_text())
        fields["committed_at"] = 1e9 - serial  # the clock runs backwards
        record.write_text(json.dumps(fields))
    assert [record.step for record in StepFolder(str(tmp_path)).records()] == [90, 100, 50, 60]
    assert doomed(tmp_path, keep_last=2) == [90, 100]
    assert doomed(tmp_path, keep_last=1, keep_every=50) == [90]


def test_what_is_in_flight_latest_pinned_or_linked_to_stays(tmp_path, make_checkpoint):
    for step in range(1, 8):
        write_step(tmp_path, make_checkpoint, step, step)
    assert doomed(tmp_path, keep_last=1) == [1, 2, 3, 4, 5, 6]
    assert doomed(tmp_path, keep_last=1, busy=[7]) == [1, 2, 3, 4, 5]  # 6 is the newest that has settled
    (tmp_path / "latest").write_text("step2")
    pins.pin(str(tmp_path / "step3"))
    pins.pin(str(tmp_path / "step3"))
    (tmp_path / "best").symlink_to("step4")
    assert doomed(tmp_path, keep_last=1) == [1, 5, 6]
    pins.unpin(str(tmp_path / "step3"))
    pins.unpin(str(tmp_path / "step3"))
    assert doomed(tmp_path, keep_last=1) == [1, 3, 5, 6]


def test_the_best_stay_and_values_that_are_no_numbers_do_not_count(tmp_path, make_checkpoint):
    for step, loss in enumerate([3.0, 1.0, math.nan, 1.0, 2.0, 5.0], 1):
        write_step(tmp_path, make_checkpoint, step, step, loss=loss)
    write_step(tmp_path, make_checkpoint, 7, 7)
    assert doomed(tmp_path, metric="loss", keep_last=1, keep_best=2) == [1, 3, 5, 6]
    assert doomed(tmp_path, metric="loss", keep_last=1, keep_best=1, is_larger_better=True) == [1, 2, 3, 4, 5]
    assert StepFolder(str(tmp_path)).best("loss", is_larger_better=False) == 4
    assert StepFolder(str(tmp_path)).best("accuracy", is_larger_better=True) is None


def test_foreign_names_links_and_incomplete_ones_are_neither_counted_nor_deleted(tmp_path, make_checkpoint):
    elsewhere = tmp_path / "elsewhere"
    write_step(elsewhere, make_checkpoint, 9, 9)
    run = tmp_path / "run"
    for step in (1, 2):
        write_step(run, make_checkpoint, step, step)
    (run / "step9").symlink_to(elsewhere / "step9")
    make_checkpoint(run / "step3", "step3", {"model.pt": b"somebody else's"})
    make_checkpoint(run / "global_step4", "global_step4", {"model.pt": b"DeepSpeed's"})
    write_step(run, make_checkpoint, 5, 5)
    (run / "step5" / "checkpoint.pt").unlink()  # damaged
    write_step(run, make_checkpoint, 6, 6).rename(run / "step7")  # renamed
    for name in ("step07", "step-1", "step8.bak", "Step8", "notes"):
        (run / name).mkdir()
    (run / "step8").write_text("a file")
    (run / "step10").symlink_to("step10")
    (run / "step11").symlink_to("nowhere")
    before = sorted(path.name for path in run.iterdir())
    Excess(StepFolder(str(run)), RetentionPolicy(keep_last=1), None, Claims()).delete([])
    assert sorted(path.name for path in run.iterdir()) == [name for name in before if name not in ("step1", "step2")]
    assert (elsewhere / "step9" / "checkpoint.pt").exists()


def test_a_folder_that_is_being_saved_to_is_not_removed(tmp_path, make_checkpoint):
    for step in (1, 2):
        write_step(tmp_path, make_checkpoint, step, step)
    claims = Claims()
    excess = Excess(StepFolder(str(tmp_path)), RetentionPolicy(keep_last=1), None, claims)
    with claims.saving(str(tmp_path / "step1")):
        excess.delete([])
        assert (tmp_path / "step1").exists()
    excess.delete([])
    assert not (tmp_path / "step1").exists()
