"""Ways to save a state, behind one face, for measurements side by side.

A way whose package is missing is left out of the report by name. Durable means the same for all: who does not fsync
gets it where a careful user would put it (after the blocking save, in the thread, in the child), inside the time.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import save as saving
import torch

State = dict[str, torch.Tensor]
FILE = "state.pt"


class Checkpointer:
    """Saves states of one process. ``save`` returns a handle for the two waits."""

    name = ""
    note = ""

    def __init__(self, cache_bytes: int) -> None:
        """Args: cache_bytes: host memory that it may stage in, where it can be told."""

    def save(self, state: State, folder: Path) -> Any:
        raise NotImplementedError

    def wait_may_change(self, handle: Any) -> None:
        """Block until the caller may change the state, as the way's own documents say."""

    def wait_written(self, handle: Any) -> None:
        """Block until the way calls the state written."""

    def load(self, folder: Path, like: State) -> State:  # noqa: ARG002 - DCP loads into what it is given
        return torch.load(folder / FILE, weights_only=True)

    def close(self) -> None:
        """Finish everything."""


class TorchSave(Checkpointer):
    name = "torch.save"
    note = "and fsync: blocks until durable"

    def save(self, state: State, folder: Path) -> None:
        save_durably(state, folder)


class Safetensors(Checkpointer):
    name = "safetensors"
    note = "save_file and fsync: blocks until durable"

    def __init__(self, cache_bytes: int) -> None:
        super().__init__(cache_bytes)
        import safetensors.torch

        self._module = safetensors.torch

    def save(self, state: State, folder: Path) -> None:
        self._module.save_file(state, folder / "state.safetensors")
        sync_folder(folder)

    def load(self, folder: Path, like: State) -> State:  # noqa: ARG002
        return self._module.load_file(folder / "state.safetensors")


class CloneAndThread(Checkpointer):
    name = "clone + thread"
    note = "clone(), then torch.save and fsync in a thread"

    def __init__(self, cache_bytes: int) -> None:
        super().__init__(cache_bytes)
        self._pool = concurrent.futures.ThreadPoolExecutor(1)

    def save(self, state: State, folder: Path) -> Any:
        copies = {name: tensor.clone() for name, tensor in state.items()}
        return self._pool.submit(save_durably, copies, folder)

    def wait_written(self, handle: Any) -> None:
        handle.result()


class Fork(Checkpointer):
    name = "fork"
    note = "the child's copy-on-write memory, torch.save and fsync there; not for processes that use CUDA"

    def save(self, state: State, folder: Path) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                save_durably(state, folder)
                code = 0
            finally:
                os._exit(code)
        return pid

    def wait_written(self, handle: int) -> None:
        if os.waitpid(handle, 0)[1] != 0:
            raise OSError("the child that saves has failed")


class Distributed(Checkpointer):
    """torch.distributed.checkpoint, without a process group."""

    name = "DCP"
    note = "dcp.save, which fsyncs its files: blocks until durable"

    def __init__(self, cache_bytes: int) -> None:
        super().__init__(cache_bytes)
        import torch.distributed.checkpoint

        warnings.filterwarnings("ignore", module="torch.distributed")
        logging.getLogger("torch.distributed").setLevel(logging.ERROR)
        self._module = torch.distributed.checkpoint

    def save(self, state: State, folder: Path) -> Any:
        self._module.save(state, storage_writer=self._module.FileSystemWriter(folder), no_dist=True)

    def load(self, folder: Path, like: State) -> State:
        state = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        self._module.load(state, storage_reader=self._module.FileSystemReader(folder), no_dist=True)
        return state


class DistributedAsync(Distributed):
    name = "DCP async"
    note = "dcp.async_save, staging buffers kept"

    def __init__(self, cache_bytes: int) -> None:
        super().__init__(cache_bytes)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)

    def save(self, state: State, folder: Path) -> Any:
        writer = self._module.FileSystemWriter(folder)
        return self._module.async_save(state, storage_writer=writer, async_stager=self._stager, no_dist=True)

    def wait_may_change(self, handle: Any) -> None:
        if hasattr(handle, "staging_completion"):
            handle.staging_completion.result()

    def wait_written(self, handle: Any) -> None:
        getattr(handle, "upload_completion", handle).result()

    def close(self) -> None:
        self._stager.close()


class Torchsnapshot(Checkpointer):
    name = "torchsnapshot"
    note = "Snapshot.async_take"

    def __init__(self, cache_bytes: int) -> None:
        super().__init__(cache_bytes)
        warnings.filterwarnings("ignore", module="torchsnapshot")
        import torchsnapshot

        self._module = torchsnapshot

    def save(self, state: State, folder: Path) -> Any:
        return self._module.Snapshot.async_take(str(folder), {"state": self._module.StateDict(**state)})

    def wait_written(self, handle: Any) -> None:
        handle.wait()

    def load(self, folder: Path, like: State) -> State:
        target = self._module.StateDict(**{name: torch.empty_like(tensor) for name, tensor in like.items()})
        self._module.Snapshot(str(folder)).restore({"state": target})
        return dict(target)


class DataStates(Checkpointer):
    name = "datastates"
    note = "lazy"

    def __init__(self, cache_bytes: int) -> None:
        super().__init__(cache_bytes)
        import datastates

        section = {"host_cache_size": cache_bytes / 2**30, "fast_cache_init": False}
        self._engine = datastates.CheckpointEngine(section, rank=0)

    def save(self, state: State, folder: Path) -> Any:
        return self._engine.save(state, str(folder / FILE))

    def wait_may_change(self, handle: Any) -> None:  # noqa: ARG002
        self._engine.wait()

    def wait_written(self, handle: Any) -> None:  # noqa: ARG002
        self._engine.wait(persist=True)

    def close(self) -> None:
        self._engine.close()


class RawWrite(Checkpointer):
    """No way to save, but the limit of the disk: as many bytes, from one reused buffer, by one writer."""

    name = "raw O_DIRECT"
    note = "one thread, blocks of 16 MiB, preallocated file; nothing of the state is read"

    def save(self, state: State, folder: Path) -> None:
        saving.raw_write(sum(tensor.nbytes for tensor in state.values()))(folder / FILE)


ALL: dict[str, Callable[[int], Checkpointer]] = {
    kind.name: kind
    for kind in (
        TorchSave,
        Safetensors,
        CloneAndThread,
        Fork,
        Distributed,
        DistributedAsync,
        Torchsnapshot,
        DataStates,
    )
}

LIMITS: dict[str, Callable[[int], Checkpointer]] = {RawWrite.name: RawWrite}


def save_durably(state: State, folder: Path) -> None:
    """torch.save, and fsync of the file and of its folder."""
    torch.save(state, folder / FILE)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """fsync everything under a folder, and the folders: what torch and safetensors leave to the caller."""
    for parent, _, names in os.walk(folder):
        for path in [*(os.path.join(parent, name) for name in names), parent]:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
