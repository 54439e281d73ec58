"""The whole life of a save: plan, stage, flush, commit.

A `Saver` belongs to one rank. It owns the host cache, the stager and the flusher process, and knows two kinds
of saves: a *checkpoint* (files of several ranks that become visible together) and a *lone file*.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import errno
import logging
import os
import stat
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch

from datastates import formats
from datastates.attempt import Attempt, SaveHandle
from datastates.captures import Captures, EagerBudget
from datastates.config import CheckpointConfig
from datastates.errors import (
    ClosedError,
    CommitError,
    DataStatesError,
    SaveSkippedError,
    StorageError,
    WaitTimeoutError,
)
from datastates.events import EventLog, Listener, now
from datastates.fence import Fence
from datastates.flusher.client import CommitResult, FlusherClient, FlushFile
from datastates.flusher.work import running_future
from datastates.host_cache import HostCache
from datastates.life_cycle import LifeCycle
from datastates.outcomes import Outcomes
from datastates.pinner import Pinner
from datastates.stager import Stager
from datastates.staging_job import StagingJob, torn_error
from datastates.state import IsEager, default_is_eager
from datastates.verification import SourceCheck

if TYPE_CHECKING:
    from datastates.plan import FilePlan

logger = logging.getLogger(__name__)

MAX_PATH_BYTES = 4096
"""Source: PATH_MAX of limits.h on Linux."""

ADVICE_SECONDS = 0.5
"""So long may training be held back for want of host cache, all in all, before the log says what to do about it."""


_ORDER = list(LifeCycle)


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
    ) -> None:
        """Make the host cache and start the flusher process; blocks for some milliseconds.

        With ``fast_cache_init`` off it blocks until the cache's memory is really reserved. Where CUDA is in use
        the cache is pinned in the background.

        Args:
            config: the settings.
            rank: this process's rank.
            world_size: number of ranks that take part in every checkpoint.
            run_id: equal on all ranks of this run, unlike in any other run.
            listener: receives event records.
            forgiving: a checkpoint that commits makes up for earlier failures: these are in the log, but are not
                raised any more.

        Raises:
            HostCacheError: the memory is not there.
            StorageError: with ``fast_cache_init`` off: it cannot be reserved.
            FlusherDiedError: the flusher process does not start.
        """
        self._config = config
        self._rank = rank
        self._run_id = run_id
        self._forgiving = forgiving
        self._owner = os.getpid()
        self._lock = threading.RLock()  # protects the fields up to _has_advised
        self._life = LifeCycle.OPEN
        self._num_attempts: Counter[str] = Counter()
        self._num_lone_files = 0
        self._staging: list[tuple[str, Future[None]]] = []
        self._unverified: list[tuple[Attempt, Callable[[], Future[CommitResult]]]] = []
        self._has_advised = False
        self._num_saving = 0
        self._idle = threading.Condition(self._lock)  # no save() is on its way
        self._closed = threading.Event()
        self._budget = EagerBudget(config.eager_budget_bytes)
        self._attempt_by_job: weakref.WeakKeyDictionary[StagingJob[FlushFile], Attempt] = weakref.WeakKeyDictionary()
        self._pinner: Pinner | None = None
        with ExitStack() as undo:
            self._start(world_size, listener, undo)
            undo.pop_all()
        atexit.register(self._close_at_exit)
        # children of multiprocessing run its own finalizers, not those of atexit
        self._finalizer = Finalize(None, self._close_at_exit, exitpriority=100)

    def _start(self, world_size: int, listener: Listener | None, undo: ExitStack) -> None:
        """Make all parts; ``undo`` gets what takes them away again should a later one fail."""
        config = self._config
        self.events = EventLog(self._rank, config.events_dir, listener)
        undo.callback(self.events.close)
        self._outcomes = Outcomes(self.events, self._note_committed, self._forgiving)
        self._cache = HostCache(config.host_cache_bytes, config.slab_nbytes)
        undo.callback(self._cache.close)
        self._client = FlusherClient(
            self._cache.descriptor,
            self._cache.nbytes,
            rank=self._rank,
            world_size=world_size,
            run_id=self._run_id,
            on_slab_free=self._cache.release,
            events=self.events,
            num_writers=config.num_writers,
            commit_timeout_seconds=config.commit_timeout_seconds,
            grace_seconds=config.grace_seconds,
        )
        undo.callback(self._client.close, config.close_timeout_seconds)
        self._stager: Stager[FlushFile] = Stager(
            self._cache, self._client, self.events, lambda file: file.error, self._on_lost
        )
        undo.callback(self._stager.close, config.close_timeout_seconds)
        self.fence = Fence(self._stager.copier, self.events, self._verify if config.verify_staging else None)
        undo.callback(self.fence.remove)
        self._prepare_cache()

    @property
    def flusher_pid(self) -> int:
        return self._client.pid

    @property
    def is_open(self) -> bool:
        return self._life is LifeCycle.OPEN and os.getpid() == self._owner

    @property
    def is_busy(self) -> bool:
        """Whether an earlier save is not settled yet."""
        return bool(self._outcomes.unsettled)

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

    def begin(self, directory: str, tag: str, *, update_latest: bool, skip: bool = False) -> Attempt:
        """Begin a checkpoint of all ranks in ``directory``. Every rank calls it, with the same tag.

        With ``skip`` nothing is saved for it, and its future raises SaveSkippedError.

        The name of the attempt, on which the ranks must agree without talking, counts the attempts at this very tag:
        a rank that has missed a checkpoint takes part in the next one again.
        """
        self._check_open()
        if not isinstance(tag, str) or not tag:
            raise ValueError(f"tag is {tag!r}, expected a text")
        directory = resolved(os.path.join(directory, ""))
        with self._lock:
            self._num_attempts[tag] += 1
            tag_hash = zlib.crc32(os.fsencode(tag))
            name = f"{self._run_id}-{tag_hash:08x}-{self._num_attempts[tag]:04d}"
        attempt = Attempt(name, directory, directory, tag, update_latest, is_skipped=skip)
        if skip:
            self._outcomes.skip(attempt)
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
        """
        with self._saving():
            return self._save(state, resolved(path), attempt, is_eager)

    def _save(self, state: object, path: str, attempt: Attempt | None, is_eager: IsEager | None) -> SaveHandle:
        begin = now()
        _check_target(path)
        is_lone = attempt is None
        attempt = attempt or self._lone_attempt(path)
        if attempt.is_skipped:
            return SaveHandle(path, 0, _done(), attempt.committed)
        captures = Captures(self._budget)
        try:
            plan = self._plan(state, path, captures, is_eager)
        except BaseException:
            captures.release()
            raise
        eager_nbytes, nbytes = captures.nbytes, plan.nbytes
        captures.hold(sum(segment.nbytes for segment in plan.segments if segment.is_literal) - eager_nbytes)
        attempt.nbytes += nbytes
        handle = self._submit(plan, path, attempt, captures)
        end = now()
        attempt.blocked_seconds += end - begin
        if is_lone:
            name = attempt.name
            self._request(attempt, lambda: self._client.publish(name))
        self.events.record("save", begin, end, path=path, nbytes=nbytes, eager_nbytes=eager_nbytes)
        return handle

    def commit(self, attempt: Attempt) -> Future[CommitResult]:
        """Say that this rank's part of a checkpoint has no further files. Returns at once.

        The checkpoint is committed when every rank has said so and all bytes are durable.
        """
        self._check_open()
        if attempt.directory is None:
            raise ValueError("a lone file is committed by save()")
        directory = attempt.directory
        if not attempt.is_skipped:
            self._request(
                attempt,
                lambda: self._client.commit(
                    attempt.name, directory, step_or_tag=attempt.tag, update_latest=attempt.update_latest
                ),
            )
        return attempt.committed

    def abort(self, attempt: Attempt, cause: str) -> None:
        """Drop a checkpoint that was begun: its files vanish, the other ranks learn the cause. Instead of `commit`."""
        if attempt.is_skipped:
            return
        attempt.error = CommitError(f"{attempt.path}: given up, {cause}", {self._rank: cause})
        self._give_up(attempt)
        self._client.publish(attempt.name)  # asks for the outcome, which is known; or the client would keep it for ever
        attempt.committed.set_exception(attempt.error)

    def wait_staged(self, timeout: float | None = None) -> None:
        """Block until every save so far is in the host cache, or lost. Raises WaitTimeoutError.

        From then on the state may be changed, and the death of this process does not lose it.
        """
        deadline = _Deadline(timeout)
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
        deadline = _Deadline(timeout)
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

    def raise_failure(self) -> None:
        """Raise the first background failure that has not been raised yet, and forget the others (they are logged)."""
        self._outcomes.raise_failure()

    def wait_for(self, path: str, timeout: float | None = None) -> None:
        """Block until no save to this file, or to its checkpoint, is in flight.

        Raises:
            DataStatesError: the youngest of those saves is lost: what is there is older.
            WaitTimeoutError: not settled within ``timeout`` seconds.
        """
        pending = self._outcomes.pending(resolved(path))
        if not pending:
            return
        self.settle(timeout)
        error = pending[-1].committed.exception()
        if error is not None:
            raise error

    def close(self, timeout: float | None = None) -> None:
        """Finish all saves, end the flusher, give the memory back; idempotent; blocks until durable.

        In a forked child it does nothing: the saver belongs to the parent.

        Raises:
            DataStatesError: the first failure that nobody has been told of.
            WaitTimeoutError: not done within ``timeout`` seconds; the flusher goes on by itself.
        """
        if os.getpid() != self._owner:
            return
        deadline = _Deadline(timeout)
        with self._idle:
            is_first, self._life = self._life is LifeCycle.OPEN, max(self._life, LifeCycle.CLOSING, key=_ORDER.index)
        if not is_first:
            self._closed.wait(timeout)  # somebody else does it
            return
        atexit.unregister(self._close_at_exit)
        self._finalizer.cancel()
        with self._idle:
            self._idle.wait_for(lambda: self._num_saving == 0, deadline.left())
        errors: list[BaseException] = []
        for end in (self._stager.close, self.wait_committed, self._client.close, self._free):
            try:
                end(deadline.left())
            except (DataStatesError, OSError) as error:
                errors.append(error)
        self._life = LifeCycle.CLOSED
        self._closed.set()
        if errors:
            raise errors[0]

    def _close_at_exit(self) -> None:
        """Finish what is in flight when the interpreter ends without `close`; a failure goes to the log, or stderr."""
        try:
            self.close(self._config.close_timeout_seconds)
        except (DataStatesError, OSError) as error:
            logger.critical("datastates: this process ends with a save lost, exit status notwithstanding: %s", error)

    def _free(self, timeout: float | None) -> None:
        """Let go of memory and descriptors. A stager that is stuck is woken: what it has not staged is lost."""
        self.fence.remove()
        pinner, self._pinner = self._pinner, None
        try:
            if pinner is not None and not self._stager.is_alive:
                pinner.close(timeout)
        finally:
            self._cache.close()
            self.events.close()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Closing waits for the body to end."""
        with self._lock:
            self._check_open()
            self._num_saving += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_saving -= 1
                self._idle.notify_all()

    def _check_open(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError(
                f"this saver belongs to process {self._owner}; a forked child ({os.getpid()}) cannot save through it"
            )
        if self._life is not LifeCycle.OPEN:
            raise ClosedError(f"the saver is {self._life.value}: nothing more can be saved through it")

    def _prepare_cache(self) -> None:
        reserved = self._client.prefault()
        reserved.add_done_callback(self._note_reserved)
        is_patient = not self._config.fast_cache_init
        if is_patient:
            reserved.result(self._config.close_timeout_seconds)
        if self._config.pin_host_cache and torch.cuda.is_available():
            self._pinner = Pinner(self._cache.memory, reserved)
            if is_patient:
                self._pinner.wait(self._config.close_timeout_seconds)

    def _note_reserved(self, done: Future[None]) -> None:
        error = done.exception()
        if error is not None and self._life is LifeCycle.OPEN:
            what = f"datastates: the memory of the host cache cannot be reserved, lower host_cache_size: {error}"
            self._outcomes.fail(what, error)

    def _plan(self, state: object, path: str, captures: Captures, is_eager: IsEager | None) -> FilePlan:
        by_size = default_is_eager(self._config.eager_bytes)
        torn = self._outcomes.torn_fqns

        def is_volatile(fqn: str, tensor: torch.Tensor) -> bool:
            return by_size(fqn, tensor) or fqn in torn or (is_eager is not None and is_eager(fqn, tensor))

        return formats.plan(state, formats.format_for(path, self._config.format), captures.capture, is_volatile)

    def _lone_attempt(self, path: str) -> Attempt:
        with self._lock:
            self._num_lone_files += 1
            name = f"{self._run_id}-r{self._rank}-{self._num_lone_files:06d}"
        attempt = Attempt(name, path)
        if self._config.when_busy == "skip" and self.is_busy:
            attempt.is_skipped = True
            self._outcomes.skip(attempt)
        elif self._config.when_busy == "replace":
            self.drop(self.waiting, f"{path} was saved")
        return attempt

    def _submit(self, plan: FilePlan, path: str, attempt: Attempt, captures: Captures) -> SaveHandle:
        file = self._client.open_file(path, plan.nbytes, self._cache.slab_bytes, plan.seals, attempt.name)
        check = SourceCheck(plan) if self._config.verify_staging else None
        job: StagingJob[FlushFile] = StagingJob(plan, file, path, check)
        job.staged.add_done_callback(lambda _: captures.release())
        self._attempt_by_job[job] = attempt
        entry = (path, job.staged)
        with self._lock:
            self._staging.append(entry)
        job.staged.add_done_callback(lambda _: self._forget_staging(entry))
        self.fence.add(job)
        try:
            self._stager.submit(job)
        except BaseException as error:
            self._on_lost(job, error)
            job.finish(error)
            raise
        job.wait_eager(self._stager.copier)
        return SaveHandle(path, plan.nbytes, job.staged, attempt.committed)

    def _forget_staging(self, entry: tuple[str, Future[None]]) -> None:
        with self._lock:
            self._staging.remove(entry)

    def _on_lost(self, job: StagingJob[FlushFile], error: BaseException) -> None:
        attempt = self._attempt_by_job.get(job)
        if attempt is not None and job.file.error is None:
            attempt.error = attempt.error or error
            self._give_up(attempt)

    def _give_up(self, attempt: Attempt) -> None:
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
        seconds, gib = now() - attempt.begin, attempt.nbytes / 2**30
        logger.info(
            "committed %s: %.3f GiB of this rank, blocked %.4f s, durable after %.2f s (%.2f GiB/s)",
            attempt.path,
            gib,
            attempt.blocked_seconds,
            seconds,
            gib / seconds,
        )
        held, starved = self.fence.held_seconds, self._stager.starved_seconds
        if min(held, starved) > ADVICE_SECONDS and not self._has_advised:
            self._has_advised = True
            logger.warning(
                "flushing is slower than saving: training was held back for %.1f s because the host cache was full; "
                "raise host_cache_size to >= %.1f or save less often than every %.1f s",
                held,
                gib * 1.05,
                seconds,
            )


def resolved(path: str | os.PathLike[str]) -> str:
    """The one absolute name of a file: its folder without symbolic links, its own name as it is.

    Raises:
        ValueError: no file can have the name.
    """
    text = os.fspath(path)
    try:
        if b"\0" in os.fsencode(text):
            raise ValueError("it holds a NUL")
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be a path: {error}") from error
    directory, name = os.path.split(os.path.abspath(text) if not text.endswith(os.sep) else text)
    return os.path.join(os.path.realpath(directory), name) if name else os.path.realpath(directory)


def _check_target(path: str) -> None:
    """Refuse to replace what is no file. Raises StorageError."""
    if len(os.fsencode(path)) >= MAX_PATH_BYTES:
        raise StorageError(f"{path[:100]}...: longer than {MAX_PATH_BYTES} bytes", errno.ENAMETOOLONG, path)
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # not there, or not reachable: the flusher says so when it makes the file
    if not stat.S_ISREG(mode):
        kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise StorageError(f"{path} is no regular file and is not replaced by one", kind, path)


def _done() -> Future[None]:
    future = running_future(type(None))
    future.set_result(None)
    return future


class _Deadline:
    """A time limit that several waits share."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._end = None if timeout is None else now() + timeout

    def left(self) -> float | None:
        return None if self._end is None else max(self._end - now(), 0.0)

    def wait(self, future: Future[Any], what: str) -> None:
        """Wait until the future is done, whatever its outcome."""
        if concurrent.futures.wait([future], self.left()).not_done:
            raise WaitTimeoutError(f"{what} within {self._timeout} s")
