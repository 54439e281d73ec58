"""Metrics as the parsers of Prometheus read them, and the file that is kept up to date."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch
from click.testing import CliRunner
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from datastates import openmetrics
from datastates.checkpoint_engine import CheckpointEngine
from datastates.cli import main
from datastates.events import Event
from datastates.openmetrics import MetricsFile, metrics_path, openmetrics_text
from datastates.run_view import RunView
from flusher.rig import eventually


def record(event: str, rank: int, begin: float, end: float, **fields: object) -> Event:
    return {"event": event, "rank": rank, "begin": begin, "end": end, **fields}


def two_ranks() -> list[Event]:
    found = []
    for rank in (0, 1):
        names = {"attempt": "a", "path": "/c/step1", "nbytes": 1000}
        found += [
            record("save", rank, 1.0, 1.5, **names),
            record("fence", rank, 2.0, 2.25, num_files=1),
            record("flush", rank, 1.0, 3.0, **names, index=0),
            record("committed", rank, 1.0, 3.0, **names),
            record("summary", rank, 1.0, 3.0, **names, host_cache_bytes=500, num_free_slabs=3, durable_seconds=None),
            record("failed", rank, 4.0, 5.0, attempt="b", path="/c/step2/x", error="lost"),
            record("failed", rank, 4.0, 5.0, attempt="b", path="/c/step2/y", error="lost"),
            record("skipped", rank, 6.0, 6.0, attempt="c", path="/c/step3", error="busy"),
        ]
    found.append(record("carry_failed", 0, 3.0, 4.0, attempt="a", path="/c/step1", tier='s3://b "x"\\\n', error="no"))
    return found


def samples(text: str) -> dict[str, dict[str, float]]:
    """By name of the sample, values by rank (or tier)."""
    found: dict[str, dict[str, float]] = {}
    for family in parse_openmetrics(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})["".join(sample.labels.values())] = sample.value
    return found


def test_the_text_is_what_the_parser_of_openmetrics_takes():
    view = RunView()
    view.note_all(two_ranks())
    text = openmetrics_text(view)
    found = samples(text)
    assert found["datastates_committed_total"] == {"0": 1.0, "1": 1.0}
    assert found["datastates_lost_total"] == found["datastates_skipped_total"] == {"0": 1.0, "1": 1.0}
    assert found["datastates_saved_bytes_total"] == {"0": 1000.0, "1": 1000.0}
    assert found["datastates_blocked_seconds_total"]["0"] == 0.5
    assert found["datastates_fenced_seconds_total"]["1"] == 0.25
    assert found["datastates_flush_bytes_per_second"]["0"] == 500.0
    assert found["datastates_last_committed_timestamp_seconds"]["0"] == 3.0
    assert found["datastates_host_cache_bytes"]["0"] == 500.0
    assert found["datastates_advised_interval_seconds"]["0"] == 2.5
    assert "datastates_last_durable_seconds" not in found  # not known
    assert found["datastates_tier_checkpoints_behind"] == {'s3://b "x"\\\n': 1.0}
    assert found["datastates_tier_is_failing"] == {'s3://b "x"\\\n': 1.0}
    assert {family.unit for family in parse_openmetrics(text)} == {"", "seconds", "bytes"}


def test_the_older_format_of_node_exporter_reads_the_same_values():
    view = RunView()
    view.note_all(two_ranks())
    text = openmetrics_text(view)
    older = {sample.name: sample.value for family in parse_prometheus(text) for sample in family.samples}
    assert older == {name: list(values.values())[-1] for name, values in samples(text).items()}
    assert not any(len(line.split()) > 2 for line in text.splitlines() if line[0] != "#" and "tier" not in line)


def test_without_records_the_text_is_valid():
    assert samples(openmetrics_text(RunView())) == {}


def test_a_real_run_keeps_its_file_and_leaves_no_other(tmp_path):
    folder = tmp_path / "metrics"
    with CheckpointEngine({"host_cache_size": 2**-7, "metrics_dir": str(folder)}, rank=0) as engine:
        with engine.checkpoint(str(tmp_path / "step1"), "step1"):
            engine.save({"w": torch.ones(1 << 20)}, str(tmp_path / "step1" / "w.pt"))
        engine.wait(persist=True)
    assert os.listdir(folder) == ["datastates-rank00000.prom"]
    found = samples((folder / "datastates-rank00000.prom").read_text())
    assert found["datastates_committed_total"] == {"0": 1.0}
    assert found["datastates_saved_bytes_total"]["0"] > 4 << 20
    assert abs(found["datastates_last_committed_timestamp_seconds"]["0"] - time.time()) < 60


def test_the_file_is_written_when_there_was_a_pause(tmp_path, monkeypatch):
    monkeypatch.setattr(openmetrics, "SHORTEST_SECONDS", 0.01)
    path = tmp_path / "m.prom"
    with MetricsFile(path) as listener:
        listener(two_ranks()[0])
        eventually(path.exists, "the file is written before the listener is closed")
    assert samples(path.read_text())["datastates_saved_bytes_total"] == {"0": 1000.0}


def test_the_time_of_the_last_commit_follows_a_clock_that_was_set(tmp_path, monkeypatch):
    """An alarm on its age must not go off for ever after a machine was suspended."""
    unix = time.time
    with MetricsFile(tmp_path / "m.prom") as listener:
        monkeypatch.setattr(time, "time", lambda: unix() + 7200)
        at = time.monotonic()
        listener(record("summary", 0, at, at, attempt="a", path="/c/a"))
    found = samples((tmp_path / "m.prom").read_text())
    assert found["datastates_last_committed_timestamp_seconds"]["0"] == pytest.approx(unix() + 7200, abs=60)


def test_many_records_write_the_file_seldom(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(openmetrics, "SHORTEST_SECONDS", 1e6)
    monkeypatch.setattr(openmetrics, "write_replacing", lambda path, text: written.append(text))
    with MetricsFile(tmp_path / "m.prom") as listener:
        for _ in range(50):
            for one in two_ranks():
                listener(one)
    assert len(written) == 2  # with the first record, and at the end
    assert samples(written[-1])["datastates_committed_total"]["0"] == 50.0


def test_a_disk_that_refuses_is_told_once_and_leaves_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(openmetrics, "SHORTEST_SECONDS", 0.0)
    (tmp_path / "m.prom").mkdir()  # what cannot be replaced by a file
    with MetricsFile(tmp_path / "m.prom") as listener:
        for one in two_ranks():
            listener(one)
    assert os.listdir(tmp_path) == ["m.prom"]
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    section = {"host_cache_size": 2**-7, "metrics_dir": str(tmp_path / "file" / "metrics")}
    with pytest.raises(OSError, match="file"):
        CheckpointEngine(section, rank=0)


def test_the_command_prints_the_metrics_of_records(tmp_path):
    path = tmp_path / "events-rank00000.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in two_ranks()))
    done = CliRunner().invoke(main, ["stats", str(path), "--openmetrics"])
    assert done.exit_code == 0, done.output
    assert samples(done.stdout)["datastates_committed_total"] == {"0": 1.0, "1": 1.0}
    assert CliRunner().invoke(main, ["stats", str(path), "--openmetrics", "--json"]).exit_code == 2
    assert metrics_path("/m", 3) == "/m/datastates-rank00003.prom"
