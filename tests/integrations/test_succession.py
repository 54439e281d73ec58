"""Files that replace each other: which names are taken while links and removals wait for a save."""

from __future__ import annotations

import os

import pytest
import torch

from datastates.config import CheckpointConfig
from datastates.integrations import succession as succession_module
from datastates.integrations.lone_files import LoneFiles
from datastates.integrations.succession import Succession
from datastates.system_calls import patiently


@pytest.fixture
def files():
    files = LoneFiles(CheckpointConfig.from_section({"host_cache_size": 2**-8}))
    yield files
    files.close()


def save(files, path):
    return files.save({"w": torch.ones(1000)}, str(path), lambda _fqn, _tensor: True)


def test_a_link_to_a_file_that_is_neither_there_nor_in_flight_waits_for_it(files, tmp_path):
    files.succession.link(str(tmp_path / "a.ckpt"), str(tmp_path / "last.ckpt"))
    assert os.listdir(tmp_path) == []
    assert files.succession.awaits_link(str(tmp_path / "last.ckpt"))
    save(files, tmp_path / "a.ckpt")
    files.wait(30)
    assert os.readlink(tmp_path / "last.ckpt") == "a.ckpt"
    assert not files.succession.awaits_link(str(tmp_path / "last.ckpt"))


def test_the_name_of_a_link_is_taken_at_every_moment(tmp_path, monkeypatch):
    """Also while it is being made: nobody else may choose the name then."""
    succession = Succession()
    (tmp_path / "a.ckpt").write_text("a")
    link, seen = str(tmp_path / "last.ckpt"), []

    def spy(call, *arguments):
        seen.append(succession.awaits_link(link) or os.path.lexists(link))
        return patiently(call, *arguments)

    monkeypatch.setattr(succession_module, "patiently", spy)
    succession.link(str(tmp_path / "a.ckpt"), link)
    assert seen == [True, True]
    assert os.readlink(link) == "a.ckpt"
    succession.close()


def test_the_name_of_a_file_that_is_to_go_is_free_at_every_moment(files, tmp_path, monkeypatch):
    seen = []

    def spy(call, *arguments):
        if call is os.unlink:
            seen.append(files.succession.is_doomed(str(tmp_path / "a.ckpt")))
        return patiently(call, *arguments)

    save(files, tmp_path / "a.ckpt")
    files.wait(30)
    monkeypatch.setattr(succession_module, "patiently", spy)
    save(files, tmp_path / "b.ckpt")
    files.succession.remove(str(tmp_path / "a.ckpt"))
    seen.append(files.succession.is_doomed(str(tmp_path / "a.ckpt")) or not (tmp_path / "a.ckpt").exists())
    files.wait(30)
    assert seen == [True, True]
    assert os.listdir(tmp_path) == ["b.ckpt"]


def test_a_file_that_is_saved_again_stays(files, tmp_path):
    save(files, tmp_path / "a.ckpt")
    save(files, tmp_path / "b.ckpt")
    files.succession.remove(str(tmp_path / "a.ckpt"))
    save(files, tmp_path / "a.ckpt")
    files.wait(30)
    assert "a.ckpt" in os.listdir(tmp_path)
