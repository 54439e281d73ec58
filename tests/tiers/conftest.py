"""What the tests of tiers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiers.checkpoints import make_checkpoint
from tiers.object_server import Server, running_server


@pytest.fixture(scope="module")
def one_server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def server(one_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """An S3 server with an empty bucket, and the environment to use it."""
    one_server.reset()
    for name, value in one_server.environment.items():
        monkeypatch.setenv(name, value)
    return one_server


@pytest.fixture
def commit() -> Callable[..., Path]:
    """`make_checkpoint`."""
    return make_checkpoint
