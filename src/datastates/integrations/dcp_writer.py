"""A storage writer for ``torch.distributed.checkpoint`` whose ``async_save`` stops training for nothing but the fence.

DCP plans, we stage, flush and commit. ``dcp.save`` returns when the checkpoint is committed. ``dcp.async_save`` calls
`DataStatesWriter.stage`, which copies what is small and lets the fence hold the rest (`PromisedJob`), and goes on in a
thread of its own: the ranks plan there, then each submits its file, then the first one adds the metadata and commits.

Source: ``async_save`` and ``_save_state_dict`` in torch/distributed/checkpoint/state_dict_saver.py, torch 2.13: which
methods are called, in which order and on which thread, and that what they raise between ``set_up_storage_writer`` and
``finish`` reaches all ranks.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import pickle
import threading
import uuid
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from datastates.attempt import SaveHandle
from datastates.captures import Captures
from datastates.config import CheckpointConfig
from datastates.contents.distributed_metadata import METADATA_NAME, SUFFIX
from datastates.deadline import Deadline
from datastates.errors import ConfigError, DataStatesError, StateError, TornSnapshotError, WaitTimeoutError
from datastates.integrations.dcp_background import BackgroundSave, BackgroundSaves, Save, refuse_process
from datastates.integrations.dcp_file import ItemFile
from datastates.integrations.dcp_settings import Alone, config_of
from datastates.integrations.dcp_staging import StagedState, take_snapshot
from datastates.plan import FilePlan, Segment
from datastates.ranks import Ranks, agree_on_run
from datastates.saver import Saver
from datastates.state import EagerRule, IsEager

logger = logging.getLogger(__name__)

PLANNING_SECONDS = 120.0

_writers: weakref.WeakSet[DataStatesWriter] = weakref.WeakSet()


def open_writers() -> list[DataStatesWriter]:
    """The writers of this process that are open."""
    return [writer for writer in list(_writers) if writer.is_open]


class DataStatesWriter(StorageWriter, AsyncStager):
    """Writes the checkpoints of ``torch.distributed.checkpoint`` lazily, and commits each on all ranks at once.

    One writer serves any number of saves: it owns a host cache and a flusher process. All ranks of its process group
    make it together, and pass that group to ``save`` and ``async_save``, too.

    A checkpoint is a folder of ``__<rank>_0.distcp`` and ``.metadata`` as torch's own ``FileSystemWriter`` makes them:
    ``dcp.load`` reads it with torch's reader as well. Beside that are the records that make it complete
    (docs/design.md, "Commit"); ``latest`` beside the folder names the last one.

    With ``async_save`` the tensors of the state must not be changed before the fence is closed: by the next step of any
    ``torch.optim.Optimizer``, or by `wait_staged`. Its collectives run in a thread: give it a process group of its own
    (``torch.distributed.new_group(backend="gloo")``), as training's on the same group would get between them.
    Saves of one writer are made one after the other.

    What fails is raised by ``dcp.save``, or by the future of ``dcp.async_save``, on all ranks; it is in the log at
    once, and `close` raises it once more unless a later checkpoint was committed. No earlier checkpoint is harmed.

    Used by one training thread, and by DCP's. Not usable in a forked child, nor with ``AsyncCheckpointerType.PROCESS``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        host_cache_gb: float | None = None,
        config: CheckpointConfig | None = None,
        process_group: distributed.ProcessGroup | None = None,
        no_dist: bool = False,
        update_latest: bool = True,
        is_eager: IsEager | None = None,
        planning_seconds: float = PLANNING_SECONDS,
    ) -> None:
        """Make the host cache and start the flusher process. A collective, where there are several ranks.

        Args:
            path: folder of the checkpoints that are saved without a ``checkpoint_id``. That, where it is given, is the
                folder of the checkpoint itself.
            host_cache_gb: size of the host cache of this rank in gigabytes of 2**30 bytes. None: 4. As large as
                this rank's part of a checkpoint, a save never waits for storage.
            config: all settings, instead of ``host_cache_gb``.
            process_group: the ranks that save; None: all.
            no_dist: this process saves alone, also where ``torch.distributed`` is initialised: with ``no_dist=True``.
            update_latest: whether ``latest`` beside the folder of a checkpoint shall name it.
            is_eager: says of (fqn, tensor) that it may change before the fence closes, as large buffers may that a
                forward pass changes: it is copied inside of ``async_save``.
            planning_seconds: so long an optimizer's step may be held up by a save that the ranks have not planned yet,
                or that waits for an earlier one; then that save is given up.

        Raises:
            ConfigError: a setting is wrong, or has no meaning here.
            HostCacheError: the memory for the host cache is not there.
        """
        self._path = None if path is None else os.fspath(path)
        self.config = config_of(host_cache_gb, config)
        self.config.require_shared_directory("DataStatesWriter")
        self._ranks = Alone() if no_dist else Ranks(process_group)
        self._update_latest = update_latest
        self._is_eager = is_eager
        self._planning_seconds = planning_seconds
        self._saver = Saver(
            self.config,
            rank=self._ranks.rank,
            world_size=self._ranks.size,
            run_id=agree_on_run(self._ranks),
            forgiving=True,
        )
        self._local = threading.local()  # of each thread: .save, the one that it makes; .path, of the next one
        self._background = BackgroundSaves(planning_seconds)
        self._num_staged = 0
        self._torn_fqns: set[str] = set()  # of tensors that have changed before they were planned, once
        _writers.add(self)

    @property
    def is_open(self) -> bool:
        return self._saver.is_open

    @property
    def saver(self) -> Saver:
        """What saves through it: its fence, its events."""
        return self._saver

    @property
    def checkpoint_id(self) -> str | None:
        """The folder of the checkpoint that this thread saves next, or saves now."""
        return getattr(self._local, "path", None) or self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of a file system."""
        return bool(FileSystemWriter.validate_checkpoint_id(checkpoint_id))

    # ----------------------------------------------------------------- for async_save, on the training thread

    def stage(self, state_dict: dict[str, Any]) -> StagedState:
        """Hold the fence, copy what is small; returns before anything large is copied, and before the ranks plan.

        Raises nothing for what is wrong with the state: the other ranks must hear of it, too, when they plan.

        It waits for an earlier save that the ranks are still planning: two would hold more copies than they may.

        Raises:
            DataStatesError: the writer is closed; or an earlier save hangs in a collective: nothing can be saved
                through this process group any more.
        """
        self._drop_unfinished(_NOT_FINISHED)
        self._background.wait_submitted()
        self._num_staged += 1
        promise = self._saver.promise(f"asynchronous save {self._num_staged}", self._planning_seconds)
        save = self._background.add(promise)
        staged = StagedState(lambda: self._begin_background(save), lambda: refuse_process(save))
        weakref.finalize(staged, save.drop).atexit = False  # DCP may fail before it has made its thread
        try:
            rule = EagerRule(self.config.eager_bytes, self._is_volatile)
            save.snapshot = take_snapshot(state_dict, promise.captures, promise.copies, rule)
            save.must_be_staged = not save.snapshot.is_complete
            promise.mark_ready(save.snapshot.devices)
            if save.snapshot.is_independent and not self.config.verify_staging:
                promise.let_go()
        except DataStatesError as error:
            promise.fail(error)
        except BaseException as error:
            promise.fail(StateError(f"the state cannot be saved: {error}"))
            save.end()
            raise
        dict.update(staged, save.snapshot.state)
        return staged

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether more had to be copied inside of the call than ``eager_budget_bytes`` allows."""
        save = self._background.last()
        return save is not None and save.must_be_staged

    def synchronize_staging(self) -> None:
        """Block until the last save is in the host cache, or has failed."""
        save = self._background.last()
        if save is not None:
            save.promise.wait_issued(None)
            concurrent.futures.wait([save.promise.staged])

    # ---------------------------------------------------- for save, on its thread: between collectives of DCP

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The next save of this thread makes this checkpoint."""
        self._local.path = None if checkpoint_id is None else os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Begin a save: the first thing that DCP asks for, between its collectives."""
        background = getattr(self._local, "background", None)
        if background is None:
            self._background.wait_ended(Deadline(self.config.close_timeout_seconds))
            self._drop_unfinished(_NOT_FINISHED)
        path, self._local.path = self.checkpoint_id, None
        if not path:
            raise ValueError("no folder for the checkpoint: give a checkpoint_id, or a path to the writer")
        directory = os.path.abspath(path)
        tag = os.path.basename(directory)
        attempt = self._saver.begin(directory, tag, update_latest=self._update_latest, announce=False)
        self._local.save = Save(attempt, background, StorageMeta(checkpoint_id=path, save_id=uuid.uuid4().hex))
        if background is not None:
            background.save = self._local.save
            if background.error is not None:  # after the attempt was counted, as it is on the other ranks
                background.submitted.set()
                raise background.error
        return self._local.save.meta  # type: ignore[no-any-return]

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - DCP's
        """Raises ConfigError where DCP's ranks are not those of the writer."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives=False is not supported: a checkpoint is committed by all ranks together")
        rank = kwargs.get("rank")
        if rank not in (None, self._ranks.rank):
            raise ConfigError(f"this is rank {rank} of the save, and {self._ranks.rank} of the writer: {_SAME_GROUP}")
        self._local.save.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Any rank may write from here on. Raises ConfigError where DCP's ranks are not those of the writer."""
        if len(plans) != self._ranks.size:
            raise ConfigError(f"{len(plans)} ranks save, and the writer is of {self._ranks.size}: {_SAME_GROUP}")
        self._local.save.is_begun = True
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Submit this rank's file; returns before it is copied or written."""
        save: Save = self._local.save
        save.is_begun = True
        with self._giving_up(save):
            results = self._write(save, plan, planner)
            if not save.is_coordinator:
                self._commit(save)
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Submit the metadata, on the coordinator; blocks until the checkpoint is committed on all ranks.

        Raises:
            DataStatesError: it is lost; says which rank failed and why.
        """
        save: Save = self._local.save
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = save.meta
        with self._giving_up(save):
            path = os.path.join(save.attempt.path, METADATA_NAME)
            data = pickle.dumps(metadata)
            plan = FilePlan("raw", len(data), (Segment(0, len(data), data),))
            handle = self._saver.save_plan(lambda _: plan, path, attempt=save.attempt)
            self._close_verified_fence(handle)
            self._commit(save)
        save.attempt.committed.result()

    # -------------------------------------------------------------------------------------- for people

    def wait_staged(self, timeout: float | None = None) -> None:
        """Block until every save so far is in the host cache and this rank's part of it is complete, or has failed.

        From then on the state may be changed, and the death of this process does not lose it (that of all ranks, once
        this has returned on all of them).

        Raises:
            WaitTimeoutError: not reached within ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        self._drop_unfinished(_NOT_FINISHED)
        self._saver.wait_staged(timeout)
        for save in self._background.all():
            if not save.submitted.wait(deadline.left()):
                raise WaitTimeoutError(f"{save.promise.path}: not submitted within {timeout} s")
        self._saver.wait_staged(deadline.left())

    def wait_committed(self, timeout: float | None = None) -> None:
        """Block until every save so far is committed.

        Raises:
            DataStatesError: the first failure that no later checkpoint has made up for; it is raised once.
            WaitTimeoutError: not settled within ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        self._drop_unfinished(_NOT_FINISHED)
        self._background.wait_ended(deadline)
        self._saver.wait_committed(deadline.left())

    def settle(self, timeout: float | None = None) -> None:
        """Block until every save so far is committed or has failed. Raises WaitTimeoutError."""
        deadline = Deadline(timeout)
        self._drop_unfinished(_NOT_FINISHED)
        self._background.wait_ended(deadline)
        self._saver.settle(deadline.left())

    def close(self) -> None:
        """Finish all saves, free the cache, end the flusher; idempotent. Raises what `wait_committed` would."""
        deadline = Deadline(self.config.close_timeout_seconds)
        failure: DataStatesError | None = None
        if self._saver.is_open:
            try:
                self._background.wait_ended(deadline)
            except DataStatesError as error:
                failure = error
            self._drop_unfinished("the writer was closed")
        try:
            self._saver.close(deadline.left())
        except DataStatesError as error:
            failure = failure or error
        _writers.discard(self)
        if failure is not None:
            raise failure

    def __enter__(self) -> DataStatesWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except DataStatesError as failure:  # the first error is the one to be told
            logger.error("datastates: closing after an error: %s", failure)

    # ------------------------------------------------------------------------------------------- inside

    def _is_volatile(self, fqn: str, tensor: torch.Tensor) -> bool:
        if fqn in self._torn_fqns or fqn in self._saver.torn_fqns:
            return True
        return self._is_eager is not None and self._is_eager(fqn, tensor)

    def _write(self, save: Save, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Submit the items of this rank as one file, objects and small tensors first."""
        background = save.background
        promise = None if background is None else background.promise
        if promise is not None and promise.error is not None:
            raise promise.error
        if not plan.items:
            if promise is not None:
                promise.finish(None)
            return []
        name = f"__{self._ranks.rank}_0{SUFFIX}"
        path = os.path.join(save.attempt.path, name)
        file = ItemFile(path, plan.items, planner, background)

        def make_plan(captures: Captures) -> FilePlan:
            return file.plan(captures, self.config.eager_bytes)

        handle = self._saver.save_plan(make_plan, path, attempt=save.attempt, promise=promise)
        self._close_verified_fence(handle)
        return file.results

    def _close_verified_fence(self, handle: SaveHandle) -> None:
        """With ``verify_staging``: read the sources again now, or nobody would before the commit is waited for."""
        if self.config.verify_staging:
            concurrent.futures.wait([handle.staged])
            self._saver.fence.close()

    def _commit(self, save: Save) -> None:
        self._saver.commit(save.attempt)
        save.is_requested = True
        if save.background is not None:
            save.background.submitted.set()

    @contextlib.contextmanager
    def _giving_up(self, save: Save) -> Iterator[None]:
        """Give the save up on all ranks where the body fails."""
        try:
            yield
        except BaseException as error:
            if save.background is not None:
                save.background.promise.fail(error)
                save.background.submitted.set()
            if isinstance(error, TornSnapshotError):
                self._torn_fqns |= set(error.fqns)
            self._abort(save, f"{type(error).__name__}: {error}")
            raise

    def _abort(self, save: Save, cause: str) -> None:
        if save.is_begun and not save.is_requested:
            save.is_requested = True
            self._saver.abort(save.attempt, cause)

    def _drop_unfinished(self, cause: str) -> None:
        """Give up what this thread has begun and DCP has not finished: another rank has failed."""
        save, self._local.save = getattr(self._local, "save", None), None
        if save is not None:
            self._abort(save, cause)

    def _begin_background(self, save: BackgroundSave) -> None:
        """DCP's thread has got the state: wait for the save before, and see when the thread ends."""
        if not save.begun.is_set():
            self._local.background = save
            save.begin(self._end_background)
            save.wait_before(Deadline(self.config.close_timeout_seconds), self._planning_seconds)

    def _end_background(self, save: BackgroundSave) -> None:
        """DCP's thread has ended, and the save with it, one way or the other."""
        if save.save is not None:
            try:
                self._abort(save.save, _NOT_FINISHED)
            except DataStatesError as error:  # closed meanwhile: what was not complete is given up by that
                logger.warning("datastates: %s", error)


_NOT_FINISHED = "DCP did not finish it: another rank failed, or the process group"
_SAME_GROUP = "give the same process_group, or no_dist, to both"
