"""Records reach the listener and the file, whole, and a broken file harms nobody."""

from __future__ import annotations

import errno
import json
import os
import threading
import time

import pytest

from datastates.events import EventLog, now
from datastates.record_files import records_of


def lines(path):
    """The records of a file but for those that say what time it is."""
    found = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert found[0]["event"] == "clock"
    return [record for record in found if record["event"] != "clock"]


def test_a_record_reaches_the_listener_and_the_file(tmp_path):
    heard = []
    log = EventLog(rank=3, directory=str(tmp_path / "made" / "events"), listener=heard.append)
    begin = now()
    log.record("flush", begin, begin + 0.25, path="/x/a.pt", index=2, nbytes=4096)
    log.close()
    expected = {
        "event": "flush",
        "rank": 3,
        "begin": begin,
        "end": begin + 0.25,
        "path": "/x/a.pt",
        "index": 2,
        "nbytes": 4096,
    }
    assert heard == [expected]
    assert lines(tmp_path / "made" / "events" / "events-rank00003.jsonl") == [expected]


def test_a_second_log_appends_and_each_rank_has_its_file(tmp_path):
    for rank, event in [(0, "first"), (1, "other"), (0, "second")]:
        log = EventLog(rank, str(tmp_path))
        log.record(event, 0.0, 1.0)
        log.close()
    assert [record["event"] for record in lines(tmp_path / "events-rank00000.jsonl")] == ["first", "second"]
    assert [record["event"] for record in lines(tmp_path / "events-rank00001.jsonl")] == ["other"]


def test_records_of_many_threads_stay_whole(tmp_path):
    log = EventLog(directory=str(tmp_path))
    start = threading.Barrier(4)

    def work(number):
        start.wait(10)
        for index in range(100):
            log.record("stage", 0.0, 1.0, thread=number, index=index, path="x" * 200)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    found = [(record["thread"], record["index"]) for record in lines(tmp_path / "events-rank00000.jsonl")]
    assert sorted(found) == [(number, index) for number in range(4) for index in range(100)]


def test_a_record_is_in_the_file_before_the_log_is_closed(tmp_path):
    log = EventLog(directory=str(tmp_path))
    log.record("save", 0.0, 1.0)
    assert [record["event"] for record in lines(tmp_path / "events-rank00000.jsonl")] == ["save"]
    log.close()


def test_paths_that_are_no_utf8_and_values_that_are_no_json_are_written(tmp_path):
    log = EventLog(directory=str(tmp_path))
    log.record("failed", 0.0, 1.0, path=os.fsdecode(b"/x/\xff.pt"), error=ValueError("bad"), name="é")
    log.close()
    (record,) = lines(tmp_path / "events-rank00000.jsonl")
    assert (os.fsencode(record["path"]), record["error"], record["name"]) == (b"/x/\xff.pt", "bad", "é")


def test_a_full_disk_harms_no_save_and_is_told_once(tmp_path, caplog):
    (tmp_path / "events-rank00000.jsonl").symlink_to("/dev/full")
    heard = []
    log = EventLog(directory=str(tmp_path), listener=heard.append)
    log.record("save", 0.0, 1.0)
    first = log.error
    assert isinstance(first, OSError) and first.errno == errno.ENOSPC
    log.record("save", 1.0, 2.0)
    log.close()
    assert log.error is first
    assert len(heard) == 2
    (told,) = caplog.messages
    assert "events-rank00000.jsonl: records of saves cannot be written" in told


def test_close_is_idempotent_and_later_records_reach_the_listener_only(tmp_path):
    heard = []
    log = EventLog(directory=str(tmp_path), listener=heard.append)
    log.close()
    log.close()
    log.record("save", 0.0, 1.0)
    assert len(heard) == 1 and log.error is None
    assert lines(tmp_path / "events-rank00000.jsonl") == []


def test_a_listener_that_fails_harms_nobody_and_is_told_once(tmp_path, caplog):
    def listener(record):
        raise KeyError(record["event"])

    heard = []
    log = EventLog(directory=str(tmp_path), listener=listener)
    log.add(heard.append)
    log.record("durable", 0.0, 1.0)
    log.record("committed", 0.0, 2.0)
    log.close()
    assert [record["event"] for record in heard] == ["durable", "committed"]
    assert lines(tmp_path / "events-rank00000.jsonl") == heard
    (told,) = caplog.records
    assert "'durable'" in told.getMessage() and told.getMessage().endswith("KeyError: 'durable'")
    assert told.exc_info is None


def test_what_is_added_is_ended_once():
    ended = []
    log = EventLog()
    log.add(lambda record: None, lambda: ended.append(True))
    log.close()
    log.close()
    assert ended == [True]


def test_a_signal_handler_may_record_while_its_thread_does(tmp_path, monkeypatch):
    log = EventLog(directory=str(tmp_path))
    write, nested = os.write, iter([True])

    def interrupted(descriptor, data):
        if next(nested, False):  # as if a signal came here: its handler saves
            log.record("save", 0.0, 1.0)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", interrupted)
    log.record("step", 0.0, 1.0)
    log.close()
    assert [record["event"] for record in lines(tmp_path / "events-rank00000.jsonl")] == ["save", "step"]


def test_a_file_says_what_time_its_clock_means(tmp_path):
    before = time.time()
    EventLog(3, str(tmp_path)).close()
    (record,) = map(json.loads, (tmp_path / "events-rank00003.jsonl").read_text().splitlines())
    assert before <= record["time"] <= time.time()
    assert abs((time.time() - now()) - (record["time"] - record["begin"])) < 1.0
    assert (record["event"], record["host"], record["pid"]) == ("clock", os.uname().nodename, os.getpid())


def test_half_a_line_that_a_killed_run_left_costs_no_other(tmp_path):
    path = tmp_path / "events-rank00000.jsonl"
    path.write_text('{"event": "sta')
    log = EventLog(directory=str(tmp_path))
    log.record("save", 0.0, 1.0)
    log.close()
    cut, *others = path.read_text().splitlines()
    assert cut == '{"event": "sta'
    assert [json.loads(line)["event"] for line in others] == ["clock", "save"]


def test_half_a_line_that_a_full_disk_left_costs_no_other(tmp_path, monkeypatch):
    log = EventLog(directory=str(tmp_path))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        log.record("save", 0.0, 1.0)
    log.record("step", 0.0, 1.0)
    log.close()
    _, cut, *others = (tmp_path / "events-rank00000.jsonl").read_text().splitlines()
    assert cut == '{"event": '
    assert [json.loads(other)["event"] for other in others] == ["clock", "step"]


def test_a_clock_that_a_full_disk_has_swallowed_is_told_when_there_is_room(tmp_path, monkeypatch):
    def refuse(descriptor, data):
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        log = EventLog(directory=str(tmp_path))
    log.record("step", 0.0, 1.0)
    log.close()
    assert [record["event"] for record in lines(tmp_path / "events-rank00000.jsonl")] == ["step"]


@pytest.mark.parametrize("shift", [-3600.0, 3600.0])
def test_a_file_says_again_what_time_it_is_when_the_clock_was_set(tmp_path, monkeypatch, shift):
    log = EventLog(directory=str(tmp_path))
    log.record("step", 0.0, 1.0)
    unix = time.time
    monkeypatch.setattr(time, "time", lambda: unix() + shift)
    log.record("step", 1.0, 2.0)
    log.record("step", 2.0, 3.0)
    log.close()
    path = tmp_path / "events-rank00000.jsonl"
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == [
        "clock",
        "step",
        "clock",
        "step",
        "step",
    ]
    first, second, third = (record["end"] for record in records_of(str(path)) if record["event"] == "step")
    assert second - first == pytest.approx(1.0 + shift, abs=0.9)
    assert third - second == pytest.approx(1.0)


def test_nothing_is_made_when_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = EventLog()
    log.record("save", 0.0, 1.0, value=object())
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        EventLog(directory=str(tmp_path / "file" / "events"))
