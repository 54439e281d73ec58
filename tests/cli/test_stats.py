"""``datastates stats`` and the functions behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from datastates.checkpoint_engine import CheckpointEngine
from datastates.cli import main
from datastates.cli.exit_codes import exit_code_of
from datastates.errors import CheckpointNotFoundError, DataStatesError
from datastates.record_files import read_records
from datastates.run_view import seen_in
from datastates.save_records import summary_of


def record(event: str, rank: int, begin: float, end: float, **fields: object) -> dict[str, object]:
    return {"event": event, "rank": rank, "begin": begin, "end": end, **fields}


def two_ranks() -> list[dict[str, object]]:
    """Two checkpoints of two ranks; the second is never committed, as rank 1 is lost."""
    a, b = {"attempt": "run-1"}, {"attempt": "run-2"}
    return [
        record("save", 0, 10.0, 10.25, **a, path="/c/s1/r0.pt", nbytes=100),
        record("save", 0, 10.5, 11.0, **a, path="/c/s1/r0b.pt", nbytes=20),
        record("save", 1, 10.0, 10.5, **a, path="/c/s1/r1.pt", nbytes=100),
        record("fence", 0, 11.0, 11.5, num_files=2),
        record("fence", 1, 11.0, 11.25, num_files=1),
        record("fence", 1, 11.5, 12.0, num_files=1),
        record("staged", 0, 10.0, 12.0, **a, path="/c/s1/r0.pt", nbytes=100),
        record("durable", 1, 10.0, 14.0, **a, path="/c/s1/r1.pt", nbytes=100),
        record("durable", 0, 10.0, 13.0, **a, path="/c/s1/r0.pt", nbytes=100),
        record("committed", 0, 10.0, 15.0, **a, path="/c/s1", nbytes=220),
        record("save", 0, 20.0, 20.5, **b, path="/c/s2/r0.pt", nbytes=100),
        record("failed", 1, 20.0, 21.0, **b, path="/c/s2/r1.pt", error="no room"),
    ]


def write(folder: Path, records: list[dict[str, object]]) -> None:
    folder.mkdir(exist_ok=True)
    for rank in {entry["rank"] for entry in records}:
        lines = [json.dumps(entry) for entry in records if entry["rank"] == rank]
        (folder / f"events-rank{rank:05d}.jsonl").write_text("\n".join([*lines, '{"event": "cut by a cra']))


def test_ranks_are_put_together(tmp_path):
    write(tmp_path / "events", two_ranks())
    (tmp_path / "events" / "events-rank-of-others.jsonl").write_text(
        '[1]\n{"event": "x", "rank": 0, "begin": "soon", "end": 1}\n'
    )
    _, (first, second) = seen_in(read_records(str(tmp_path / "events")))
    assert (first.path, first.nbytes, first.ranks) == ("/c/s1", 220, {0, 1})
    assert (first.blocked_seconds, first.fenced_seconds) == (0.75, 0.75)
    assert (first.staged_seconds, first.durable_seconds, first.committed_seconds) == (2.0, 4.0, 5.0)
    assert first.nbytes_per_second == 55.0
    assert (second.committed_seconds, second.failure) == (None, "no room")
    summary = summary_of([first, second])
    assert (summary["num_saves"], summary["num_committed"], summary["num_lost"]) == (2, 1, 1)
    assert (summary["durable_seconds"], summary["interval_seconds"]) == (4.0, 10.0)


def test_what_a_real_run_writes(tmp_path):
    events, folder = tmp_path / "events", tmp_path / "step"
    with CheckpointEngine({"host_cache_size": 2**-8, "events_dir": str(events)}, rank=0) as engine:
        with engine.checkpoint(str(folder), "step"):
            engine.save({"w": torch.ones(1 << 20)}, str(folder / "a.pt"))
            engine.save({"w": torch.ones(10)}, str(folder / "b.pt"))
        engine.wait(persist=True)
        (tmp_path / "file").write_text("")
        with pytest.raises(DataStatesError):
            engine.save({"w": torch.ones(10)}, str(tmp_path / "file" / "c.pt"))
            engine.wait(persist=True)
    _, (first, *others) = seen_in(read_records(str(events)))
    sizes = [(folder / name).stat().st_size for name in ("a.pt", "b.pt")]
    assert (first.path, first.nbytes, first.ranks) == (str(folder), sum(sizes), {0})
    assert 0 < first.blocked_seconds < first.durable_seconds <= first.committed_seconds
    assert all(other.failure for other in others)
    result = CliRunner().invoke(main, ["stats", str(events)])
    assert result.exit_code == 0, result.output
    assert str(folder) in result.stdout
    assert "1 committed" in result.stdout
    printed = json.loads(CliRunner().invoke(main, ["stats", str(events), "--json", "--last", "1"]).stdout)
    assert len(printed["saves"]) == printed["summary"]["num_saves"] == 1


def test_saves_that_outrun_the_disk_are_named(tmp_path):
    records = [
        entry | {"begin": entry["begin"] + shift, "end": entry["end"] + shift, "attempt": f"run-{shift}"}
        for shift in (0, 1, 2)
        for entry in two_ranks()[:10]
        if "attempt" in entry
    ]
    write(tmp_path / "events", records)
    assert "faster than they are durable" in CliRunner().invoke(main, ["stats", str(tmp_path / "events")]).stdout


def test_a_save_that_was_cut_off_is_counted_as_such(tmp_path):
    write(tmp_path / "events", two_ranks()[:-1])
    printed = CliRunner().invoke(main, ["stats", str(tmp_path / "events")]).stdout
    assert "2 saves, 1 committed, 0 lost or skipped, 1 without an end (in flight, or the job was killed); " in printed
    write(tmp_path / "events", two_ranks())
    assert "without an end" not in CliRunner().invoke(main, ["stats", str(tmp_path / "events")]).stdout


def test_records_without_a_path_are_shown(tmp_path):
    write(tmp_path / "events", [record("skipped", 0, 1.0, 2.0, attempt="a", path="", error="busy")])
    done = CliRunner().invoke(main, ["stats", str(tmp_path)])  # the folder of records in one of checkpoints
    assert done.exit_code == 0 and "busy" in done.stdout


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_no_records(tmp_path, name):
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(main, ["stats", str(tmp_path / name)])
    assert result.exit_code == exit_code_of(CheckpointNotFoundError(""))
    assert "events_dir" in result.stderr


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "save", "rank": null, "begin": 1, "end": 2, "attempt": "x"}',
        '{"event": "save", "rank": 1e999, "begin": 1, "end": 2, "attempt": "x"}',
        '{"event": "save", "rank": 0, "begin": NaN, "end": 2, "attempt": "x"}',
        '{"event": "save", "rank": 0, "begin": 1, "end": Infinity, "attempt": "x"}',
        '{"event": "save", "rank": 0, "begin": 1, "end": 2, "attempt": "x", "nbytes": null}',
        '{"event": "save", "rank": 0, "begin": 1, "end": 2, "attempt": "x", "nbytes": 1e400}',
        '{"event": ["save"], "rank": 0, "begin": 1, "end": 2, "attempt": "x"}',
        '{"event": "save", "rank": 0, "begin": 1, "end": 2, "attempt": {}}',
        '{"event": "committed", "rank": 0, "begin": 1, "end": 2, "attempt": "x", "path": {"a": 1}}',
        '{"event": "save", "rank": 0, "begin": ' + "9" * 400 + ', "end": 2, "attempt": "x"}',
        "[" * 100_000,
    ],
    ids=range(11),
)
def test_records_of_others_are_left_out(tmp_path, line):
    (tmp_path / "events-rank00000.jsonl").write_text(line + "\n")
    with pytest.raises(CheckpointNotFoundError, match="no records"):
        list(read_records(str(tmp_path)))
