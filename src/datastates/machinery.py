"""The moving parts of a saver, made together and taken down together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

import torch

from datastates.config import CheckpointConfig
from datastates.copier import Copier, copier_for
from datastates.events import EventLog
from datastates.fence import Fence
from datastates.flusher.client import FlusherClient, FlushFile
from datastates.host_cache import HostCache
from datastates.node_parts import NodePart
from datastates.pinner import Pinner
from datastates.stager import Stager
from datastates.staging_job import StagingJob

WOKEN_SECONDS = 5.0
"""So long a stager that has been woken may take to end: for the copy of a slab and a few messages."""

Jobs = list[StagingJob[FlushFile]]


class Machinery:
    """Owns the host cache, the flusher process, the stager, the fence and the event log of one rank."""

    def __init__(
        self,
        config: CheckpointConfig,
        events: EventLog,
        *,
        rank: int,
        world_size: int,
        on_reserved: Callable[[Future[None]], None],
        on_lost: Callable[[StagingJob[FlushFile], BaseException], None],
        verify: Callable[[Jobs], None] | None,
        node: NodePart | None = None,
    ) -> None:
        """Make the host cache and start the flusher process; see `Saver` for what blocks and what is raised.

        Args:
            config: the settings.
            events: receives event records; closed with the rest, also where making the rest fails.
            rank: this process's rank.
            world_size: number of ranks that take part in every checkpoint.
            on_reserved: called once the memory of the cache is reserved, or cannot be.
            on_lost: called with a file that cannot be staged, and why.
            verify: called when the fence closes, None if the sources are not to be read again.
            node: what this rank's node saves of each checkpoint, None where the ranks share the directory.
        """
        self.events = events
        self._config = config
        self._pinner: Pinner | None = None
        with ExitStack() as undo:
            undo.callback(events.close)
            self.cache = HostCache(config.host_cache_bytes, config.slab_nbytes)
            undo.callback(self.cache.close)
            self.client = FlusherClient(
                self.cache.descriptor,
                self.cache.nbytes,
                rank=rank,
                world_size=world_size,
                on_slab_free=self.cache.release,
                events=events,
                num_writers=config.num_writers,
                commit_timeout_seconds=config.commit_timeout_seconds,
                grace_seconds=config.grace_seconds,
                tiers=config.all_tiers,
                carry_timeout_seconds=config.carry_timeout_seconds,
                node=node,
            )
            undo.callback(self.client.close, config.close_timeout_seconds)
            self._reserved = self.client.prefault()
            self._reserved.add_done_callback(on_reserved)
            if config.pin_host_cache and torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
                self._pinner = Pinner(self.cache.memory, config.slab_nbytes, self._reserved)
                undo.callback(self._pinner.close, config.close_timeout_seconds)
            self.stager: Stager[FlushFile] = Stager(
                self.cache, self.client, events, lambda file: file.error, on_lost, self._make_copier
            )
            undo.callback(self.stager.close, config.close_timeout_seconds)
            self.fence = Fence(self.stager.copier, events, verify)
            undo.callback(self.fence.remove)
            self._prepare_cache()
            undo.pop_all()

    def free(self, timeout: float | None) -> None:
        """Let go of memory and descriptors. A stager that is stuck is woken: what it has not staged is lost."""
        self.fence.remove()
        self.cache.close()
        try:
            # a thread that is woken while the interpreter ends would take the process down with it
            self.stager.close(WOKEN_SECONDS)
        finally:
            try:
                self._unpin(timeout)
            finally:
                self.events.close()

    def _make_copier(self, device: torch.device) -> Copier:
        """The first tensor of a CUDA device has the cache pinned: before it, nothing here makes a CUDA context."""
        if device.type == "cuda" and self._pinner is not None:
            self._pinner.start(device.index)
        return copier_for(device)

    def _prepare_cache(self) -> None:
        is_patient = not self._config.fast_cache_init
        if is_patient:
            self._reserved.result(self._config.close_timeout_seconds)
        if self._pinner is None:
            return
        is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not is_in_use and not (is_patient and torch.cuda.is_available()):
            return  # the first tensor of a device will have it pinned
        self._pinner.start(torch.cuda.current_device())
        if is_patient:
            self._pinner.wait(self._config.close_timeout_seconds)

    def _unpin(self, timeout: float | None) -> None:
        if self._pinner is None:
            return
        if self.stager.is_alive:
            self._pinner.abandon()
        else:
            self._pinner.close(timeout)
