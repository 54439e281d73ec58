"""One fork server for all tests of DeepSpeed jobs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integrations.jobs import ForkServer

PRELOADED = (
    "datastates.integrations.deepspeed",
    "integrations.deepspeed_runs",
    # what DeepSpeed imports when it makes an engine, and what those import at first use
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.ops.adam",
    "torch._dynamo",
)


@pytest.fixture(scope="session")
def running_fork_server() -> Iterator[ForkServer]:
    server = ForkServer(*PRELOADED)
    yield server
    server.close()


@pytest.fixture
def fork_server(running_fork_server: ForkServer) -> Iterator[ForkServer]:
    """Starts jobs; ranks that a test leaves are killed when it ends."""
    yield running_fork_server
    running_fork_server.kill_all()


LIBRARIES = {
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "CPUAdagradBuilder": "cpu_adagrad",
    "FusedAdamBuilder": "fused_adam",
    "AsyncIOBuilder": "async_io",
}
ALWAYS_COMPILED = ("CPUAdamBuilder",)
"""The one that most offloading jobs use. The others take minutes more, and are compiled on request."""


@pytest.fixture
def need_operators(request: pytest.FixtureRequest, running_fork_server: ForkServer) -> Callable[..., None]:
    """``need_operators(*builders)``: loads compiled operators of DeepSpeed, or skips the test with the reason."""

    def need(*builders: str) -> None:
        for builder in builders:  # before any is loaded, which may take minutes
            library = LIBRARIES[builder]
            is_there = Path(os.environ["TORCH_EXTENSIONS_DIR"], library, f"{library}.so").exists()
            if not is_there and shutil.which("g++") is None:
                pytest.skip(f"{library} is not compiled, and there is no g++")
            if not is_there and builder not in ALWAYS_COMPILED and not request.config.getoption("compile_operators"):
                pytest.skip(f"{library} is not compiled yet; --compile-operators does so, it takes minutes")
        for builder in builders:
            error = running_fork_server.load_operator(builder)
            if error is not None:
                pytest.skip(f"{LIBRARIES[builder]} cannot be compiled or loaded here: {error.splitlines()[0]}")

    return need
