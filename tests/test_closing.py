"""The end of a saver: its parts in order, once, each with what is left of the time."""

from __future__ import annotations

import atexit
import logging
import os

import pytest

from datastates.closing import Closing
from datastates.entrance import Entrance
from datastates.errors import ClosedError, StorageError


def failing(called, name):
    def end(timeout):
        called.append((name, timeout))
        raise StorageError(f"{name} cannot end")

    return end


def test_a_part_that_fails_keeps_no_other_from_ending_and_the_first_failure_is_raised():
    called, entrance = [], Entrance()
    closing = Closing(entrance, [failing(called, "a"), failing(called, "b"), lambda t: called.append(("c", t))], 1.0)
    with pytest.raises(StorageError, match="a cannot end"):
        closing.close(None)
    assert called == [("a", None), ("b", None), ("c", None)]
    with pytest.raises(ClosedError, match="closed"):
        entrance.check()
    closing.close(None)
    assert len(called) == 3


def test_the_parts_share_the_time():
    called = []
    Closing(Entrance(), [called.append, called.append], 1.0).close(50.0)
    assert 50.0 >= called[0] >= called[1] > 0.0


def test_who_has_closed_is_not_called_at_exit(monkeypatch):
    hooks = []
    monkeypatch.setattr(atexit, "register", hooks.append)
    monkeypatch.setattr(atexit, "unregister", hooks.remove)
    closing = Closing(Entrance(), [], 1.0)
    assert len(hooks) == 1 and closing._finalizer.still_active()
    closing.close(None)
    assert hooks == [] and not closing._finalizer.still_active()


def test_at_exit_a_failure_is_logged_and_not_raised(monkeypatch, caplog):
    hooks, called = [], []
    monkeypatch.setattr(atexit, "register", hooks.append)
    Closing(Entrance(), [failing(called, "a")], 7.0)
    with caplog.at_level(logging.CRITICAL):
        hooks[0]()
    assert 7.0 >= called[0][1] > 0.0
    assert "ends with a save lost" in caplog.text and "a cannot end" in caplog.text


def test_a_forked_child_ends_nothing(monkeypatch):
    called = []
    closing = Closing(Entrance(), [called.append], 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        closing.close(None)
    assert called == []
    closing.close(None)
    assert called == [None]
