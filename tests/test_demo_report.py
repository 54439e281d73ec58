"""The demo's report: curves compared, checkpoints tabled, tensors compared, picture drawn; from made-up records."""

from __future__ import annotations

import importlib
import os
import struct
from types import ModuleType

import pytest
import torch

SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of the scripts folder, as a script that is started from there does."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.fixture
def report(script) -> ModuleType:
    return script("demo_report")


def curve(*losses: float, first: int = 1):
    return [{"step": step, "loss": loss.hex()} for step, loss in enumerate(losses, first)]


def metric(event: str, rank: int, step: int, begin: float, end: float):
    return {"event": event, "rank": rank, "step": step, "begin": begin, "end": end}


def make_run(report: ModuleType, **changes):
    """Two ranks, a step per second, a save of 0.1 s (rank 1: 0.2 s) after steps 2 and 4, durable 1.5 s later."""
    metrics = []
    for rank in (0, 1):
        metrics += [
            metric("step", rank, 1, 0.0, 1.0),
            metric("step", rank, 2, 1.0, 2.0),
            metric("save_checkpoint", rank, 2, 2.0, 2.1 + 0.1 * rank),
            metric("step", rank, 3, 2.25, 3.75),
            metric("step", rank, 4, 4.0, 5.0),
            metric("save_checkpoint", rank, 4, 5.0, 5.1 + 0.1 * rank),
        ]
    events = [
        {"event": "fence", "rank": 0, "begin": 3.0, "end": 3.01},
        {"event": "fence", "rank": 1, "begin": 3.0, "end": 3.02},
        {"event": "fence", "rank": 1, "begin": 3.5, "end": 3.51},
        {"event": "fence", "rank": 1, "begin": 4.5, "end": 4.9},  # of a later step: no stall of this save
        {"event": "stage", "rank": 1, "begin": 2.1, "end": 2.2},
    ]
    fields = {"metrics": metrics, "events": events, "durable": {2: 3.5, 4: 6.5}, "nbytes": {2: 3 << 20, 4: 5 << 20}}
    return report.Run(engine="lazy", **(fields | changes))


def test_equal_curves_have_no_differences(report):
    assert report.compare_curves(curve(1.5, 2.5), curve(1.5, 2.5)) == []


def test_one_bit_of_a_loss_is_a_difference(report):
    almost = struct.unpack("d", struct.pack("q", struct.unpack("q", struct.pack("d", 2.5))[0] + 1))[0]
    (difference,) = report.compare_curves(curve(1.5, 2.5), curve(1.5, almost))
    assert "step 2" in difference and (2.5).hex() in difference and almost.hex() in difference


def test_a_step_computed_again_after_resuming_must_be_equal_both_times(report):
    again = curve(1.0, 2.0, 3.0) + curve(2.0, 3.0, first=2)
    assert report.compare_curves(curve(1.0, 2.0, 3.0), again) == []
    again[1] = {"step": 2, "loss": (9.0).hex()}
    assert len(report.compare_curves(curve(1.0, 2.0, 3.0), again)) == 1


def test_missing_and_surplus_steps_are_differences(report):
    assert report.compare_curves(curve(1.0, 2.0), curve(1.0)) == ["step 2: missing"]
    assert report.compare_curves(curve(1.0), curve(1.0, 2.0)) == ["step 2: not in the reference"]


def test_an_empty_reference_equals_nothing(report):
    assert report.compare_curves([], []) == ["the reference has no steps"]


def test_read_jsonl_leaves_out_a_line_that_was_cut_off(report, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert report.read_jsonl(str(path)) == [{"step": 1}, {"step": 2}]
    assert report.read_jsonl(str(tmp_path / "absent")) == []


def test_committed_at_asks_rank_0_and_takes_no_similar_step(report):
    events = [
        {"event": "committed", "rank": 0, "path": "/c/global_step10", "end": 3.0},
        {"event": "committed", "rank": 1, "path": "/c/global_step1", "end": 3.5},
        {"event": "committed", "rank": 0, "path": "/c/global_step1", "end": 4.0},
        {"event": "durable", "rank": 0, "path": "/c/global_step1/file.pt", "end": 2.0},
    ]
    assert report.committed_at(events, 1) == 4.0
    assert report.committed_at(events, 2) is None


def test_checkpoints_take_the_slowest_rank(report):
    first, last = report.checkpoints(make_run(report))
    assert (first.step, first.nbytes) == (2, 3 << 20)
    assert first.blocked_seconds == pytest.approx(0.2)
    assert first.stall_seconds == pytest.approx(0.03)
    assert first.busy_step_seconds == pytest.approx(1.5)
    assert first.durable_seconds == pytest.approx(1.5)
    assert (last.step, last.stall_seconds, last.busy_step_seconds) == (4, None, None)


def test_an_engine_without_fences_did_not_stall(report):
    assert report.checkpoints(make_run(report, events=[]))[0].stall_seconds == 0.0


def test_a_checkpoint_that_was_never_durable_is_in_flight_for_ever(report):
    run = make_run(report, durable={4: 6.5})
    first = report.checkpoints(run)[0]
    assert first.durable_seconds is None
    assert first.busy_step_seconds == pytest.approx(1.25)  # the median of steps 3 and 4


def test_idle_steps_leave_out_the_warm_up_and_steps_with_a_save_in_flight(report):
    assert report.idle_step_seconds(make_run(report)) == pytest.approx(1.0)  # step 4
    assert report.idle_step_seconds(make_run(report), warm_up=4) is None


def test_the_table_has_a_row_per_checkpoint_and_the_medians(report):
    table = report.format_table([make_run(report)])
    lines = table.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| lazy | 2 | 3 | 200 ms | 30.0 ms | 1.50 s |  | 1.50 s |"
    assert lines[3] == "| lazy | 4 | 5 | 200 ms | – | – |  | 1.50 s |"
    assert lines[4] == "| lazy | **median** | 4 | 200 ms | 30.0 ms | 1.50 s | 1.00 s | 1.50 s |"


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0.0, "0.0 ms"), (0.0123, "12.3 ms"), (0.25, "250 ms"), (12.345, "12.35 s")]
)
def test_format_seconds(report, seconds, text):
    assert report.format_seconds(seconds) == text


def test_a_record_without_a_number_is_refused(report):
    broken = [metric("save_checkpoint", 0, 2, 1.0, 2.0) | {"begin": "yesterday"}]
    with pytest.raises(ValueError, match="begin"):
        report.checkpoints(make_run(report, metrics=broken))


def test_the_picture_is_drawn(script, report, tmp_path):
    path = tmp_path / "timeline.png"
    script("demo_figure").draw([make_run(report), make_run(report, events=[])], str(path))
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def write_checkpoint(folder, **changes):
    folder.mkdir()
    state = {"weight": torch.tensor([1.0, float("nan")]), "state": {0: [torch.tensor(3)]}, "empty": torch.empty(0)}
    torch.save(state | changes, folder / "file.pt")
    return str(folder)


def test_equal_checkpoints_are_equal_whatever_is_no_tensor(script, tmp_path):
    compare = script("demo_tensors").compare_checkpoints
    first, second = write_checkpoint(tmp_path / "a", config=1), write_checkpoint(tmp_path / "b", config=2)
    assert compare(first, second) == (3, [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": {0: [torch.tensor(4)]}}, "state.0.0 differs"),
        ({"weight": torch.tensor([1.0, float("nan")], dtype=torch.float64)}, "weight differs"),
        ({"empty": torch.empty(0, 2)}, "empty differs"),
        ({"more": torch.tensor(1)}, "more is in one file only"),
    ],
)
def test_different_checkpoints_name_the_tensor(script, tmp_path, change, words):
    compare = script("demo_tensors").compare_checkpoints
    _, differences = compare(write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b", **change))
    assert differences == [f"file.pt: {words}"]


def test_zero_is_not_minus_zero(script, tmp_path):
    compare = script("demo_tensors").compare_checkpoints
    first = write_checkpoint(tmp_path / "a", weight=torch.tensor([0.0]))
    assert compare(first, write_checkpoint(tmp_path / "b", weight=torch.tensor([-0.0])))[1] == [
        "file.pt: weight differs"
    ]


def test_checkpoints_of_other_files_are_different(script, tmp_path):
    first, second = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b")
    os.rename(os.path.join(second, "file.pt"), os.path.join(second, "other.pt"))
    assert script("demo_tensors").compare_checkpoints(first, second)[1]
