"""Records reach the listener and the file, whole, and a broken file harms nobody."""

from __future__ import annotations

import errno
import json
import os
import threading

import pytest

from datastates.events import EventLog, now


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


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


def test_a_full_disk_harms_no_save_and_the_first_error_is_kept(tmp_path):
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


def test_close_is_idempotent_and_later_records_reach_the_listener_only(tmp_path):
    heard = []
    log = EventLog(directory=str(tmp_path), listener=heard.append)
    log.close()
    log.close()
    log.record("save", 0.0, 1.0)
    assert len(heard) == 1 and log.error is None
    assert (tmp_path / "events-rank00000.jsonl").read_bytes() == b""


def test_an_exception_of_the_listener_is_the_listeners(tmp_path):
    def listener(record):
        raise KeyError(record["event"])

    log = EventLog(directory=str(tmp_path), listener=listener)
    with pytest.raises(KeyError, match="durable"):
        log.record("durable", 0.0, 1.0)
    log.close()
    assert len(lines(tmp_path / "events-rank00000.jsonl")) == 1


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
