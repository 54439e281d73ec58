"""Files of records: their clocks, what is no record, and files that grow while they are read."""

from __future__ import annotations

import json
import os

import pytest

from datastates import record_files
from datastates.errors import CheckpointNotFoundError
from datastates.events import EventLog
from datastates.record_files import GrowingFile, GrowingFolder, read_records, records_of
from datastates.run_view import seen_in


def line(event: str, begin: float, end: float, rank: int = 0, **fields: object) -> str:
    return json.dumps({"event": event, "rank": rank, "begin": begin, "end": end, **fields}) + "\n"


def clock(begin: float, unix: float, rank: int = 0) -> str:
    return line("clock", begin, begin, rank, time=unix, host="node", pid=1)


def test_hosts_whose_clocks_began_at_other_times_are_put_together(tmp_path):
    (tmp_path / "events-rank00000.jsonl").write_text(
        clock(50.0, 1000.0) + line("save", 51.0, 52.0, attempt="a", path="/c/a/0.pt", nbytes=1)
    )
    (tmp_path / "events-rank00001.jsonl").write_text(
        clock(90000.0, 1000.5, 1)
        + line("save", 90000.5, 90001.0, 1, attempt="a", path="/c/a/1.pt", nbytes=1)
        + line("durable", 90000.5, 90003.5, 1, attempt="a", path="/c/a/1.pt", nbytes=1)
    )
    (save,) = seen_in(read_records(str(tmp_path)))[1]
    assert (save.begin, save.durable_at, save.durable_seconds) == (1001.0, 1004.0, 3.0)


def test_a_restart_after_a_reboot_has_a_clock_of_its_own(tmp_path):
    path = tmp_path / "events-rank00000.jsonl"
    path.write_text(clock(500.0, 1000.0) + line("step", 501.0, 502.0) + clock(3.0, 2000.0) + line("step", 4.0, 5.0))
    steps = [record for record in records_of(str(path)) if record["event"] == "step"]
    assert [(record["begin"], record["end"]) for record in steps] == [(1001.0, 1002.0), (2001.0, 2002.0)]


def test_records_without_a_clock_keep_their_times(tmp_path):
    (tmp_path / "events-rank00000.jsonl").write_text(line("step", 4.0, 5.0))
    assert [record["begin"] for record in read_records(str(tmp_path))] == [4.0]


@pytest.mark.parametrize(
    "fields",
    [
        {"num_free_slabs": -1},
        {"num_in_flight": "many"},
        {"tier": 3},
        {"host": None},
        {"number": 1.5},
        {"step_seconds": "fast"},
        {"flush_nbytes_per_second": float("nan")},
        {"advised_seconds": -1.0},
    ],
)
def test_fields_of_other_types_make_no_record(tmp_path, fields):
    (tmp_path / "events-rank00000.jsonl").write_text(line("summary", 1.0, 2.0, attempt="x", path="/c", **fields))
    with pytest.raises(CheckpointNotFoundError):
        list(read_records(str(tmp_path)))


def test_what_is_not_known_is_null(tmp_path):
    (tmp_path / "events-rank00000.jsonl").write_text(
        line("summary", 1.0, 2.0, attempt="x", path="/c", step_seconds=None)
    )
    assert len(list(read_records(str(tmp_path)))) == 1


def test_a_record_that_ends_before_it_begins_is_none(tmp_path):
    (tmp_path / "events-rank00000.jsonl").write_text(line("step", 2.0, 1.0) + line("step", 2.0, 2.0, number=7))
    assert [record["number"] for record in read_records(str(tmp_path))] == [7]


def test_records_are_read_one_after_the_other(tmp_path):
    """A file of any length is read in the memory of a record."""
    path = tmp_path / "events-rank00000.jsonl"
    path.write_text(line("step", 1.0, 2.0, number=1) * 3)
    records = read_records(str(tmp_path))
    assert next(records)["number"] == 1
    with path.open("a") as file:
        file.write(line("step", 2.0, 3.0, number=9) * 20_000)
    assert sum(1 for _ in records) == 20_002  # those that were not there yet, too


# --- files that grow


def test_a_file_is_read_from_where_the_last_look_ended(tmp_path):
    path = tmp_path / "events-rank00000.jsonl"
    growing = GrowingFile(str(path))
    assert growing.read() == []  # it is not there yet
    path.write_text(clock(10.0, 1000.0) + line("step", 11.0, 12.0, number=1))
    assert [record["event"] for record in growing.read()] == ["clock", "step"]
    assert growing.read() == []
    with path.open("a") as file:
        file.write(line("step", 12.0, 13.0, number=2))
    (record,) = growing.read()
    assert (record["number"], record["end"]) == (2, 1003.0)


def test_a_line_is_read_when_it_is_whole(tmp_path):
    path = tmp_path / "events-rank00000.jsonl"
    growing = GrowingFile(str(path))
    whole = line("step", 11.0, 12.0, number=1)
    for end in range(len(whole)):
        path.write_text(whole[:end])
        assert growing.read() == []
    path.write_text(whole)
    assert len(growing.read()) == 1


def test_a_file_that_is_replaced_or_cut_is_read_from_its_begin(tmp_path):
    path = tmp_path / "events-rank00000.jsonl"
    path.write_text(line("step", 11.0, 12.0, number=1) * 3)
    growing = GrowingFile(str(path))
    assert len(growing.read()) == 3
    path.write_text(line("step", 11.0, 12.0, number=2))
    assert [record["number"] for record in growing.read()] == [2]
    other = tmp_path / "other"
    other.write_text(line("step", 11.0, 12.0, number=3) * 5)
    os.replace(other, path)
    assert [record["number"] for record in growing.read()] == [3] * 5
    path.unlink()
    assert growing.read() == []


def test_of_a_long_file_the_end_is_read_with_the_clock_that_counts_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "CHUNK_BYTES", 300)
    path = tmp_path / "events-rank00000.jsonl"
    steps = "".join(line("step", float(number), number + 1.0, number=number) for number in range(1, 200))
    path.write_text(clock(0.0, 7.0) + clock(0.0, 1000.0) + steps)
    found = GrowingFile(str(path), tail_bytes=1000).read()
    assert found[-1]["number"] == 199 and 5 < len(found) < 20
    assert found[-1]["end"] == 1200.0


def test_a_line_longer_than_any_record_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "CHUNK_BYTES", 300)
    path = tmp_path / "events-rank00000.jsonl"
    path.write_text("x" * 2000 + "\n" + line("step", 1.0, 2.0, number=5))
    assert [record["number"] for record in GrowingFile(str(path)).read()] == [5]


def test_files_of_others_in_the_folder_are_not_read(tmp_path):
    (tmp_path / "dataset.jsonl").write_text(line("step", 1.0, 2.0, number=1))
    (tmp_path / "folder.jsonl").mkdir()
    assert list(GrowingFolder(str(tmp_path)).read()) == []
    with pytest.raises(CheckpointNotFoundError, match="events-rank"):
        list(read_records(str(tmp_path)))
    assert len(list(GrowingFolder(str(tmp_path / "dataset.jsonl")).read())) == 1  # unless it is named


def test_of_many_files_less_is_read_of_each(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "TAIL_BYTES", 4000)
    monkeypatch.setattr(record_files, "LEAST_TAIL_BYTES", 500)
    for rank in range(3):
        (tmp_path / f"events-rank{rank:05d}.jsonl").write_text(line("step", 1.0, 2.0, rank, number=1) * 100)
    nbytes = len(line("step", 1.0, 2.0, number=1))
    assert len(list(GrowingFolder(str(tmp_path)).read())) == 3 * (4000 // 3 // nbytes)
    monkeypatch.setattr(record_files, "TAIL_BYTES", 3)
    assert len(list(GrowingFolder(str(tmp_path)).read())) == 3 * (500 // nbytes)


def test_ranks_may_come_later(tmp_path):
    growing = GrowingFolder(str(tmp_path))  # the folder of checkpoints
    assert list(growing.read()) == []
    for rank in (0, 1):
        log = EventLog(rank, str(tmp_path / "events"))
        log.record("step", 1.0, 2.0, number=1)
        log.close()
        assert {(record["event"], record["rank"]) for record in growing.read()} == {("clock", rank), ("step", rank)}


def test_ranks_are_read_side_by_side(tmp_path):
    """So that a view, which keeps the saves that it has heard of last, hears of all parts of one at about one time."""
    for rank in (0, 1):
        steps = [line("step", float(number), number + 0.5 + rank / 10, rank, number=number) for number in range(3)]
        (tmp_path / f"events-rank{rank:05d}.jsonl").write_text("".join(steps))
    records = GrowingFolder(str(tmp_path)).read()
    assert [(record["number"], record["rank"]) for record in records] == [
        (n, rank) for n in range(3) for rank in (0, 1)
    ]


def test_it_is_known_whether_all_was_read(tmp_path, monkeypatch):
    path = tmp_path / "events-rank00000.jsonl"
    path.write_text(line("step", 1.0, 2.0, number=1) * 100)
    whole = GrowingFolder(str(tmp_path))
    assert len(list(whole.read())) == 100 and not whole.is_cut
    monkeypatch.setattr(record_files, "TAIL_BYTES", 1000)
    monkeypatch.setattr(record_files, "LEAST_TAIL_BYTES", 1000)
    cut = GrowingFolder(str(tmp_path))
    assert len(list(cut.read())) < 100 and cut.is_cut


def test_a_folder_that_vanishes_has_no_records(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    assert list(GrowingFolder(str(tmp_path / "gone")).read()) == []
