"""The checkpoint engine that DeepSpeed imports, usable without DeepSpeed, too.

An unmodified DeepSpeed with a ``datastates_ckpt`` section in its config does
``from datastates import CheckpointEngine`` and calls ``CheckpointEngine(deepspeed_config, rank)``. What its
adapter lacks is repaired by `datastates.integrations.deepspeed` at that moment.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from datastates import reader, recovery
from datastates.attempt import Attempt
from datastates.attempt_folder import checkpoint_of
from datastates.config import SECTION, CheckpointConfig
from datastates.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, TopologyError
from datastates.fence import Fence
from datastates.manifest import read_commit
from datastates.node_parts import ranges_of
from datastates.nodes.grouping import agree_on_nodes
from datastates.paths import resolved
from datastates.ranks import Ranks, agree_on_run, is_initialized
from datastates.saver import Saver, open_savers
from datastates.state import IsEager
from datastates.when_busy import Start, agree_on_start
from datastates.whole_records import doubt

NODE_STORAGE = (
    f"{SECTION}.shared_directory is false, so each node must have all files that its ranks load: add"
    ' {"checkpoint": {"use_node_local_storage": true}} to DeepSpeed\'s config'
)
"""With that setting the first rank of each node saves what otherwise rank 0 alone does.

Source: deepspeed 0.19.8, runtime/engine.py, and runtime/config.py for the attribute of that name.
"""

MAX_RANKS = 10**7
"""More ranks than any machine has; a larger number is a mistake."""


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
        self._ranks = Ranks()
        run_id = agree_on_run(self._ranks)
        self.nodes = agree_on_nodes(self._ranks, config, run_id)
        """Those of the job, where they share no directory; None where they do, or there is one."""
        if self.nodes is not None and not getattr(deepspeed_config, "use_node_local_storage", True):
            raise ConfigError(NODE_STORAGE)
        self._saver = Saver(
            config,
            rank=_check_rank(rank, self._ranks),
            world_size=self._ranks.size,
            run_id=run_id,
            forgiving=from_deepspeed,
            nodes=self.nodes,
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
            TopologyError: the file is on another node.
            DataStatesError: the save of this file that was in flight is lost; what is there is older.
        """
        for saver in open_savers():
            saver.wait_staged()
            saver.wait_for(path)
        check_committed(path)
        check_on_this_node(path)
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

    def wait_carried(self, timeout: float | None = None) -> None:
        """Block until every checkpoint so far is committed in all ``tiers``; also after `close`.

        Raises:
            DataStatesError: as `wait` with ``persist``.
            WaitTimeoutError: not done within ``timeout`` seconds; names what is not.
        """
        self._saver.wait_carried(timeout)

    def close(self) -> None:
        """Finish all saves, then free the cache and end the flusher; idempotent. Raises what `wait` would.

        Where there are ``tiers``, the flusher goes on carrying for ``carry_timeout_seconds``; that is not waited for.
        """
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
            directory: the checkpoint's folder; all files saved inside lie in it. The ranks share it, or with
                ``shared_directory`` off those of a node do.
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
        start = self._agree(directory, tag)
        attempt = self._saver.begin(
            directory, tag, update_latest=update_latest, skip=start.is_skipped, refusal=start.refusal
        )
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

    def _agree(self, directory: str, tag: str) -> Start:
        """DeepSpeed checks by itself that the ranks use one tag, and may be told to go on if not: then all are asked.

        In other jobs a mistake ends in an error that names the ranks, at the price of ``commit_timeout_seconds``.
        """
        if self.config.when_busy == "queue" and not self._is_forgiving:
            return Start()
        return agree_on_start(self._saver, self._ranks, directory, tag, self.config.when_busy)


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
    problem = doubt(directory, record)
    if problem:
        raise CheckpointNotFoundError(f"{directory} is not loaded: {problem}")
    expected = record.file_nbytes.get(os.path.relpath(path, directory))
    if expected is None or not os.path.exists(path):
        return
    found = os.path.getsize(path)
    if found != expected:
        raise CorruptCheckpointError(f"{path}: {found} bytes found, {expected} expected by its manifest", path)


def check_on_this_node(path: str) -> None:
    """Raise TopologyError where a file is missing, and its folder holds one node's part of a checkpoint."""
    directory = None if os.path.exists(path) else checkpoint_of(resolved(path))
    record = None if directory is None else read_commit(directory)
    if record is not None and record.node is not None:
        nodes = ", ".join(f"{record.node.described(index)}" for index in range(record.node.num_nodes))
        raise TopologyError(
            f"{path} is not here: {directory} is the {record.node}, with the files of ranks"
            f" {ranges_of(record.node.ranks)}; it was saved on {nodes}: start each rank where its files are"
        )


def _section(deepspeed_config: object) -> Any:
    """The ``datastates_ckpt`` section, from any of the forms that the constructor takes."""
    if isinstance(deepspeed_config, Mapping):
        return deepspeed_config.get(SECTION, deepspeed_config)
    settings = getattr(deepspeed_config, "datastates_config", None)
    return deepspeed_config if settings is None else settings.config


def _check_rank(rank: int | None, ranks: Ranks) -> int:
    if not is_initialized():
        if rank is not None and not (isinstance(rank, int) and 0 <= rank < MAX_RANKS):
            raise ConfigError(f"rank is {rank!r}, expected a number from 0")
        return rank or 0
    if rank not in (None, ranks.rank):
        raise ConfigError(f"rank is {rank}, but torch.distributed says that this process is rank {ranks.rank}")
    return ranks.rank
