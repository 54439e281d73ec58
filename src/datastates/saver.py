"""The whole life of a save: plan, stage, flush, commit.

A `Saver` belongs to one rank. It owns the parts that move bytes (`machinery`), and knows two kinds of saves:
a *checkpoint* (files of several ranks that become visible together) and a *lone file*.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from datastates import formats
from datastates.attempt import Attempt, SaveHandle
from datastates.attempt_names import AttemptNames
from datastates.cache_copies import CacheCopies
from datastates.captures import Captures, EagerBudget
from datastates.commit_log import CommitLog
from datastates.config import CheckpointConfig
from datastates.deadline import Deadline
from datastates.entrance import Entrance
from datastates.errors import ClosedError, CommitError, DataStatesError, SaveSkippedError, StorageError
from datastates.events import EventLog, Listener, now
from datastates.flusher.client import CommitResult, FlushFile
from datastates.flusher.work import running_future
from datastates.machinery import Machinery
from datastates.nodes.following import Following
from datastates.nodes.grouping import Nodes
from datastates.openmetrics import MetricsFile, metrics_path
from datastates.outcomes import Outcomes
from datastates.paths import check_target, resolved
from datastates.promised_job import PromisedJob
from datastates.run_meter import RunMeter
from datastates.side_files import plan_side_file
from datastates.staging_job import StagingJob, torn_error
from datastates.state import EagerRule, IsEager
from datastates.tier_settings import TierSettings
from datastates.tiers.store import check_installed
from datastates.tiers.watch import CarryWatch
from datastates.verification import SourceCheck
from datastates.whole_records import is_whole_part

if TYPE_CHECKING:
    from datastates.plan import FilePlan

logger = logging.getLogger(__name__)


_living: list[weakref.ref[Saver]] = []
"""Every saver that this process has made and not let go of, oldest first; what one saves another may be asked to load.

A list, since it is read while other threads append to it, also in signal handlers and forked children: no lock.
"""


def open_savers() -> list[Saver]:
    """The savers of this process that are open: a load has to look at what all of them have in flight."""
    return [saver for found in list(_living) if (saver := found()) is not None and saver.is_open]


class Saver:
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
        self._rank = rank
        self._entrance = Entrance()
        self._names = AttemptNames(run_id, rank)
        self._lock = threading.RLock()  # protects _staging and _unverified; a signal handler may save, too
        self._staging: list[tuple[str, Future[None]]] = []
        self._unverified: list[tuple[Attempt, Callable[[], Future[CommitResult]]]] = []
        self._planner = formats.Planner()
        self._budget = EagerBudget(config.eager_budget_bytes)
        check_installed(config.all_tiers)
        self._following: Following | None = None
        if nodes is not None:
            self._following = Following(nodes.part, rank, nodes.store, config.commit_timeout_seconds)
        self._carry_watch = CarryWatch(config.all_tiers)
        self._attempt_by_job: weakref.WeakKeyDictionary[StagingJob[FlushFile], Attempt] = weakref.WeakKeyDictionary()
        self.events = _open_events(config, rank, listener)
        meter = RunMeter(config.host_cache_bytes)
        self.events.add(meter.note)
        self._commit_log = CommitLog(self.events, meter)
        self._outcomes = Outcomes(self.events, self._note_committed, forgiving)
        self._machinery = Machinery(
            config,
            self.events,
            rank=rank,
            world_size=world_size,
            on_reserved=self._note_reserved,
            on_lost=self._on_lost,
            verify=self._verify if config.verify_staging else None,
            node=None if nodes is None else nodes.part,
        )
        self._cache, self._client = self._machinery.cache, self._machinery.client
        # half of the slabs stay for staging; what has been staged is read again to verify it, and must be there then
        self._copies_budget = EagerBudget(0 if config.verify_staging else self._cache.nbytes // 2)
        self._stager, self.fence = self._machinery.stager, self._machinery.fence
        _living.append(weakref.ref(self, _living.remove))
        atexit.register(self._close_at_exit)
        # children of multiprocessing run its own finalizers, not those of atexit
        self._finalizer = Finalize(None, self._close_at_exit, exitpriority=100)

    @property
    def flusher_pid(self) -> int:
        return self._client.pid

    @property
    def is_open(self) -> bool:
        return self._entrance.is_open

    @property
    def tiers(self) -> tuple[TierSettings, ...]:
        """Where checkpoints are carried to, the directory that they are saved in first; empty: nowhere."""
        return self._config.all_tiers

    @property
    def is_busy(self) -> bool:
        """Whether an earlier save is not settled yet."""
        return bool(self._outcomes.unsettled)

    @property
    def unsettled(self) -> list[Attempt]:
        """The attempts in flight, oldest first."""
        return self._outcomes.unsettled

    @property
    def waiting(self) -> list[str]:
        """Names of the attempts that are not settled and not the oldest of those."""
        return [attempt.name for attempt in self._outcomes.unsettled[1:]]

    def drop(self, names: Collection[str], cause: str) -> None:
        """Give up attempts in favour of a younger one; those that are settled meanwhile stay as they are."""
        for attempt in self._outcomes.unsettled:
            if attempt.name in names and attempt.error is None:
                attempt.error = SaveSkippedError(f"{attempt.path}: dropped, {cause}")
                self._give_up(attempt)

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
            refusal = self._refusal(name, directory, tag)
        attempt = Attempt(name, directory, directory, tag, update_latest, is_skipped=skip or refusal is not None)
        if refusal is not None:
            self._tell_nodes(attempt, refusal)
            self._outcomes.refuse(attempt, refusal)
        elif skip:
            self._outcomes.skip(attempt)
        elif announce:
            self._client.begin(name, directory)
        return attempt

    def _refusal(self, name: str, directory: str, tag: str) -> CommitError | None:
        """Why nodes do not save to a folder; where this rank alone cannot tell, the others are told."""
        try:
            if self._following is None or not is_whole_part(directory):
                return None
        except StorageError as error:
            self.abort(Attempt(name, directory, directory, tag), f"{type(error).__name__}: {error}")
            raise
        message = f"{directory} is whole on all nodes, and is not replaced: save under another name"
        return CommitError(message, tag=tag)

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
        with self._entrance.inside():
            return self._save(path, attempt, lambda captures: self._plan(state, path, captures, is_eager))

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
            captures, copies = Captures(self._budget), CacheCopies(self._cache, self._copies_budget)
            promise = PromisedJob(name, self._stager.copier, captures, copies, limit_seconds)
            self._follow_staging(promise)
            self.fence.add(promise)
            return promise

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

    @property
    def torn_fqns(self) -> frozenset[str]:
        """Tensors that have changed too early once: to be copied inside of the call from then on."""
        return self._outcomes.torn_fqns

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
            return SaveHandle(path, 0, _done_future(), attempt.committed)
        queue = self._queue(attempt)
        if attempt.directory is not None:
            self._client.begin(attempt.name, attempt.directory)
        captures = Captures(self._budget) if promise is None else promise.captures
        try:
            plan = make_plan(captures)
            captures.pack()
            eager_nbytes, nbytes = captures.nbytes, plan.nbytes
            captures.hold(plan.literal_nbytes - (eager_nbytes - captures.bundled_nbytes))
            job = self._make_job(plan, path, attempt)
            if promise is not None:
                promise.keep(job)
        except BaseException:
            captures.release()
            raise
        attempt.nbytes += nbytes
        self._submit(job, attempt, captures, is_fenced=promise is None or promise.is_fenced)
        handle = SaveHandle(path, nbytes, job.staged, attempt.committed)
        end = now()
        attempt.blocked_seconds += end - begin
        if is_lone:
            name = attempt.name
            self._request(attempt, lambda: self._client.publish(name))
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
        directory = attempt.directory
        if not attempt.is_skipped:
            self._request(attempt, lambda: self._ask_to_commit(attempt, directory))
        return attempt.committed

    def _ask_to_commit(self, attempt: Attempt, directory: str) -> Future[CommitResult]:
        """Done when the checkpoint is committed on all nodes."""
        update_latest = attempt.update_latest and self._following is None  # a part alone is not named
        part = self._client.commit(attempt.name, directory, step_or_tag=attempt.tag, update_latest=update_latest)
        return part if self._following is None else self._following.follow(attempt, part)

    def _tell_nodes(self, attempt: Attempt, error: BaseException) -> None:
        """The other nodes need not wait for this one's part of an attempt."""
        if self._following is not None and attempt.directory is not None:
            self._following.give_up(attempt, error)

    def abort(self, attempt: Attempt, cause: str) -> None:
        """Drop a checkpoint that was begun: its files vanish, the other ranks learn the cause. Instead of `commit`."""
        if attempt.is_skipped:
            return
        attempt.error = CommitError(f"{attempt.path}: given up, {cause}", {self._rank: cause})
        self._give_up(attempt)
        self._client.publish(attempt.name)  # asks for the outcome, which is known; or the client would keep it for ever
        self._tell_nodes(attempt, attempt.error)
        attempt.committed.set_exception(attempt.error)

    def wait_staged(self, timeout: float | None = None) -> None:
        """Block until every save so far is in the host cache, or lost. Raises WaitTimeoutError.

        From then on the state may be changed, and the death of this process does not lose it.
        """
        deadline = Deadline(timeout)
        if not self._entrance.is_ours and (self._staging or self._outcomes.unsettled):
            self._entrance.check()  # the end of what was in flight when a child was forked is told to the parent
        with self._lock:
            staging = list(self._staging)
        self.fence.close(timeout)
        for path, staged in staging:
            deadline.wait(staged, f"{path}: not staged")

    def settle(self, timeout: float | None = None) -> None:
        """Block until every save so far is committed or has failed; failures are left for `raise_failure`.

        Raises:
            WaitTimeoutError: not settled within ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        self.wait_staged(timeout)
        for attempt in self._outcomes.unsettled:
            deadline.wait(attempt.committed, f"{attempt.path}: not committed")

    def wait_committed(self, timeout: float | None = None) -> None:
        """Block until every save so far is committed; includes `wait_staged`.

        Raises:
            DataStatesError: the first failure that has not been raised yet; all of them are in the log.
            WaitTimeoutError: not settled within ``timeout`` seconds.
        """
        self.settle(timeout)
        self.raise_failure()

    def wait_carried(self, timeout: float | None = None) -> None:
        """Block until every checkpoint so far is committed, and in all tiers that it is carried to.

        What the flusher has given up (removed at the first tier's limit, damaged, not kept by a tier's rules) is not
        waited for; the log has said so. Works also after `close`.

        Raises:
            DataStatesError: as `wait_committed`.
            WaitTimeoutError: not all is carried within ``timeout`` seconds; names what is not.
        """
        deadline = Deadline(timeout)
        if self.is_open:
            self.wait_committed(timeout)
        self._carry_watch.wait(deadline.left())

    def raise_failure(self) -> None:
        """Raise the first background failure that has not been raised yet, and forget the others (they are logged)."""
        self._outcomes.raise_failure()

    def has_in_flight(self, path: str) -> bool:
        """Whether a save to this file, or to the checkpoint that it belongs to, is neither committed nor lost yet."""
        return bool(self._outcomes.unsettled) and bool(self._outcomes.pending(resolved(path)))

    def losses_in(self, folder: str) -> list[BaseException]:
        """Why checkpoints in a folder were lost, also where a later one that commits makes up for it.

        Those that `raise_failure` has told of are left out.
        """
        return self._outcomes.losses_in(folder)

    def wait_for(self, path: str, timeout: float | None = None) -> None:
        """Block until no save to this file, or to its checkpoint, is in flight.

        Raises:
            DataStatesError: the youngest of those saves is lost, and nobody has been told: what is there is older. Not
                raised by a forgiving saver.
            WaitTimeoutError: not settled within ``timeout`` seconds.
        """
        path = resolved(path)
        if self._outcomes.pending(path):
            self.settle(timeout)
        error = self._outcomes.loss_of(path)
        if error is not None:
            raise error

    def close(self, timeout: float | None = None) -> None:
        """Finish all saves, end the flusher, give the memory back; idempotent; blocks until durable.

        In a forked child it does nothing: the saver belongs to the parent.

        Raises:
            DataStatesError: the first failure that nobody has been told of.
            WaitTimeoutError: not done within ``timeout`` seconds; the flusher goes on by itself.
        """
        if not self._entrance.is_ours:
            return
        deadline = Deadline(timeout)
        if not self._entrance.begin_closing(timeout):
            return  # somebody else has done it
        atexit.unregister(self._close_at_exit)
        self._finalizer.cancel()
        self._entrance.wait_empty(deadline.left())
        errors: list[BaseException] = []
        follow = () if self._following is None else (self._following.close,)
        for end in (self._stager.close, self.wait_committed, *follow, self._client.close, self._machinery.free):
            try:
                end(deadline.left())
            except (DataStatesError, OSError) as error:
                errors.append(error)
        self._entrance.end_closing()
        if errors:
            raise errors[0]

    def _close_at_exit(self) -> None:
        """Finish what is in flight when the interpreter ends without `close`; a failure goes to the log, or stderr."""
        try:
            self.close(self._config.close_timeout_seconds)
        except (DataStatesError, OSError) as error:
            logger.critical("datastates: this process ends with a save lost, exit status notwithstanding: %s", error)

    def _note_reserved(self, done: Future[None]) -> None:
        error = done.exception()
        if error is not None and self._entrance.is_open:
            what = f"datastates: the memory of the host cache cannot be reserved, lower host_cache_size: {error}"
            self._outcomes.fail(what, error)

    def _plan(self, state: object, path: str, captures: Captures, is_eager: IsEager | None) -> FilePlan:
        rule = EagerRule(self._config.eager_bytes, _volatile(self._outcomes.torn_fqns, is_eager))
        return self._planner.plan(state, formats.format_for(path, self._config.format), captures, rule)

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

    def _make_job(self, plan: FilePlan, path: str, attempt: Attempt) -> StagingJob[FlushFile]:
        check = SourceCheck(plan) if self._config.verify_staging else None
        file = self._client.open_file(path, plan.nbytes, self._cache.slab_bytes, plan.seals, attempt.name)
        return StagingJob(plan, file, path, check, attempt.name)

    def _submit(self, job: StagingJob[FlushFile], attempt: Attempt, captures: Captures, is_fenced: bool = True) -> None:
        """Hand the job to the stager; from here on the job gives back what was captured."""
        job.staged.add_done_callback(lambda _: captures.release())
        self._attempt_by_job[job] = attempt
        self._follow_staging(job)
        if is_fenced:
            self.fence.add(job)
        try:
            self._stager.submit(job)
        except BaseException as error:
            self._on_lost(job, error)
            job.finish(error)
            raise
        job.wait_eager(self._stager.copier)

    def _follow_staging(self, job: StagingJob[Any]) -> None:
        entry = (job.path, job.staged)
        with self._lock:
            self._staging.append(entry)
        job.staged.add_done_callback(lambda _: self._forget_staging(entry))

    def _forget_staging(self, entry: tuple[str, Future[None]]) -> None:
        with self._lock:
            self._staging.remove(entry)

    def _on_lost(self, job: StagingJob[FlushFile], error: BaseException) -> None:
        attempt = self._attempt_by_job.get(job)
        if attempt is not None and job.file.error is None:
            attempt.error = attempt.error or error
            self._give_up(attempt)

    def _give_up(self, attempt: Attempt) -> None:
        with contextlib.suppress(ClosedError):  # the flusher is ending, and gives up by itself what is incomplete
            self._client.abort(attempt.name, str(attempt.error), attempt.directory or "")

    def _request(self, attempt: Attempt, ask: Callable[[], Future[CommitResult]]) -> None:
        """Ask the flusher to make an attempt visible: now, or once the fence has shown that nothing was torn."""
        self._outcomes.add(attempt)
        with self._lock:
            if self._config.verify_staging and self.fence.is_open:
                self._unverified.append((attempt, ask))
                return
        self._follow(attempt, ask)

    def _follow(self, attempt: Attempt, ask: Callable[[], Future[CommitResult]]) -> None:
        try:
            future = ask()
        except BaseException:
            self._outcomes.forget(attempt)
            raise
        future.add_done_callback(lambda done: self._outcomes.settle(attempt, done))

    def _verify(self, jobs: list[StagingJob[FlushFile]]) -> None:
        """Read the sources of the jobs again, then ask for what has been held back for that."""
        for job in jobs:
            if job.staged.exception() is None and job.check is not None and (torn := job.check.changed()):
                self._on_lost(job, torn_error(job.path, torn))
        with self._lock:
            verified, self._unverified = self._unverified, []
        for attempt, ask in verified:
            self._follow(attempt, ask)

    def _note_committed(self, attempt: Attempt) -> None:
        if attempt.directory is not None:
            self._carry_watch.note(attempt.directory, attempt.name)
        self._commit_log.note(attempt, self.fence.held_seconds, self._stager.starved_seconds)


def _open_events(config: CheckpointConfig, rank: int, listener: Listener | None) -> EventLog:
    events = EventLog(rank, config.events_dir, listener)
    if config.metrics_dir is not None:
        try:
            metrics = MetricsFile(metrics_path(config.metrics_dir, rank))
        except BaseException:
            events.close()
            raise
        events.add(metrics, metrics.end)
    return events


def _volatile(torn: frozenset[str], is_eager: IsEager | None) -> IsEager | None:
    """Says of a tensor whether it is eager though it is large; None: none is, and nobody need ask."""
    if not torn:
        return is_eager
    return lambda fqn, tensor: fqn in torn or (is_eager is not None and is_eager(fqn, tensor))


def _done_future() -> Future[None]:
    future = running_future(type(None))
    future.set_result(None)
    return future
