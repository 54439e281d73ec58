"""The trace of a run: valid, complete, and with rows in which nothing overlaps."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from datastates.cli import main
from datastates.errors import CheckpointNotFoundError
from datastates.trace import write_trace


def line(event: str, begin: float, end: float, rank: int = 0, **fields: object) -> str:
    return json.dumps({"event": event, "rank": rank, "begin": begin, "end": end, **fields}) + "\n"


def clock(begin: float, unix: float, rank: int, host: str) -> str:
    return line("clock", begin, begin, rank, time=unix, host=host, pid=1)


def run_of(rank: int, start: float) -> str:
    """The records of a rank as its process makes them, its clock being ``start`` at Unix time 5000."""
    names = {"attempt": "a", "path": f"/c/step1/{rank}.pt", "nbytes": 30}
    at = [
        line("step", start, start + 1, rank, number=1),
        line("save", start + 1, start + 1.1, rank, **names, num_in_flight=2, num_slabs=8, num_free_slabs=5),
        line("flush", start + 1.1, start + 1.4, rank, **names, index=0),
        line("flush", start + 1.2, start + 1.5, rank, **names, index=1),
        line("flush", start + 1.4, start + 1.6, rank, **names, index=2),
        line("fence", start + 1.8, start + 1.9, rank, num_files=1),
        line("step", start + 1, start + 1.9, rank, number=2),
        line("committed", start + 1, start + 2.5, rank, **names),
        line("carried", start + 2.5, start + 4, rank, **names, tier="s3://b"),
        line("carry_failed", start + 2.5, start + 3, rank, **names, tier="/far", error="no room"),
        line("failed", start + 4, start + 4.5, rank, **names, error="lost"),
        '{"event": "cut off',
    ]
    return clock(start, 5000.0, rank, f"node{rank}") + "".join(at)


def traced(tmp_path: Path, out: str = "trace.json") -> list[dict[str, Any]]:
    write_trace(str(tmp_path / "events"), str(tmp_path / out))
    text = (tmp_path / out).read_bytes()
    found = json.loads(gzip.decompress(text) if out.endswith(".gz") else text)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    return found["traceEvents"]


@pytest.fixture
def two_hosts(tmp_path: Path) -> Path:
    (tmp_path / "events").mkdir()
    for rank, start in ((0, 100.0), (1, 77777.0)):
        (tmp_path / "events" / f"events-rank{rank:05d}.jsonl").write_text(run_of(rank, start))
    return tmp_path


def test_each_rank_is_a_process_with_its_host(two_hosts):
    names = {event["args"]["name"] for event in traced(two_hosts) if event["name"] == "process_name"}
    assert names == {"rank 0 node0", "rank 1 node1"}


def test_hosts_stand_on_one_time_line_in_microseconds(two_hosts):
    steps = [event for event in traced(two_hosts) if event.get("cat") == "step"]
    assert [event["ts"] for event in steps] == pytest.approx([0.0, 1e6] * 2)
    assert [event["dur"] for event in steps] == pytest.approx([1e6, 0.9e6] * 2)
    assert [event["name"] for event in steps] == ["step 1", "step 2"] * 2


def test_all_records_are_shown_with_their_fields(two_hosts):
    events = [event for event in traced(two_hosts) if event["pid"] == 1]
    shown = [event["cat"] for event in events if event["ph"] == "X"]
    assert sorted(shown) == sorted(
        ["step", "save", "flush", "flush", "flush", "fence", "step", "committed", "carried", "carry_failed"]
    )
    (lost,) = (event for event in events if event["ph"] == "i")
    assert (lost["args"]["error"], lost["ts"]) == ("lost", pytest.approx(4.5e6))
    counters = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert counters == {"num_free_slabs": {"num_free_slabs": 5}, "num_in_flight": {"num_in_flight": 2}}


def named_rows(events: list[dict[str, Any]]) -> list[str]:
    """Names of the rows of rank 0; each row of each rank has one, and nothing overlaps in it."""
    rows, names = defaultdict(list), {}
    for event in events:
        if event["ph"] == "X":
            begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)  # as viewers count, in nanoseconds
            rows[event["pid"], event["tid"]].append((begin, begin + length))
        elif event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    assert set(rows) == set(names)
    for times in rows.values():
        times.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
    assert len({tid for _, tid in rows}) == len(rows)
    return [name for (pid, _), name in names.items() if pid == 1]


def test_nothing_overlaps_in_a_row_and_each_row_has_a_name(two_hosts):
    names = named_rows(traced(two_hosts))
    assert names.count("flushing: host cache to storage") == 2  # slab 2 follows slab 0; slab 1 overlaps both
    assert len(set(names)) == 6


def test_a_file_without_a_clock_begins_with_the_others(two_hosts):
    old = "".join(run_of(2, 9.0).splitlines(keepends=True)[1:])
    (two_hosts / "events" / "events-rank00002.jsonl").write_text(old)
    steps = [event["ts"] for event in traced(two_hosts) if event.get("cat") == "step" and event["pid"] == 3]
    assert steps == pytest.approx([0.0, 1e6])


def test_what_follows_at_once_begins_to_the_nanosecond_where_the_other_ended(tmp_path):
    """Unix times have a resolution of 240 ns; a viewer that finds pieces of a row to overlap drops one of them."""
    (tmp_path / "events").mkdir()
    ends = [0.1234567 * number for number in range(1000)]
    steps = [line("step", begin, end, number=1) for begin, end in itertools.pairwise(ends)]
    path = tmp_path / "events" / "events-rank00000.jsonl"
    path.write_text("".join([clock(0.0, 1.79e9, 0, "node"), *steps]))
    assert named_rows(traced(tmp_path)) == ["steps"]


def test_two_runs_of_a_rank_share_its_rows(two_hosts):
    (two_hosts / "events" / "events-rank00000-again.jsonl").write_text(run_of(0, 100.5))
    assert named_rows(traced(two_hosts)).count("steps") == 2


def test_the_command_writes_and_compresses(two_hosts):
    done = CliRunner().invoke(main, ["trace", str(two_hosts / "events"), "-o", str(two_hosts / "t.json.gz")])
    assert done.exit_code == 0, done.output
    assert "24 records" in done.stdout
    assert traced(two_hosts, "other.json.gz") == traced(two_hosts)
    assert json.loads(gzip.decompress((two_hosts / "t.json.gz").read_bytes()))["traceEvents"] == traced(two_hosts)


def test_no_records_and_no_folder_are_told_and_nothing_is_left(two_hosts):
    with pytest.raises(CheckpointNotFoundError, match="events_dir"):
        write_trace(str(two_hosts / "nowhere"), str(two_hosts / "t.json"))
    with pytest.raises(FileNotFoundError, match=r"missing/t\.json"):
        write_trace(str(two_hosts / "events"), str(two_hosts / "missing" / "t.json"))
    assert [path.name for path in two_hosts.iterdir()] == ["events"]


def test_a_trace_that_fails_half_way_leaves_the_older_one(two_hosts, monkeypatch):
    (two_hosts / "trace.json").write_text("older")
    monkeypatch.setattr("datastates.trace._args", lambda record: {"x": object()})
    with pytest.raises(TypeError):
        write_trace(str(two_hosts / "events"), str(two_hosts / "trace.json"))
    assert (two_hosts / "trace.json").read_text() == "older"
    assert len(list(two_hosts.iterdir())) == 2
