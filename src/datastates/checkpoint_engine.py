"""The checkpoint engine that DeepSpeed imports, usable without DeepSpeed, too.

An unmodified DeepSpeed with a ``datastates_ckpt`` section in its config does
``from datastates import CheckpointEngine`` and calls ``CheckpointEngine(deepspeed_config, rank)``. What its
adapter lacks is repaired by `datastates.integrations.deepspeed` at that moment.
"""

from __future__ import annotations

import importlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import distributed

from datastates import reader, recovery
from datastates.attempt import Attempt
from datastates.attempt_folder import checkpoint_of
from datastates.config import SECTION, CheckpointConfig
from datastates.errors import CheckpointNotFoundError, CommitError, ConfigError, CorruptCheckpointError
from datastates.fence import Fence
from datastates.fqns import listed
from datastates.paths import resolved
from datastates.saver import Saver, open_savers
from datastates.state import IsEager

MAX_RANKS = 10**7
"""More ranks than any machine has; a larger number is a mistake."""

_TAGS_SHOWN = 8


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
        self.eager_rule: Callable[[object], IsEager] | None = None
        """Gives the ``is_eager`` for a state that is saved without one; set by an integration that knows its states."""
        if from_deepspeed:
            # not at the top of this module: they import DeepSpeed, which need not be there
            for name in ("deepspeed", "huggingface"):
                importlib.import_module(f"datastates.integrations.{name}").repair()
            importlib.import_module("datastates.integrations.deepspeed").announce(config)

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
        if is_eager is None and self.eager_rule is not None:
            is_eager = self.eager_rule(state_dict)
        handle = self._saver.save(state_dict, path, attempt=attempt, is_eager=is_eager)
        return handle.nbytes > 0

    def save_file(self, source: str, path: str) -> None:
        """Save what a file holds as another file, byte for byte; otherwise as `save`.

        The source is read in the background. It must not be written to before the fence is closed; deleting it, or
        replacing it by another, does no harm.

        Raises:
            StorageError: the source cannot be read; nothing was written.
            DataStatesError: as `save`.
        """
        attempt = getattr(self._open, "attempt", None)
        if attempt is None:
            self._saver.raise_failure()
        self._saver.save_file(source, path, attempt=attempt)

    def load(self, path: str, map_location: reader.MapLocation = None) -> Any:
        """Load a file, written by this package or by ``torch.save`` or safetensors.

        Waits first for saves in flight, of all engines of this process: until they are copied (loading overwrites the
        state), and until they are settled where this file may be among them. Executes what is pickled in the file, as
        DeepSpeed expects: load only files you trust.

        Raises:
            CheckpointNotFoundError: there is no such file, or the checkpoint it belongs to was never completed.
            CorruptCheckpointError: its structure or size is wrong.
            DataStatesError: the save of this file that was in flight is lost; what is there is older.
        """
        for saver in open_savers():
            saver.wait_staged()
            saver.wait_for(path)
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
        skip, dropped, refusal = self._agree(directory, tag)
        self._saver.drop(dropped, f"{directory} was saved")
        attempt = self._saver.begin(directory, tag, update_latest=update_latest, skip=skip, refusal=refusal)
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

    def _agree(self, directory: str, tag: str) -> tuple[bool, list[str], CommitError | None]:
        """Whether to skip the next checkpoint, the attempts to drop for it, why not to save at all: as on all ranks.

        DeepSpeed checks by itself that the ranks use one tag, and may be told to go on if not. No rank must wait then
        for parts of a checkpoint that the others do not make.
        """
        policy = self.config.when_busy
        if policy == "queue" and not self._is_forgiving:
            return False, [], None
        known = _gather((tag, self._saver.is_busy, self._saver.waiting))
        tags = [other for other, _, _ in known]
        if len(set(tags)) > 1:
            named = {rank: f"it saves {other!r}" for rank, other in enumerate(tags)}
            shown = listed([f"rank {rank} {other!r}" for rank, other in enumerate(tags)], _TAGS_SHOWN)
            message = f"{directory}: nothing is saved, since the ranks save different checkpoints: {shown}"
            return False, [], CommitError(message, named, tag)
        return policy == "skip" and any(busy for _, busy, _ in known), known[0][2] if policy == "replace" else [], None


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
    directory = checkpoint_of(path)
    if directory is None:
        return
    record = recovery.committed_record(directory)
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
