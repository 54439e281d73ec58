"""Storage that does not answer: every wait ends in time and says for what, and nothing is lost once it answers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from datastates.checkpoint_engine import CheckpointEngine
from datastates.errors import WaitTimeoutError
from datastates.flusher.client import FlusherClient
from datastates.integrity import verify
from datastates.manifest import read_latest
from flusher.rig import eventually, faulty

CALLS = [
    {"call": "open", "only": ".datastates.partial"},
    {"call": "posix_fallocate"},
    {"call": "pwrite", "only": ".datastates.partial"},
    {"call": "fsync", "only": ".datastates.partial"},
    {"call": "mkdir"},
    {"call": "flock"},
    {"call": "replace", "only": ".datastates.partial"},
    {"call": "replace", "only": "latest"},
    {"call": "read", "only": "rank-00000.json"},
]


class Stall:
    """Calls that hang in the flusher until the gate is opened."""

    def __init__(self, folder: Path, rule: dict[str, Any]) -> None:
        self._rules = folder / "rules"
        self._gate = folder / "gate"
        self._met = folder / "met"
        os.mkfifo(self._gate)
        rule = rule | {"then": "hold", "gate": str(self._gate), "met": str(self._met)}
        self._rules.write_text(json.dumps([rule]))

    @property
    def command(self) -> tuple[str, ...]:
        return faulty(str(self._rules))

    def wait_held(self) -> None:
        eventually(self._met.exists, "the call hangs")

    def open(self) -> None:
        """Let the calls go on that hang now, and all that follow."""
        new = self._rules.with_name("new-rules")
        new.write_text("[]")
        new.replace(self._rules)
        # for good: a writer is there, so no reader waits any more
        self._writer = os.open(self._gate, os.O_RDWR)

    def close(self) -> None:
        os.close(self._writer)


@pytest.fixture
def make_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[CheckpointEngine, Stall]]]:
    """``make_stalled(rule, **settings)``: an engine of which the flusher hangs in a call, and the gate before it."""
    made: list[tuple[CheckpointEngine, Stall]] = []

    def make(rule: dict[str, Any], **settings: Any) -> tuple[CheckpointEngine, Stall]:
        stall = Stall(tmp_path, rule)
        defaults = FlusherClient.__init__.__kwdefaults__
        monkeypatch.setitem(defaults, "command", stall.command)
        section = {"host_cache_size": 8 / 1024, "slab_bytes": 1 << 20, **settings}
        made.append((CheckpointEngine({"datastates_ckpt": section}), stall))
        return made[-1]

    yield make
    for engine, stall in made:
        stall.open()
        with contextlib.suppress(WaitTimeoutError):  # a test may have closed it in vain
            engine.close()
        stall.close()


def save(engine: CheckpointEngine, root: Path, tag: str, value: int) -> None:
    with engine.checkpoint(str(root / tag), tag):
        engine.save({"w": torch.full((1 << 18,), value)}, str(root / tag / "w.pt"))


@pytest.mark.parametrize("rule", CALLS, ids=lambda rule: "-".join(rule.values()))
def test_waits_end_and_nothing_is_lost(tmp_path: Path, make_stalled: Any, rule: dict[str, str]) -> None:
    engine, stall = make_stalled(rule)
    root = tmp_path / "root"
    save(engine, root, "s1", 1)
    stall.wait_held()
    with pytest.raises(WaitTimeoutError, match="s1: not committed"):
        engine.wait(persist=True, timeout=0.05)
    save(engine, root, "s2", 2)
    engine.wait(timeout=20)  # it is staged
    assert read_latest(str(root)) is None
    stall.open()
    engine.wait(persist=True, timeout=20)
    for tag, value in (("s1", 1), ("s2", 2)):
        assert verify(str(root / tag)) == []
        assert torch.equal(engine.load(str(root / tag / "w.pt"))["w"], torch.full((1 << 18,), value))
    assert read_latest(str(root)) == "s2"


def test_a_state_larger_than_the_cache_waits_in_the_cache(tmp_path: Path, make_stalled: Any) -> None:
    engine, stall = make_stalled({"call": "pwrite"})
    path = tmp_path / "root" / "w.pt"
    state = {"w": torch.arange(5 << 20)}  # 40 MiB through 8
    engine.save(state, str(path))
    stall.wait_held()
    with pytest.raises(WaitTimeoutError, match=r"w\.pt: not staged|not copied|fence"):
        engine.wait(timeout=0.05)
    stall.open()
    engine.wait(persist=True, timeout=20)
    assert torch.equal(engine.load(str(path))["w"], state["w"])


def test_close_ends_in_time_and_the_flusher_goes_on(tmp_path: Path, make_stalled: Any) -> None:
    engine, stall = make_stalled({"call": "fsync", "only": ".datastates.partial"}, close_timeout_seconds=0.05)
    root = tmp_path / "root"
    save(engine, root, "s1", 1)
    engine.wait(timeout=20)
    stall.wait_held()
    with pytest.raises(WaitTimeoutError):
        engine.close()
    stall.open()
    eventually(lambda: read_latest(str(root)) == "s1", "the flusher commits")
    assert verify(str(root / "s1")) == []
