"""Ways to save a training's state from a device, each as one asks for it at its best: what the GPU check compares."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import datastates


class Way:
    """How to save: `save` starts it, `hold` returns when the state may change, `finish` when all is durable."""

    name = ""

    def __init__(self, folder: Path, host_cache_gb: float) -> None:
        self.folder = folder
        self.host_cache_gb = host_cache_gb

    def save(self, state: dict[str, Any], number: int) -> None:
        raise NotImplementedError

    def hold(self) -> None:
        """Nothing to wait for where `save` does it all."""

    def finish(self) -> None:
        """Nothing to wait for where `save` does it all."""

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class TorchSave(Way):
    name = "torch.save + fsync"

    def save(self, state: dict[str, Any], number: int) -> None:
        path = self.folder / f"{number % 2}.pt"
        torch.save(state, path)
        sync(path)


class DcpAsync(Way):
    """``async_save`` with pinned staging memory, kept where torch can, a stream for the copies, a writing thread."""

    name = "DCP async, pinned"

    def __init__(self, folder: Path, host_cache_gb: float) -> None:
        super().__init__(folder, host_cache_gb)
        is_cuda = torch.cuda.is_available()
        self._options = StagingOptions(is_cuda, False, is_cuda, is_cuda)
        self._stager = DefaultStager(self._options)
        self._response: Any = None

    def save(self, state: dict[str, Any], number: int) -> None:
        self.finish()  # a second save over the same staging memory
        if not self._stager._state_dict_stager._deepcopy_dispatch:  # torch 2.11 empties it: a stager serves once there
            self._stager.close()
            self._stager = DefaultStager(self._options)
        writer = checkpoint.FileSystemWriter(str(self.folder / str(number % 2)), sync_files=True, overwrite=True)
        self._response = checkpoint.async_save(state, storage_writer=writer, async_stager=self._stager, no_dist=True)

    def hold(self) -> None:
        if hasattr(self._response, "staging_completion"):
            self._response.staging_completion.result()

    def finish(self) -> None:
        if self._response is not None:
            future = getattr(self._response, "upload_completion", self._response)
            future.result()
            self._response = None

    def close(self) -> None:
        self.finish()
        self._stager.close()
        super().close()


class DataStates(Way):
    """The fence closes by itself before the optimizer's step; `hold` closes it to have its time apart."""

    name = "datastates"

    def __init__(self, folder: Path, host_cache_gb: float) -> None:
        super().__init__(folder, host_cache_gb)
        settings = {"host_cache_size": host_cache_gb, "fast_cache_init": False}
        self._engine = datastates.CheckpointEngine(settings, rank=0)

    def save(self, state: dict[str, Any], number: int) -> None:
        self._engine.save(state, str(self.folder / f"{number % 2}.pt"))

    def hold(self) -> None:
        self._engine.fence.close()

    def finish(self) -> None:
        self._engine.wait(persist=True)

    def close(self) -> None:
        self._engine.close()
        super().close()


ALL: tuple[Callable[[Path, float], Way], ...] = (TorchSave, DcpAsync, DataStates)


def sync(path: Path) -> None:
    """Make a file and its name durable."""
    for target in (path, path.parent):
        descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
