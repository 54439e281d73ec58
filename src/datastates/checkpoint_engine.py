"""The checkpoint engine that DeepSpeed imports, usable without DeepSpeed, too.

An unmodified DeepSpeed with a ``datastates_ckpt`` section in its config does
``from datastates import CheckpointEngine`` and calls ``CheckpointEngine(deepspeed_config, rank)``. What its
adapter lacks is repaired by `datastates.integrations.deepspeed` at that moment.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import distributed

from datastates import manifest, reader, recovery
from datastates.attempt import Attempt
from datastates.attempt_folder import MAX_DEPTH, has_attempts
from datastates.config import SECTION, CheckpointConfig
from datastates.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from datastates.fence import Fence
from datastates.paths import resolved
from datastates.saver import Saver
from datastates.state import IsEager

MAX_RANKS = 10**7
"""More ranks than any machine has; a larger number is a mistake."""

RECOVERY_SECONDS = 10.0
"""So long a load waits for another process that is completing the same commit."""


class CheckpointEngine:
    """Saves and loads single files lazily, or whole checkpoints of all ranks.

    ``save`` returns at once. Python objects and small tensors are copied before it returns; large tensors must not
    change until the fence is closed: by the next step of any ``torch.optim.Optimizer``, or by `wait`. A file
    appears under its name when it is complete and durable, never before.

    Thread safe, as far as the state itself is. Not usable in a forked child.
    """

    def __init__(self, deepspeed_config: object, rank: int | None = None) -> None:
        """Make the host cache and start the flusher process.

        Args:
            deepspeed_config: DeepSpeed's own config object, or a plain mapping: the section itself
                (``{"host_cache_size": 1}``) or a DeepSpeed config that holds it.
            rank: global rank of this process; None: as ``torch.distributed`` says, 0 without it. Where that is
                initialised all its ranks must make their engines together: they agree on an id of the run here.

        Raises:
            ConfigError: a setting is unknown or wrong, or the rank is not this process's.
            HostCacheError: the memory for the host cache is not there.
        """
        from_deepspeed = hasattr(deepspeed_config, "datastates_config")
        config = CheckpointConfig.from_section(_section(deepspeed_config))
        self.config = config
        self._is_forgiving = from_deepspeed
        world_size, run_id = _agree_on_run()
        self._saver = Saver(
            config, rank=_check_rank(rank), world_size=world_size, run_id=run_id, forgiving=from_deepspeed
        )
        self._open = threading.local()  # .attempt: the checkpoint that this thread is in
        if from_deepspeed:
            # not at the top of this module: it imports DeepSpeed, which need not be there
            integration = importlib.import_module("datastates.integrations.deepspeed")
            integration.repair()
            integration.announce(config)

    @property
    def fence(self) -> Fence:
        return self._saver.fence

    @property
    def saver(self) -> Saver:
        return self._saver

    def save(self, state_dict: object, path: str, *, is_eager: IsEager | None = None) -> bool:
        """Save a state to a file; returns before the bytes are written.

        Returns False when nothing is saved because earlier saves are in flight and ``when_busy`` is ``"skip"``.

        Args:
            state_dict: nested containers of tensors and Python objects; see `CheckpointEngine` for who may change
                what until when.
            path: the file. ``*.safetensors`` is written in that format, all else as ``torch.load`` reads it, unless
                the config names a format for all.
            is_eager: says of (fqn, tensor) that it may change before the fence closes; it is copied at once then.

        Raises:
            StateError: the state cannot be saved; nothing was written.
            DataStatesError: outside of `checkpoint`: an earlier save has failed in the background, and nobody has been
                told. This save is not made then.
        """
        attempt = getattr(self._open, "attempt", None)
        if attempt is None:
            self._saver.raise_failure()
        handle = self._saver.save(state_dict, path, attempt=attempt, is_eager=is_eager)
        return handle.nbytes > 0

    def load(self, path: str, map_location: reader.MapLocation = None) -> Any:
        """Load a file, written by this package or by ``torch.save`` or safetensors.

        Waits first for saves in flight: until they are copied (loading overwrites the state), and until they are
        settled where this file may be among them. Executes what is pickled in the file, as DeepSpeed expects:
        load only files you trust.

        Raises:
            CheckpointNotFoundError: there is no such file, or the checkpoint it belongs to was never completed.
            CorruptCheckpointError: its structure or size is wrong.
            DataStatesError: the save of this file that was in flight is lost; what is there is older.
        """
        if self._saver.is_open:
            self._saver.wait_staged()
            self._saver.wait_for(path)
        check_committed(path)
        return reader.load(path, map_location, weights_only=False)

    def wait(self, persist: bool = False, timeout: float | None = None) -> bool:
        """Block until everything saved so far is copied to the host cache or, with ``persist``, durable and visible.

        Raises:
            DataStatesError: with ``persist``: the first failure that has not been raised yet.
            WaitTimeoutError: not done within ``timeout`` seconds.
        """
        if not self._saver.is_open:
            return True
        if persist:
            self._saver.wait_committed(timeout)
        else:
            self._saver.wait_staged(timeout)
        return True

    def close(self) -> None:
        """Finish all saves, then free the cache and end the flusher; idempotent. Raises what `wait` would."""
        self._saver.close(self.config.close_timeout_seconds)

    def __enter__(self) -> CheckpointEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def checkpoint(self, directory: str, tag: str, *, update_latest: bool = True) -> Iterator[Attempt]:
        """Files saved inside belong to one checkpoint of all ranks: all of it becomes visible together.

        Every rank enters, in the same order, also one that saves nothing. Leaving does not block. An exception
        inside drops the checkpoint, and the other ranks learn of it.

        Args:
            directory: the checkpoint's folder; all files saved inside lie in it. The ranks share it.
            tag: what ``latest`` beside the folder shall say.
            update_latest: whether to write ``latest`` once the checkpoint is committed.

        Raises:
            ValueError: this thread is inside of another checkpoint.
            DataStatesError: an earlier save has failed in the background, and nobody has been told (not in DeepSpeed,
                where raising on one rank would hang the others: there the log says so, and `close` unless a later
                checkpoint was committed).
        """
        if getattr(self._open, "attempt", None) is not None:
            raise ValueError(f"{directory}: a checkpoint is open already, they cannot be nested")
        skip, dropped = self._agree_on_busy()
        self._saver.drop(dropped, f"{directory} was saved")
        attempt = self._saver.begin(directory, tag, update_latest=update_latest, skip=skip)
        self._open.attempt = attempt
        try:
            if not self._is_forgiving:
                self._saver.raise_failure()  # here, so that the other ranks learn that this one does not take part
            yield attempt
            self._open.attempt = None
            self._saver.commit(attempt)
        except BaseException as error:
            self._saver.abort(attempt, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._open.attempt = None

    def _agree_on_busy(self) -> tuple[bool, list[str]]:
        """Whether to skip the next checkpoint, and the attempts to drop for it: the same on all ranks."""
        policy = self.config.when_busy
        if policy == "skip":
            return any(_gather(self._saver.is_busy)), []
        return False, _gather(self._saver.waiting)[0] if policy == "replace" else []


def _gather(value: Any) -> list[Any]:
    """The value of every rank. With ``torch.distributed`` initialised a collective on the calling thread."""
    num_ranks = _num_ranks()
    if num_ranks == 1:
        return [value]
    values: list[Any] = [None] * num_ranks
    distributed.all_gather_object(values, value)
    return values


def check_committed(path: str) -> None:
    """Raise unless a file is part of a committed checkpoint, or belongs to none of this package's.

    An interrupted commit is completed first where that is possible: this may write to the checkpoint's folder.

    Raises:
        CheckpointNotFoundError: its folder holds a checkpoint that was never completed, or one that no longer has the
            file.
        CorruptCheckpointError: the file's size is not what the checkpoint's manifest says.
    """
    path = resolved(path)
    directory = _checkpoint_of(path)
    if directory is None:
        return
    record = _committed(directory)
    if record is None:
        raise CheckpointNotFoundError(
            f"{directory} holds a checkpoint that was never completed; load another one (its folder may be deleted)"
        )
    expected = record.file_nbytes.get(os.path.relpath(path, directory))
    if expected is None or not os.path.exists(path):
        return
    found = os.path.getsize(path)
    if found != expected:
        raise CorruptCheckpointError(f"{path}: {found} bytes found, {expected} expected by its manifest", path)


def _checkpoint_of(path: str) -> str | None:
    """The folder of the checkpoint that a file may belong to."""
    directory = os.path.dirname(path)
    for _ in range(MAX_DEPTH):
        if has_attempts(directory):
            return directory
        directory = os.path.dirname(directory)
    return None


def _committed(directory: str) -> manifest.CommitRecord | None:
    """The commit record, after completing an interrupted commit; waits while another process does so."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while (record := manifest.read_commit(directory)) is None:
        found = recovery.recover(directory)
        if found is not recovery.Recovery.OWNED or time.monotonic() > deadline:
            return manifest.read_commit(directory)
        time.sleep(0.05)
    return record


def _section(deepspeed_config: object) -> Any:
    """The ``datastates_ckpt`` section, from any of the forms that the constructor takes."""
    if isinstance(deepspeed_config, Mapping):
        return deepspeed_config.get(SECTION, deepspeed_config)
    settings = getattr(deepspeed_config, "datastates_config", None)
    return deepspeed_config if settings is None else settings.config


def _check_rank(rank: int | None) -> int:
    if not _is_distributed():
        if rank is not None and not (isinstance(rank, int) and 0 <= rank < MAX_RANKS):
            raise ConfigError(f"rank is {rank!r}, expected a number from 0")
        return rank or 0
    own = int(distributed.get_rank())
    if rank not in (None, own):
        raise ConfigError(f"rank is {rank}, but torch.distributed says that this process is rank {own}")
    return own


def _agree_on_run() -> tuple[int, str]:
    """World size and an id that all ranks share and no other run has."""
    shared, num_ranks = [uuid.uuid4().hex[:12]], _num_ranks()
    if num_ranks > 1:
        distributed.broadcast_object_list(shared, src=0)
    return num_ranks, shared[0]


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _num_ranks() -> int:
    return int(distributed.get_world_size()) if _is_distributed() else 1
