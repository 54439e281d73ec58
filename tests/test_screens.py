"""The screens in docs/cli.md are what the commands print."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def write_screens(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("write_screens")


def test_the_document_shows_what_the_commands_print(write_screens, tmp_path, monkeypatch):
    text = write_screens.DOCUMENT.read_text("utf-8")
    stale = tmp_path / "cli.md"
    stale.write_text(text.replace("is damaged", "is sound").replace("12\n", "13\n"))
    monkeypatch.setattr(write_screens, "DOCUMENT", stale)
    write_screens.run([])
    assert stale.read_text("utf-8") == text.replace("is damaged", "is sound"), "run python scripts/write_screens.py"


def test_each_command_is_shown(write_screens):
    text = write_screens.DOCUMENT.read_text("utf-8").partition("<!-- screens -->")[2]
    for command in ("ls", "show", "diff", "stats", "watch", "verify", "prune"):
        assert f"$ datastates {command} " in text
