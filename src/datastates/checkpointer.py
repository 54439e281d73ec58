"""Checkpoints for people who write their own training loop: saved lazily, kept and deleted by rule, resumed from.

::

    with Checkpointer("run", keep_last=3) as checkpointer:
        state = {"model": model, "optimizer": optimizer}
        first = checkpointer.resume(state) or 0
        for step in range(first, 1000):
            train(step)
            checkpointer.save(step + 1, state)
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

from torch import distributed

from datastates import pins
from datastates.attempt import Attempt, SaveHandle
from datastates.checkpoints import options
from datastates.checkpoints.excess import Claims, Excess
from datastates.checkpoints.files import Files
from datastates.checkpoints.loader import LoadedStep, Loader, LoadOptions
from datastates.checkpoints.options import Metric
from datastates.checkpoints.preemption import SIGNALS, Preemption
from datastates.checkpoints.steps import StepFolder, tag_of
from datastates.checkpoints.totals import SaveTotals, Totals
from datastates.config import CheckpointConfig
from datastates.deadline import Deadline
from datastates.deletions import Deletions
from datastates.errors import ConfigError, DataStatesError, StateError
from datastates.events import Listener, now
from datastates.formats.request import MapLocation
from datastates.nodes.agreement import agree_on_whole
from datastates.nodes.grouping import agree_on_nodes, check_directories
from datastates.paths import resolved
from datastates.ranks import Ranks, agree_on_run
from datastates.saver import Saver
from datastates.spares import remove_spares
from datastates.state import IsEager
from datastates.tiers.nearest import FETCH_SECONDS, fetch_named, fetch_newest
from datastates.when_busy import Start, agree_on_start

__all__ = ["Checkpointer", "LoadedStep", "Preemption", "SaveHandle", "SaveTotals"]

logger = logging.getLogger(__name__)


class Checkpointer:
    """The checkpoints of one run in one folder, one per step.

    `save` returns at once: Python objects and small tensors are copied before it returns, as are the buffers of
    modules, which a forward pass changes; large tensors while training goes on. They must not be changed before the
    fence is closed: by the next step of any ``torch.optim.Optimizer``, which waits for the copies that are not done
    yet, or by `wait_staged`. A process of its own writes; a checkpoint is visible when it is durable, on all ranks.

    A save that fails in the background never stops the training: it is logged as an error at once, its handle raises
    it, and so do `wait` and `close` unless a later checkpoint was committed. It never harms an earlier checkpoint.

    Thread safe, as far as the state itself is. In a forked child only `close` may be called, and does nothing.

    The folder has for each step ``step<n>/rank-<r>.pt`` and ``step<n>/checkpoint.pt``, ordinary files of ``torch.save``
    (or safetensors); see docs/checkpointer.md. What has other names is left alone.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: int = 0,
        metric: str | None = None,
        is_larger_better: bool = False,
        keep_spare: bool = False,
        host_cache_gb: float = options.DEFAULT_GIGABYTES,
        replicated: bool | Collection[str] = (),
        saves_random_states: bool = True,
        on_event: Listener | None = None,
        group: distributed.ProcessGroup | None = None,
        config: CheckpointConfig | None = None,
        **settings: Any,
    ) -> None:
        """Make the folder and the host cache, start the flusher process, finish what a crashed run has left.

        Where ``torch.distributed`` is initialised all ranks of the group make theirs together, with the same arguments.

        Args:
            directory: of the checkpoints; all ranks share it, or with ``shared_directory=False`` those of a node do.
            keep_last: the newest so many stay, by the order in which they were saved. None: nothing is ever deleted.
            keep_every: those whose step is a multiple of this stay, for ever.
            keep_best: so many with the best values of ``metric`` stay.
            metric: the name of a metric given to `save`.
            is_larger_better: whether a larger value of it is the better one.
            keep_spare: the files of the checkpoint that was deleted last stay for the next ones to be written over,
                until `close`: that is faster on many disks, and takes the room of one more checkpoint.
            host_cache_gb: memory of the host per process, in units of 2**30 bytes, that saves may take. As large as a
                rank's part of a checkpoint, no save waits for storage. A state may be larger.
            replicated: entries that are the same on all ranks, as those of a model under data parallelism are: each is
                saved once, shared out over the ranks, and can be loaded by any number of ranks. True: all of them. That
                the values are the same is believed. Everything else each rank saves for itself.
            saves_random_states: save the random states of each rank as well, for `resume`.
            on_event: receives event records, see `datastates.events`; on background threads, too.
            group: the ranks that save together; None: all.
            config: all settings of saving, instead of ``host_cache_gb`` and ``settings``.
            settings: fields of `CheckpointConfig` by name, such as ``format="safetensors"`` or ``when_busy="skip"``.
                With ``tiers`` the folder lies in the first of them; nothing is deleted before the others have it.

        Raises:
            ConfigError: a setting is unknown or wrong.
            HostCacheError: the memory for the host cache is not there.
            StorageError: the folder cannot be made or read.
        """
        self.config = options.config_of(config, host_cache_gb, settings)
        self._policy = options.policy_of(keep_last, keep_every, keep_best, metric, is_larger_better)
        self._metric, self._is_larger_better = metric, is_larger_better
        self._keeps_spare = keep_spare
        names = options.replicated_of(replicated)
        suffix = ".safetensors" if self.config.format == "safetensors" else ".pt"
        self.directory = resolved(os.path.join(os.fspath(directory), ""))
        options.check_tiers(self.config.all_tiers, self.directory)
        self._steps = StepFolder(self.directory)
        self._ranks = Ranks.on_host(group)
        run_id = agree_on_run(self._ranks)
        self._nodes = agree_on_nodes(self._ranks, self.config, run_id)
        self._last_serial = self._open_folder()
        self._files = Files(
            self._ranks,
            run_id,
            replicated=names,
            saves_random_states=saves_random_states,
            suffix=suffix,
            timeout=self.config.commit_timeout_seconds,
            nodes=self._nodes,
        )
        self._claims = Claims()
        self._deletions = Deletions("datastates-deletions")
        self._totals = Totals()
        self._preemption: Preemption | None = None
        self._saver = Saver(
            self.config,
            rank=self._ranks.rank,
            world_size=self._ranks.size,
            run_id=run_id,
            listener=on_event,
            forgiving=True,
            nodes=self._nodes,
        )
        self._owner = os.getpid()
        # both come before those of the saver, which were registered before them
        atexit.register(self._finish_at_exit)
        self._finalizer = Finalize(None, self._finish_at_exit, exitpriority=101)

    # ------------------------------------------------------------------------------------------- saving

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Metric] | None = None,
        block: bool = False,
        is_eager: IsEager | None = None,
    ) -> SaveHandle:
        """Save a checkpoint; every rank calls it, with the same step and the same names of replicated entries.

        Returns before large tensors are copied. It makes no collective (but with ``when_busy`` other than ``"queue"``),
        and waits for no other rank but at the first save with replicated entries, whose structures are compared. A
        checkpoint that has the step already is replaced when the new one is durable, not before; a pinned one is not.

        Args:
            step: from 0.
            state: by name: a stateful object (with ``state_dict`` and ``load_state_dict``), a state dict, tensors, or
                plain Python data. Of a module its buffers are copied at once; of a state dict nobody knows which
                tensors are buffers: call `wait_staged` before the next forward pass, or say so with ``is_eager``.
            metrics: numbers to be kept with the checkpoint; those of rank 0 count.
            block: return only when the checkpoint is committed.
            is_eager: says of (name, tensor) that it may change before the fence closes; it is copied at once then.

        Returns:
            With ``staged``: this rank's state may be changed; ``committed``: the checkpoint is durable and visible. Its
            ``nbytes`` is of this rank, 0 where nothing was saved since earlier saves are in flight (``when_busy``).

        Raises:
            StateError: the state cannot be saved, or the step is pinned. Nothing was written; other ranks learn of it.
            ClosedError: closed, or made by another process.
            WaitTimeoutError: at the first save with replicated entries: other ranks do not save.
            DataStatesError: with ``block``: this save, or one before it, has failed.
        """
        begin = now()
        step = options.checked_step(step)
        tag = tag_of(step)
        directory = self._steps.path(step)
        with self._claims.saving(directory):
            attempt = self._begin(directory, tag)
            try:
                values = options.checked_metrics(metrics, self._metric)
                if pins.is_pinned(directory):
                    raise StateError(f"{directory} is pinned, and is not replaced: call unpin({step}) first")
                serial = self._next_serial()
                handle = self._files.save(self._saver, attempt, step, serial, state, values, is_eager)
                self._saver.commit(attempt)
            except BaseException as error:
                self._saver.abort(attempt, f"{type(error).__name__}: {error}")
                self._files.decline()
                raise
        self._totals.follow(attempt.committed, step, now() - begin)
        if self._policy is not None and self._is_first and not attempt.is_skipped:
            tiers = self.config.all_tiers
            has_parts = self._nodes is not None
            excess = Excess(self._steps, self._policy, self._metric, self._claims, tiers, self._keeps_spare, has_parts)
            self._deletions.ask(excess, in_background=True)
        if block:
            self.wait()
        return replace(handle, path=directory)

    def _begin(self, directory: str, tag: str) -> Attempt:
        start = Start()
        if self.config.when_busy != "queue":
            start = agree_on_start(self._saver, self._ranks, directory, tag, self.config.when_busy)
        return self._saver.begin(directory, tag, update_latest=True, skip=start.is_skipped, refusal=start.refusal)

    # ------------------------------------------------------------------------------------------ loading

    def load_latest(
        self,
        into: MutableMapping[str, Any] | None = None,
        *,
        names: Iterable[str] | None = None,
        missing_ok: bool = False,
        strict: bool = True,
        check: bool = True,
        map_location: MapLocation = "cpu",
        weights_only: bool = True,
    ) -> LoadedStep | None:
        """Load the checkpoint that was saved last; a collective: every rank calls it, and gets the same step.

        Saves in flight are finished first; what another tier has, and is younger than all that is here, is brought
        here. A checkpoint that is damaged is passed over for an older one, on all ranks: that is logged as a warning,
        and stands in `LoadedStep.skipped`.

        Args:
            into: what `save` was given. Modules and tensors are filled in place, other stateful objects get their state
                by ``load_state_dict``, dictionaries and lists of plain data get the saved content, and other plain data
                is replaced in ``into`` itself. None: give all that this rank can load in memory of its own.
            names: of the entries to load; None: all of ``into``, or all there are.
            missing_ok: give None where there is no checkpoint at all.
            strict: the names of an entry's tensors must be those that were saved.
            check: compare all bytes with their checksums first: each file is read once more, by one of the ranks.
            map_location: as for ``torch.load``, for what is not filled in place. It is given to ``load_state_dict``,
                and optimizers move their state to where their parameters are.
            weights_only: load plain data only. False runs what is pickled in the files: only for those you trust.

        Raises:
            CheckpointNotFoundError: there is no complete one; says what there is. With ``missing_ok`` only where there
                are damaged or incomplete ones: a fresh start would be a loss then.
            MismatchError: an entry is not in the checkpoint, or names or shapes of its tensors differ.
            TopologyError: an entry that is not replicated was saved by another number of ranks; names both numbers.
            ForeignObjectError: with ``weights_only``: an entry holds more than plain data.
            StateError: an entry cannot be filled in place.
        """
        self._settle_for_load()
        self._fetch_newest()
        wanted = LoadOptions(strict, check, map_location, weights_only)
        return Loader(self._steps, self._ranks, wanted, self._nodes).load_latest(into, names, missing_ok=missing_ok)

    def load(
        self,
        step: int,
        into: MutableMapping[str, Any] | None = None,
        *,
        names: Iterable[str] | None = None,
        strict: bool = True,
        check: bool = True,
        map_location: MapLocation = "cpu",
        weights_only: bool = True,
    ) -> LoadedStep:
        """Load the checkpoint of one step; otherwise as `load_latest`, but that no other is taken where it is damaged.

        Raises:
            CheckpointNotFoundError: there is no complete one of this step; says which there are.
            CorruptCheckpointError: it is damaged.
            DataStatesError: as `load_latest`.
        """
        step = options.checked_step(step)
        self._settle_for_load()
        self._fetch_step(step)
        wanted = LoadOptions(strict, check, map_location, weights_only)
        return Loader(self._steps, self._ranks, wanted, self._nodes).load(step, into, names)

    def resume(
        self,
        state: MutableMapping[str, Any],
        *,
        allow_fresh_start: bool = False,
        strict: bool = True,
        check: bool = True,
        map_location: MapLocation = "cpu",
        weights_only: bool = True,
    ) -> int | None:
        """Bring the training to where the last checkpoint was made: `load_latest` into it, and the random states.

        Those are of Python, torch on the CPU and all accelerators, and numpy where it is imported. Where another number
        of ranks has saved them they stay as they are, which is logged. A data position comes back where the object that
        has it (a sampler, a loader) is an entry with ``state_dict`` and ``load_state_dict``.

        Args:
            state: what `save` is given.
            allow_fresh_start: start anew, too, where all checkpoints are damaged or incomplete.
            strict, check, map_location, weights_only: as for `load_latest`.

        Returns:
            The step of the checkpoint; None where there is none: a fresh start.

        Raises:
            CheckpointNotFoundError: there are only damaged or incomplete ones, unless ``allow_fresh_start``.
            DataStatesError: as `load_latest`.
        """
        self._settle_for_load()
        self._fetch_newest()
        wanted = LoadOptions(strict, check, map_location, weights_only)
        return Loader(self._steps, self._ranks, wanted, self._nodes).resume(state, allow_fresh_start=allow_fresh_start)

    # ------------------------------------------------------------------------------------ what there is

    @property
    def latest_step(self) -> int | None:
        """The step of the complete checkpoint that was saved last, None where there is none."""
        records = self._steps.records()
        return records[-1].step if records else None

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in the order in which they were saved. Reads the folder."""
        return [record.step for record in self._steps.records()]

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that a checkpoint was saved with. Raises CheckpointNotFoundError."""
        return dict(self._steps.find(options.checked_step(step)).metrics)

    def best_step(self) -> int | None:
        """The step with the best value of ``metric``, the younger of two that are equal; None where none has one.

        Raises:
            ConfigError: no ``metric`` was named.
        """
        if self._metric is None:
            raise ConfigError("best_step() needs the name of a metric: Checkpointer(..., metric='loss')")
        return self._steps.best(self._metric, is_larger_better=self._is_larger_better)

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step for ever, across restarts, until `unpin`. Waits for it if it is in flight.

        It is neither deleted nor replaced. Idempotent; one rank's call is enough.

        Raises:
            CheckpointNotFoundError: there is no complete checkpoint of this step.
        """
        step = options.checked_step(step)
        path = self._steps.path(step)
        self._saver.wait_for(path)
        with self._claims.saving(path):  # or it might be removed between the look and the pin
            pins.pin(self._steps.find(step).path)

    def unpin(self, step: int) -> None:
        """Let the checkpoint of a step go when it is its time, at the next save. Idempotent.

        Raises:
            CheckpointNotFoundError: there is no complete checkpoint of this step.
        """
        pins.unpin(self._steps.find(options.checked_step(step)).path)

    def pinned(self) -> list[int]:
        """The steps that are pinned, in the order in which they were saved."""
        return [record.step for record in self._steps.records() if record.is_pinned]

    @property
    def stats(self) -> SaveTotals:
        """What the saves of this object have come to so far."""
        return self._totals.now(self._saver.fence.held_seconds)

    # ------------------------------------------------------------------------------------------ waiting

    def wait_staged(self, timeout: float | None = None) -> None:
        """Block until the state may be changed: every save so far is in the host cache, or lost.

        From then on the death of this process does not lose it. Optimizers wait by themselves.

        Raises:
            WaitTimeoutError: not within ``timeout`` seconds.
        """
        self._saver.wait_staged(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Block until every save so far is committed, and what is not needed any more is deleted.

        Raises:
            DataStatesError: the first failure that has not been raised yet, and no later commit has made up for.
            WaitTimeoutError: not settled within ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        self._saver.settle(deadline.left())
        self._deletions.finish(deadline.left())
        self._saver.raise_failure()

    def wait_carried(self, timeout: float | None = None) -> None:
        """Block until every save so far is committed in all ``tiers``; also after `close`.

        Raises:
            DataStatesError: as `wait`.
            WaitTimeoutError: not within ``timeout`` seconds; names what is behind.
        """
        self._saver.wait_carried(timeout)

    def close(self) -> None:
        """Finish all saves and deletions, end the flusher, give the memory back; idempotent.

        Blocks for ``close_timeout_seconds`` at most; after a signal that `preemption` has noticed, for what is left of
        the grace time.

        Raises:
            DataStatesError: as `wait`.
        """
        if os.getpid() != self._owner:
            return
        atexit.unregister(self._finish_at_exit)
        self._finalizer.cancel()
        deadline = Deadline(self._close_seconds())
        try:
            self._finish(deadline)
        finally:
            self._saver.close(deadline.left())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close: what is in flight is committed also when the block ends with an exception, which passes through."""
        try:
            self.close()
        except (DataStatesError, OSError) as failure:
            if error is None:
                raise
            logger.error("datastates: while %s ends the block: %s", type(error).__name__, failure)

    @contextmanager
    def preemption(
        self,
        signals: Iterable[int] = SIGNALS,
        *,
        grace_seconds: float | None = None,
        check_every: int = 1,
    ) -> Iterator[Preemption]:
        """Notice signals in a block, so that the training saves and ends when the scheduler wants the machine back.

        ::

            with checkpointer.preemption() as preemption:
                for step in range(first, 1000):
                    train(step)
                    if preemption.requested:
                        checkpointer.save(step + 1, state)
                        break

        Every rank enters the block. Its end commits what was saved; see `Preemption`.

        Args:
            signals: those that announce the end.
            grace_seconds: from the first of them until all must be done; None: as ``grace_seconds`` of the config,
                which is also how long the flusher process works on after SIGTERM.
            check_every: with several ranks, agree at every so many questions: a small collective.

        Raises:
            ConfigError: not on the main thread, or an argument is wrong.
        """
        limit = self.config.grace_seconds
        seconds = limit if grace_seconds is None else grace_seconds
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds <= limit:
            raise ConfigError(
                f"grace_seconds is {seconds!r}, expected 0 to {limit:g} s: so long the flusher process works on after"
                " SIGTERM; Checkpointer(grace_seconds=...) changes that"
            )
        watch = Preemption(self._ranks, self._saver.settle, signals, seconds, check_every)
        self._preemption = watch
        with watch:
            yield watch

    # ----------------------------------------------------------------------------------------- the rest

    @property
    def _is_first(self) -> bool:
        """Whether this rank keeps the folder in order."""
        return self._ranks.rank == 0 if self._nodes is None else self._nodes.is_first

    def _open_folder(self) -> int:
        """Bring the folder out of a crash, on all nodes where each has its own; gives the highest serial in any."""
        if self._nodes is None:
            return self._ranks.agree(self._steps.open)
        check_directories(self._nodes, self.directory)
        serial = max(self._nodes.each(self._steps.open))
        agree_on_whole(self._nodes, self.directory)
        return serial

    def _next_serial(self) -> int:
        """Higher than any in the folder, also where another `Checkpointer` has saved there since this one was made."""
        if self._nodes is None and self._is_first:
            newest = self._steps.latest_serial(besides=self.stats.last_committed)
            self._last_serial = max(self._last_serial, newest)
        self._last_serial += 1
        return self._last_serial

    def _settle_for_load(self) -> None:
        """Nothing is in flight, and nothing is deleted while it is looked at."""
        self._saver.wait_staged()
        self._saver.settle()
        self._deletions.finish()

    def _fetch_newest(self) -> None:
        """What another tier alone has, and was committed later than all that is here, comes here first."""
        tiers = self.config.all_tiers
        if len(tiers) > 1:
            self._ranks.agree_at_leisure(lambda: fetch_newest(tiers, self.directory), FETCH_SECONDS)

    def _fetch_step(self, step: int) -> None:
        """A step that is not whole here comes from the nearest tier that has it."""
        tiers = self.config.all_tiers
        if len(tiers) > 1:
            path = os.path.join(self.directory, tag_of(step))
            self._ranks.agree_at_leisure(lambda: fetch_named(tiers, path), FETCH_SECONDS)

    def _close_seconds(self) -> float:
        left = None if self._preemption is None else self._preemption.seconds_left
        return self.config.close_timeout_seconds if left is None else min(left, self.config.close_timeout_seconds)

    def _finish(self, deadline: Deadline) -> None:
        """Saves are settled, what they replace is deleted, and no space is kept any more."""
        if self._saver.is_open:
            self._saver.settle(deadline.left())
        self._deletions.finish(deadline.left())
        if self._keeps_spare and self._is_first:
            remove_spares(self.directory)

    def _finish_at_exit(self) -> None:
        """The interpreter ends without `close`: the saver, whose turn it is next, says what is lost."""
        if os.getpid() != self._owner:
            return
        try:
            self._finish(Deadline(self._close_seconds()))
        except DataStatesError as error:
            logger.warning("%s: old checkpoints may stay: %s", self.directory, error)
