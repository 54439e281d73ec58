"""``datastates prune``: what it names it removes, and nothing else."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from click.testing import CliRunner

from datastates.checkpoint_engine import CheckpointEngine
from datastates.cli import main
from datastates.pins import pin, unpin


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    with CheckpointEngine({"host_cache_size": 2**-8}, rank=0) as engine:
        for step in (9, 10, 100, 20):
            with engine.checkpoint(str(folder / f"step{step}"), f"step{step}"):
                engine.save({"w": torch.full((100,), step)}, str(folder / f"step{step}" / "a.pt"))
        engine.wait(persist=True)
    (folder / "notes").mkdir()
    (folder / "step5").mkdir()  # somebody else's
    return folder


def prune(*arguments: object):
    result = CliRunner().invoke(main, ["prune", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_nothing_is_changed_without_yes(run):
    before = sorted(os.listdir(run))
    text = prune(run, "--keep-last", 1)
    assert "step9" in text
    assert "2 of 4 checkpoints" in text, "the newest stays, and step20, which latest names"
    assert sorted(os.listdir(run)) == before
    assert "nothing to remove" in prune(run, "--keep-last", 4)


def test_with_yes_they_go_and_the_others_stay(run):
    printed = json.loads(prune(run, "--keep-last", 1, "--keep", "step9", "--yes", "--json"))
    assert printed["removed"] == [str(run / "step10")]
    assert sorted(os.listdir(run)) == ["latest", "notes", "step100", "step20", "step5", "step9"]
    assert "removed step9" in prune(run, "--keep-last", 1, "--yes")


def test_one_that_has_lost_a_file_neither_counts_nor_goes(run):
    (run / "step100" / "a.pt").unlink()
    (run / "step10" / "a.pt").unlink()
    printed = json.loads(prune(run, "--keep-last", 1, "--yes", "--json"))
    assert printed["removed"] == [str(run / "step9")], "step20 is the newest that is whole"
    assert sorted(os.listdir(run)) == ["latest", "notes", "step10", "step100", "step20", "step5"]


def test_multiples_stay(run):
    assert json.loads(prune(run, "--keep-last", 1, "--keep-every", 10, "--json"))["would_remove"] == [
        str(run / "step9")
    ]


def test_what_is_pinned_stays(run):
    pin(str(run / "step9"))
    assert json.loads(prune(run, "--keep-last", 1, "--yes", "--json"))["removed"] == [str(run / "step10")]
    unpin(str(run / "step9"))
    assert json.loads(prune(run, "--keep-last", 1, "--yes", "--json"))["removed"] == [str(run / "step9")]


def test_a_tag_that_is_not_there_is_an_error(run):
    result = CliRunner().invoke(main, ["prune", str(run), "--keep", "step7", "--yes", "--keep-last", "1"])
    assert result.exit_code != 0
    assert "step7" in result.stderr
    assert len(os.listdir(run)) == 7


def test_what_is_damaged_neither_counts_nor_goes(run):
    (run / "step100" / "a.pt").unlink()
    (run / "latest").unlink()
    doomed = json.loads(prune(run, "--keep-last", 1, "--json"))["would_remove"]
    assert doomed == [str(run / "step9"), str(run / "step10")]


def test_links_neither_count_nor_go_and_what_they_point_to_stays(run, tmp_path):
    (run / "latest").unlink()
    (run / "best").symlink_to("step10")
    (run / "newest").symlink_to(run / "step100")
    (run / "loop").symlink_to("loop")
    (run / "elsewhere").symlink_to(tmp_path)
    assert json.loads(prune(run, "--keep-last", 2, "--yes", "--json"))["removed"] == [str(run / "step9")]
    assert {"best", "newest", "step10", "step20", "step100"} <= set(os.listdir(run))


def test_each_run_is_a_series_of_its_own(run, tmp_path):
    shutil.copytree(run, tmp_path / "later")
    for step in (9, 10, 20, 100):
        (tmp_path / "later" / f"step{step}").rename(tmp_path / "later" / f"copy{step}")
    doomed = json.loads(prune(tmp_path, "--keep-last", 2, "--json"))["would_remove"]
    assert sorted(os.path.relpath(path, tmp_path) for path in doomed) == [
        "later/copy10",
        "later/copy9",
        "run/step10",
        "run/step9",
    ]
