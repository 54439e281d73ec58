"""The whole life of a save: plan, stage, flush, commit.

A `Saver` belongs to one rank. It owns the parts that move bytes (`machinery`), and knows two kinds of saves:
a *checkpoint* (files of several ranks that become visible together) and a *lone file*. It has each file planned
(`state_planner`), staged (`staging`) and made visible (`commit_requests`); what it has in flight is waited for as
`in_flight` says.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from datastates.attempt import Attempt, SaveHandle
from datastates.attempt_names import AttemptNames
from datastates.captures import Captures, EagerBudget
from datastates.closing import Closing
from datastates.commit_requests import CommitRequests
from datastates.config import CheckpointConfig
from datastates.entrance import Entrance
from datastates.errors import CommitError
from datastates.events import Listener, now
from datastates.flusher.client import CommitResult
from datastates.in_flight import SavesInFlight
from datastates.machinery import Machinery
from datastates.nodes.following import Following
from datastates.nodes.grouping import Nodes
from datastates.outcomes import Outcomes
from datastates.paths import check_target, resolved
from datastates.plan import FilePlan
from datastates.promised_job import PromisedJob
from datastates.reporting import Reporting
from datastates.side_files import plan_side_file
from datastates.staging import Staging
from datastates.state import IsEager
from datastates.state_planner import StatePlanner
from datastates.tier_settings import TierSettings
from datastates.tiers.store import check_installed
from datastates.tiers.watch import CarryWatch

_living: list[weakref.ref[Saver]] = []
"""Every saver that this process has made and not let go of, oldest first; what one saves another may be asked to load.

A list, since it is read while other threads append to it, also in signal handlers and forked children: no lock.
"""


def open_savers() -> list[Saver]:
    """The savers of this process that are open: a load has to look at what all of them have in flight."""
    return [saver for found in list(_living) if (saver := found()) is not None and saver.is_open]


class Saver(SavesInFlight):
    """Saves states of one rank lazily. Thread safe; refuses to work in a forked child."""

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        run_id: str,
        listener: Listener | None = None,
        forgiving: bool = False,
        nodes: Nodes | None = None,
    ) -> None:
        """Make the host cache and start the flusher process; blocks for some milliseconds.

        With ``fast_cache_init`` off it blocks until the cache's memory is really reserved. Where CUDA is in use
        the cache is pinned in the background.

        Args:
            config: the settings.
            rank: this process's rank.
            world_size: number of ranks that take part in every checkpoint.
            run_id: equal on all ranks of this run, unlike in any other run.
            listener: receives event records, see `EventLog.add`.
            forgiving: a checkpoint that commits makes up for earlier failures: these are in the log, but are not
                raised any more.
            nodes: those of the job, where ``shared_directory`` is off and there are several.

        Raises:
            ConfigError: a tier needs a library that is not installed.
            HostCacheError: the memory is not there.
            StorageError: with ``fast_cache_init`` off: it cannot be reserved.
            FlusherDiedError: the flusher process does not start.
        """
        self._config = config
        self._names = AttemptNames(run_id, rank)
        self._planner = StatePlanner(config)
        self._budget = EagerBudget(config.eager_budget_bytes)
        check_installed(config.all_tiers)
        following: Following | None = None
        if nodes is not None:
            following = Following(nodes.part, rank, nodes.store, config.commit_timeout_seconds)
        entrance, carry_watch = Entrance(), CarryWatch(config.all_tiers)
        reporting = Reporting(config, rank, listener)
        self.events, self._commit_log = reporting.events, reporting.commit_log
        outcomes = Outcomes(self.events, self._note_committed, forgiving)
        is_verified = config.verify_staging
        # what is called back about files is so after the first save, when `_requests` is there
        self._machinery = machinery = Machinery(
            config,
            self.events,
            rank=rank,
            world_size=world_size,
            on_reserved=lambda done: _note_reserved(done, entrance, outcomes),
            on_lost=lambda job, error: self._requests.lose(job, error),
            verify=(lambda jobs: self._requests.verify(jobs)) if is_verified else None,
            node=None if nodes is None else nodes.part,
        )
        self._cache, self._client = machinery.cache, machinery.client
        self._stager, self.fence = machinery.stager, machinery.fence
        requests = CommitRequests(
            self._client, self.fence, outcomes, rank=rank, following=following, is_verified=is_verified
        )
        staging = Staging(machinery, requests, is_verified=is_verified)
        super().__init__(entrance, staging, requests, outcomes, carry_watch)
        _living.append(weakref.ref(self, _living.remove))
        ends = (self._stager.close, self.wait_committed, requests.close, self._client.close, machinery.free)
        self._closing = Closing(entrance, ends, config.close_timeout_seconds)

    @property
    def flusher_pid(self) -> int:
        return self._client.pid

    @property
    def tiers(self) -> tuple[TierSettings, ...]:
        """Where checkpoints are carried to, the directory that they are saved in first; empty: nowhere."""
        return self._config.all_tiers

    def begin(
        self,
        directory: str,
        tag: str,
        *,
        update_latest: bool,
        skip: bool = False,
        refusal: CommitError | None = None,
        announce: bool = True,
    ) -> Attempt:
        """Begin a checkpoint of all ranks in ``directory``. Every rank calls it, with the same tag.

        Whatever then keeps this rank from completing its part, `abort` tells the others, who would wait for it; if this
        process dies before, its flusher tells them.

        Args:
            directory: the checkpoint's folder.
            tag: what it is called.
            update_latest: whether ``latest`` shall name it once it is committed.
            skip: nothing is saved for it, and its future raises SaveSkippedError.
            refusal: nothing is saved for it, and its future raises that.
            announce: off where perhaps no rank saves anything for it: nobody waits for this one before its first file.

        Raises:
            StorageError: what is there already cannot be read. The other ranks hear of it.
            ValueError: no tag, or no path.
            ClosedError: the saver is closed, or belongs to another process.
        """
        self._entrance.check()
        if not isinstance(tag, str) or not tag:
            raise ValueError(f"tag is {tag!r}, expected a text")
        directory = resolved(os.path.join(directory, ""))
        name = self._names.of_checkpoint(tag)
        if refusal is None and not skip:
            refusal = self._requests.refusal(name, directory, tag)
        attempt = Attempt(name, directory, directory, tag, update_latest, is_skipped=skip or refusal is not None)
        self._requests.begin(attempt, refusal, announce)
        return attempt

    def save(
        self,
        state: object,
        path: str,
        *,
        attempt: Attempt | None = None,
        is_eager: IsEager | None = None,
    ) -> SaveHandle:
        """Save a state as one file; returns before its large tensors are copied.

        Copied before it returns: Python objects, tensors up to ``eager_bytes`` and those that ``is_eager`` names.
        All other tensors must not be changed before the fence is closed (by an optimizer's step, or `wait_staged`).
        Blocks for copies only where eager tensors exceed ``eager_budget_bytes``.

        Args:
            state: nested containers of tensors and Python objects.
            path: the file's final path; folders are made. Its suffix chooses the format unless the config does.
            attempt: the checkpoint it belongs to; None: a lone file, visible as soon as it is durable.
            is_eager: says of (fqn, tensor) that it may change before the fence, whatever its size.

        Raises:
            StateError: the state cannot be saved; nothing was written.
            StorageError: what has the path is no file; it is left alone.
            ValueError: the path cannot be one.
            ClosedError: the saver is closed, or belongs to another process.
            GraphCaptureError: a device's current stream is recording a graph.
        """
        path = resolved(path)

        def make_plan(captures: Captures) -> FilePlan:
            return self._planner.plan(state, path, captures, is_eager, self.torn_fqns)

        with self._entrance.inside():
            return self._save(path, attempt, make_plan)

    def save_file(self, source: str, path: str, *, attempt: Attempt | None = None) -> SaveHandle:
        """Save what a file holds as another file, byte for byte; returns before it is read.

        It must not be written to before the fence is closed; deleting it, or replacing it by another, does no harm.

        Args:
            source: the file to read.
            path: as for `save`.
            attempt: as for `save`.

        Raises:
            StorageError: the source cannot be read, or what has the path is no file.
            ValueError: the path cannot be one.
            ClosedError: the saver is closed, or belongs to another process.
        """
        with self._entrance.inside():
            return self._save(resolved(path), attempt, lambda _: plan_side_file(source))

    def promise(self, name: str, limit_seconds: float) -> PromisedJob:
        """Hold the fence from now on for a save that `save_plan` will make, also on another thread.

        Whoever is given the promise has to end it: by that save, by `PromisedJob.fail`, or by `PromisedJob.finish`. The
        fence gives it up by itself when it has held up training for ``limit_seconds``.

        Args:
            name: what messages call the save.
            limit_seconds: so long training may be held up before the save is made.

        Raises:
            ClosedError: the saver is closed, or belongs to another process.
        """
        with self._entrance.inside():
            return self._staging.promise(name, Captures(self._budget), limit_seconds)

    def save_plan(
        self,
        make_plan: Callable[[Captures], FilePlan],
        path: str,
        *,
        attempt: Attempt,
        promise: PromisedJob | None = None,
    ) -> SaveHandle:
        """Save a file whose bytes the caller has planned; otherwise as `save`, of a checkpoint.

        Args:
            make_plan: called once, on this thread, with what takes copies; those of the promise where there is one.
            path: as for `save`.
            attempt: the checkpoint that it belongs to.
            promise: what has held the fence for it. Copies of devices' tensors wait for what the streams had been given
                when the promise was marked ready, instead of now.

        Raises:
            DataStatesError: the promise has been given up: the state may have changed. Nothing is saved.
            StorageError: what has the path is no file; it is left alone.
            ClosedError: the saver is closed, or belongs to another process.
        """
        with self._entrance.inside():
            return self._save(resolved(path), attempt, make_plan, promise)

    def _save(
        self,
        path: str,
        attempt: Attempt | None,
        make_plan: Callable[[Captures], FilePlan],
        promise: PromisedJob | None = None,
    ) -> SaveHandle:
        begin = now()
        check_target(path)
        is_lone = attempt is None
        attempt = attempt or self._lone_attempt(path)
        if attempt.is_skipped:
            return SaveHandle.of_nothing(path, attempt.committed)
        queue = self._queue(attempt)
        if attempt.directory is not None:
            self._client.begin(attempt.name, attempt.directory)
        captures = Captures(self._budget) if promise is None else promise.captures
        try:
            plan = make_plan(captures)
            captures.pack()
            eager_nbytes, nbytes = captures.nbytes, plan.nbytes
            captures.hold(plan.literal_nbytes - (eager_nbytes - captures.bundled_nbytes))
            job = self._staging.make_job(plan, path, attempt)
            if promise is not None:
                promise.keep(job)
        except BaseException:
            captures.release()
            raise
        attempt.nbytes += nbytes
        self._staging.submit(job, attempt, captures, is_fenced=promise is None or promise.is_fenced)
        handle = SaveHandle(path, nbytes, job.staged, attempt.committed)
        end = now()
        attempt.blocked_seconds += end - begin
        if is_lone:
            self._requests.publish(attempt)
        names = {"attempt": attempt.name, "path": path}
        self.events.record("save", begin, end, **names, nbytes=nbytes, eager_nbytes=eager_nbytes, **queue)
        return handle

    def commit(self, attempt: Attempt) -> Future[CommitResult]:
        """Say that this rank's part of a checkpoint has no further files. Returns at once.

        The checkpoint is committed when every rank has said so and all bytes are durable.
        """
        self._entrance.check()
        if attempt.directory is None:
            raise ValueError("a lone file is committed by save()")
        if not attempt.is_skipped:
            self._requests.commit(attempt, attempt.directory)
        return attempt.committed

    def abort(self, attempt: Attempt, cause: str) -> None:
        """Drop a checkpoint that was begun: its files vanish, the other ranks learn the cause. Instead of `commit`."""
        if not attempt.is_skipped:
            self._requests.abort(attempt, cause)

    def close(self, timeout: float | None = None) -> None:
        """Finish all saves, end the flusher, give the memory back; idempotent; blocks until durable.

        In a forked child it does nothing: the saver belongs to the parent.

        Raises:
            DataStatesError: the first failure that nobody has been told of.
            WaitTimeoutError: not done within ``timeout`` seconds; the flusher goes on by itself.
        """
        self._closing.close(timeout)

    def _queue(self, attempt: Attempt) -> dict[str, int]:
        """How much is in flight, itself not counted: for the record ``save``."""
        num_in_flight = sum(other is not attempt for other in self._outcomes.unsettled)
        return {
            "num_in_flight": num_in_flight,
            "num_slabs": self._cache.num_slabs,
            "num_free_slabs": self._cache.num_free,
        }

    def _lone_attempt(self, path: str) -> Attempt:
        attempt = Attempt(self._names.of_lone_file(), path)
        if self._config.when_busy == "skip" and self.is_busy:
            attempt.is_skipped = True
            self._outcomes.skip(attempt)
        elif self._config.when_busy == "replace":
            self.drop(self.waiting, f"{path} was saved")
        return attempt

    def _note_committed(self, attempt: Attempt) -> None:
        if attempt.directory is not None:
            self._carry_watch.note(attempt.directory, attempt.name)
        self._commit_log.note(attempt, self.fence.held_seconds, self._stager.starved_seconds)


def _note_reserved(done: Future[None], entrance: Entrance, outcomes: Outcomes) -> None:
    error = done.exception()
    if error is not None and entrance.is_open:
        what = f"datastates: the memory of the host cache cannot be reserved, lower host_cache_size: {error}"
        outcomes.fail(what, error)
