"""datastates as one of the checkpointers of a peer benchmark whose plug-ins are classes with save and two waits.

The harness imports this file and offers ``peers.Peer`` and ``peers.peer``.
"""

from __future__ import annotations

import os
from typing import Any

from peers import Peer, peer  # type: ignore[import-not-found]

import datastates
from datastates.config import CheckpointConfig
from datastates.saver import Saver

CACHE_BYTES = int(float(os.environ.get("DATASTATES_BENCH_CACHE_GIB", "2")) * 2**30)


@peer
class DataStates(Peer):  # type: ignore[misc]
    """One file per checkpoint, through the parts that `CheckpointEngine` and `Checkpointer` are made of."""

    name = "datastates"
    note = "lazy: save(), fence at the next optimizer step, durable by itself"

    def setup(self) -> None:
        config = CheckpointConfig(host_cache_bytes=CACHE_BYTES, fast_cache_init=False)
        self._saver = Saver(config, run_id=f"bench-{os.getpid()}")

    def save(self, state: dict[str, Any], path: str) -> Any:
        return self._saver.save(state, os.path.join(path, "state.pt"))

    def wait_snapshot(self, handle: Any) -> None:
        handle.staged.result()

    def wait_persist(self, handle: Any) -> None:
        handle.committed.result()

    def close(self) -> None:
        self._saver.close()

    def loaders(self) -> dict[str, Any]:
        return {"datastates.load": lambda path, like: datastates.load(os.path.join(path, "state.pt"))}  # noqa: ARG005
