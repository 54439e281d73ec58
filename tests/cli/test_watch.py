"""``datastates watch`` and the view behind it: a running job, its end, and what is not there."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from datastates import record_files
from datastates.checkpoint_engine import CheckpointEngine
from datastates.cli import main, watch
from datastates.cli.exit_codes import exit_code_of
from datastates.cli.watch import Watched
from datastates.errors import CheckpointNotFoundError
from datastates.events import Event
from datastates.run_view import CUT_OFF, RunView, seen_in

NAMES = {"attempt": "a", "path": "/c/step1/w.pt"}


def record(event: str, begin: float, end: float, rank: int = 0, **fields: object) -> Event:
    return {"event": event, "rank": rank, "begin": begin, "end": end, **fields}


def clock(at: float, rank: int = 0, pid: int = 1, host: str = "node0") -> Event:
    return record("clock", at, at, rank, time=at, host=host, pid=pid)


def a_save(attempt: str, begin: float, *, is_committed: bool = True) -> list[Event]:
    names = {"attempt": attempt, "path": f"/c/{attempt}/w.pt", "nbytes": 100}
    found = [record("save", begin, begin + 0.1, **names), record("flush", begin, begin + 1.0, **names, index=0)]
    if is_committed:
        found.append(record("durable", begin, begin + 1.0, **names))
        found.append(record("committed", begin, begin + 1.5, **names | {"path": f"/c/{attempt}"}))
    return found


def view_of(*records: Event) -> RunView:
    view = RunView()
    view.note_all(records)
    return view


# --- the view


def test_what_is_in_flight_is_what_has_no_end():
    failed = record("failed", 3.0, 4.0, attempt="c", path="/c/c", error="no room")
    view = view_of(*a_save("a", 1.0), *a_save("b", 3.0, is_committed=False), failed)
    (save,) = view.in_flight
    assert (save.path, save.flushed_nbytes) == ("/c/b/w.pt", 100)
    assert view.last_committed is not None and view.last_committed.path == "/c/a"
    assert [(one.path, one.failure) for one in view.failures] == [("/c/c", "no room")]
    assert (view.ranks[0].num_committed, view.ranks[0].num_lost) == (1, 1)


def test_a_new_process_ends_what_an_older_one_had_in_flight():
    flight = [clock(0.0, pid=1), *a_save("a", 1.0, is_committed=False)]
    assert len(view_of(*flight, clock(2.0, pid=1)).in_flight) == 1  # a second engine of the same process
    view = view_of(*flight, clock(2.0, rank=1, pid=2))
    assert len(view.in_flight) == 1  # another rank
    view.note(clock(3.0, pid=3))
    assert view.in_flight == []
    assert [one.failure for one in view.failures] == [CUT_OFF]
    assert view.ranks[0].num_steps == 0


def test_ranks_of_a_larger_job_before_this_one_are_not_counted():
    earlier = [clock(0.0, rank, pid=1) for rank in range(4)]
    earlier += [record("flush", 0.0, 1.0, rank, **NAMES, index=0, nbytes=100) for rank in range(4)]
    earlier += [record("step", 1.0, 2.0, rank, number=50) for rank in range(4)]
    view = view_of(*earlier)
    assert sorted(view.present) == [0, 1, 2, 3] and view.rate("flush_nbytes_per_second") == 400.0
    later = [clock(10.0, rank, pid=2) for rank in range(2)]
    later += [record("flush", 10.0, 11.0, rank, **NAMES, index=0, nbytes=100) for rank in range(2)]
    view.note_all(later)
    assert sorted(view.present) == [0, 1] and view.rate("flush_nbytes_per_second") == 200.0
    view.note(clock(20.0, 0, pid=2))  # its clock was set: no start
    assert sorted(view.present) == [0, 1]
    text = watch._run_text(view, 30.0)
    assert text.startswith("2 ranks on node0 (2 more before the last start)")


def test_rates_are_those_of_all_ranks_together():
    ranks = [record("flush", 0.0, 2.0, rank, **NAMES, index=0, nbytes=100) for rank in (0, 1)]
    assert view_of(*ranks).rate("flush_nbytes_per_second") == 100.0
    assert view_of(*ranks).rate("copy_nbytes_per_second") is None


def test_a_tier_is_behind_by_what_was_committed_since():
    carried = record("carried", 2.5, 4.0, attempt="a", path="/c/a", tier="s3://b/run", nbytes=100)
    failed = record("carry_failed", 7.0, 8.0, attempt="c", path="/c/c", tier="s3://b/run", error="503")
    records = [*a_save("a", 1.0), *a_save("b", 3.0), *a_save("c", 5.0), carried, failed]
    (tier,) = view_of(*records).tiers
    assert (tier.name, tier.num_behind, tier.error) == ("s3://b/run", 2, "503")
    later = record("carried", 8.0, 9.0, attempt="c", path="/c/c", tier="s3://b/run", nbytes=100)
    (tier,) = view_of(*records, later).tiers
    assert (tier.num_behind, tier.error, tier.last.path) == (0, "", "/c/c")  # "b" was passed over for good


def test_what_an_earlier_run_has_saved_may_be_carried_by_this_one():
    carried = record("carried", 9.0, 10.0, attempt="old", path="/c/old", tier="/far", nbytes=100)
    view = view_of(*a_save("a", 1.0), carried)
    assert view.in_flight == []
    (tier,) = view.tiers
    assert (tier.num_behind, tier.last.path) == (1, "/c/old")
    assert [save.path for save in seen_in([*a_save("a", 1.0), carried])[1]] == ["/c/a"]


def test_a_tier_that_cannot_be_reached_at_all_is_told_until_it_can():
    view = view_of(record("carry_failed", 1.0, 2.0, attempt="", path="/c", tier="s3://b", error="no route"))
    assert [(tier.name, tier.error) for tier in view.tiers] == [("s3://b", "no route")]
    view.note(record("carried", 2.0, 3.0, attempt="a", path="/c/a", tier="s3://b", nbytes=1))
    assert [tier.error for tier in view.tiers] == [""]


def test_memory_is_bounded():
    view = RunView()
    for number in range(1000):
        view.note_all(a_save(f"a{number}", float(number), is_committed=number % 2 == 0))
        view.note(record("failed", number, number + 1, attempt=f"f{number}", path="/c", error="lost"))
    assert len(view._table.saves) <= 256 and len(view.failures) <= 8
    assert (view.ranks[0].num_committed, view.ranks[0].num_lost) == (500, 1000)
    assert len(json.dumps(view.plain(1000.0))) < 200_000


# --- the command


def write(path: Path, *records: Event, end: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in records) + end)


def look(*arguments: object) -> str:
    done = CliRunner().invoke(main, ["watch", "--once", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_job_is_shown_as_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "now", lambda: 20.0)
    events = tmp_path / "events"
    path = events / "events-rank00000.jsonl"
    watched = Watched(str(tmp_path), str(events))
    watched.look()
    assert "no records yet" in watched.rows(20.0)[0][1]
    write(path, clock(0.0), record("step", 1.0, 2.0, number=1), *a_save("a", 1.0), end='{"event": "st')
    watched.look()
    assert watched.rows(20.0)[0][1].startswith("1 rank on node0; 1 steps since its start, the last in 1 s")
    with path.open("a") as file:
        file.write('ep", "rank": 0, "begin": 2.0, "end": 4.0, "number": 2}\n')
    write(path, *a_save("b", 5.0, is_committed=False))
    write(events / "events-rank00001.jsonl", clock(0.0, 1, host="node1"), record("step", 1.0, 2.0, 1, number=2))
    watched.look()
    rows = [(str(label), str(text)) for label, text in watched.rows(20.0)]
    assert rows[0][1].startswith("2 ranks on node0, node1; 2 steps since its start")
    assert rows[1][1] == "1, 0 lost, 0 skipped; last /c/a, 100 B, 17.5 s ago, after 1.5 s"
    assert rows[2] == ("in flight", "/c/b/w.pt: 100 B, begun 15 s ago, staged 0%, written 100%")
    assert dict(rows)["rates"] == "write 100 B/s"


def test_failures_tiers_and_advice_have_rows(tmp_path):
    write(
        tmp_path / "events-rank00000.jsonl",
        *a_save("a", 1.0),
        *a_save("b", 1.5),
        record("failed", 3.0, 4.0, attempt="c", path="/c/c\x1b[2J", error="no room"),
        record("carry_failed", 3.0, 4.0, attempt="a", path="/c/a", tier="s3://b", error="503"),
    )
    text = look(tmp_path)
    assert "lost       /c/c\\x1b[2J: no room" in text  # not to be run by a terminal
    assert "tier       s3://b: 2 checkpoints behind; 503" in text
    assert "advice     save every 1.56 s or less often" in text
    assert "\x1b" not in text


def test_a_real_run_is_seen_with_its_newest_checkpoint(tmp_path):
    section = {"host_cache_size": 2**-8, "events_dir": str(tmp_path / "events")}
    with CheckpointEngine(section, rank=0) as engine:
        with engine.checkpoint(str(tmp_path / "step7"), "step7"):
            engine.save({"w": torch.ones(1 << 20)}, str(tmp_path / "step7" / "w.pt"))
        engine.wait(persist=True)
    found = json.loads(look(tmp_path, "--json"))  # the folder of records is found in that of checkpoints
    assert (found["latest"], found["num_committed"], found["in_flight"]) == ("step7", 1, [])
    assert 0 <= time.time() - found["latest_committed_at"] < 60
    assert 0 <= found["last_committed"]["age_seconds"] < 60
    assert found["ranks"][0]["pid"] == os.getpid()
    elsewhere = json.loads(look(tmp_path / "events", "--json"))
    assert (elsewhere["latest"], elsewhere["num_committed"]) == ("step7", 1)  # and the other way round
    text = look(tmp_path)
    assert "latest is step7, committed" in text


def test_without_records_the_newest_checkpoint_is_told(tmp_path):
    with CheckpointEngine({"host_cache_size": 2**-8}, rank=0) as engine:
        with engine.checkpoint(str(tmp_path / "step7"), "step7"):
            engine.save({"w": torch.ones(10)}, str(tmp_path / "step7" / "w.pt"))
        engine.wait(persist=True)
    text = look(tmp_path)
    assert "no records yet; they are written where events_dir is set" in text
    assert "latest is step7, committed" in text
    (tmp_path / "step7" / ".datastates" / "commit.json").write_text("{")
    assert "latest is step7, not committed" in look(tmp_path)


def test_a_folder_that_is_not_there_is_an_error_only_when_looked_at_once(tmp_path):
    done = CliRunner().invoke(main, ["watch", "--once", str(tmp_path / "nowhere")])
    assert done.exit_code == exit_code_of(CheckpointNotFoundError(""))
    watched = Watched(str(tmp_path / "nowhere"), str(tmp_path / "nowhere"))
    watched.look()
    assert watched.latest is None


def test_what_counts_is_said_where_not_all_was_read(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "TAIL_BYTES", 1500)
    monkeypatch.setattr(record_files, "LEAST_TAIL_BYTES", 1500)
    saves = [one for number in range(100) for one in a_save(f"a{number}", 100.0 * number)]
    write(tmp_path / "events-rank00000.jsonl", clock(0.0), *saves)
    watched = Watched(str(tmp_path), str(tmp_path))
    watched.look()
    assert watched.plain(10_000.0)["is_cut"] and watched.view.num_committed < 10
    span = watched.view.begin
    assert span is not None and span > 9000.0
    assert f"{watched.view.num_committed} in the last " in str(watched.rows(10_000.0)[1][1])


@pytest.mark.parametrize("name", [b"\0\0\0\0", b"", b"gone"])
def test_a_latest_that_names_nothing_is_no_error(tmp_path, name):
    (tmp_path / "latest").write_bytes(name)
    assert ("not committed" in look(tmp_path)) == bool(name)


def test_a_server_that_is_away_for_a_while_does_not_end_it(tmp_path, monkeypatch):
    watched = Watched(str(tmp_path), str(tmp_path))
    looks = watch._looks(watched, 0.5, once=False, pause=lambda _seconds: None)
    next(looks)
    with monkeypatch.context() as patch:
        patch.setattr(watch, "read_latest", lambda _folder: (_ for _ in ()).throw(OSError("stale file handle")))
        next(looks)
        assert watched.plain(0.0)["trouble"] == "stale file handle"
        assert watched.rows(0.0)[0][0] == "trouble"
        with pytest.raises(OSError, match="stale"):
            next(watch._looks(watched, 0.5, once=False))
    next(looks)
    assert watched.trouble == "" and watched.rows(0.0)[0][0] == "run"


def test_a_pause_lies_between_two_looks(tmp_path):
    pauses = []
    looks = watch._looks(Watched(str(tmp_path), str(tmp_path)), 0.5, once=False, pause=pauses.append)
    for _ in range(3):
        next(looks)
    assert pauses == [0.5, 0.5]
    assert len(list(watch._looks(Watched(str(tmp_path), str(tmp_path)), 0.5, once=True))) == 1


def read_until(descriptor: int, wanted: bytes) -> bytes:
    found = b""
    deadline = time.monotonic() + 30
    while wanted not in found:
        assert time.monotonic() < deadline, found
        if select.select([descriptor], [], [], 0.1)[0]:
            found += os.read(descriptor, 65536)
    return found


@pytest.fixture
def terminal():
    outer, inner = pty.openpty()
    yield outer, inner
    os.close(outer)
    os.close(inner)


def test_a_terminal_shows_it_live_until_it_is_interrupted(tmp_path, terminal):
    outer, inner = terminal
    path = tmp_path / "events-rank00000.jsonl"
    write(path, clock(0.0), record("failed", 3.0, 4.0, attempt="c", path="/c/first", error="no room"))
    command = [sys.executable, "-m", "datastates", "watch", str(tmp_path), "--every", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
    )
    try:
        read_until(outer, b"/c/first")
        write(path, record("failed", 3.0, 5.0, attempt="d", path="/c/second", error="no room"))
        shown = read_until(outer, b"/c/second")
        assert b"\x1b[31m" in shown  # red
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
