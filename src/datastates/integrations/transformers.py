"""Hugging Face's Trainer without DeepSpeed: checkpoints saved lazily, in folders that appear when they are whole.

::

    trainer = use_datastates(Trainer(...), host_cache_gb=4)
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))

The Trainer knows no plugin for its checkpoints. So the function that saves one is wrapped, of this one object: it
writes into a hidden folder (`saving_folders`), its large files are saved lazily (`save_calls`), the small ones as ever.
When all are durable the folder gets its name, and only then older checkpoints go. What a crash has left under the
hidden name is completed or removed by the next start (`last_checkpoint`, or ``train()``).

Source: transformers 5.24 and 4.57, trainer.py, ``_save_checkpoint`` and what it calls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from datastates.attempt import Attempt
from datastates.config import CheckpointConfig
from datastates.errors import CheckpointNotFoundError, ConfigError, DataStatesError
from datastates.formats.safetensors import plan_flat
from datastates.integrations.agreement import agreed, barrier, done_by_all
from datastates.integrations.follow_ups import FollowUps
from datastates.integrations.save_calls import Divert, diverted
from datastates.integrations.saving_folders import SavingFolder, complete_interrupted
from datastates.integrations.series import Series
from datastates.integrations.stepped import STEPPED
from datastates.removal import remove_folder
from datastates.saver import Saver
from datastates.state import EagerRule, named_tensors

logger = logging.getLogger(__name__)

PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"

_UNFINISHED_MARK = "checkpoint-is-incomplete.txt"
"""What the Trainer puts into a checkpoint's folder while it saves one because of SIGTERM.

Source: transformers 5.24, trainer_jit_checkpoint.py."""

AnyTrainer = TypeVar("AnyTrainer")


def use_datastates(trainer: AnyTrainer, host_cache_gb: float = 4, **settings: Any) -> AnyTrainer:
    """Let a Trainer save its checkpoints lazily from now on; gives the same object. All ranks call it.

    Lazy are the parameters and states of optimizers that step, in every file that holds more than ``eager_bytes`` of
    tensors: the weights (also an adapter's) and ``optimizer.pt``. All else is copied or written inside the save.

    Args:
        trainer: of transformers, or of a class that is derived from it.
        host_cache_gb: size of the host cache in gigabytes of 2**30 bytes, on each rank that saves.
        settings: further settings, by the names of `CheckpointConfig`'s fields.

    Raises:
        ConfigError: a setting is unknown or wrong, or one that the Trainer's checkpoints do not allow.
        ValueError: the Trainer uses DeepSpeed or FSDP.
    """
    config = CheckpointConfig.from_section({"host_cache_size": host_cache_gb, **settings})
    config.require_shared_directory("this Trainer")
    config.refuse_tiers("this Trainer")
    if config.format is not None or config.when_busy != "queue":
        raise ConfigError("format and when_busy cannot be set: the Trainer names its files, and counts on each of them")
    if trainer.is_deepspeed_enabled:  # type: ignore[attr-defined]
        raise ValueError("this Trainer uses DeepSpeed: add the section datastates_ckpt to DeepSpeed's config instead")
    if trainer.is_fsdp_enabled:  # type: ignore[attr-defined]
        raise ValueError("this Trainer uses FSDP, which saves by torch.distributed.checkpoint: it is not supported")
    if isinstance(vars(trainer).get("_datastates"), _Checkpoints):
        raise ValueError("use_datastates was called for this Trainer before")
    _Checkpoints(trainer, config).install()
    return trainer


def last_checkpoint(output_dir: str) -> str | None:
    """The checkpoint to resume from: the one with the highest number, None where there is none.

    Completes first what an interrupted job has left, as far as it is durable, and removes the rest; a flusher process
    of that job is waited for. With ``torch.distributed`` initialised every rank calls it, and all get the same answer.
    """
    return agreed(lambda: _last_checkpoint(output_dir))


class _Checkpoints:
    """The checkpoints of one Trainer, on one rank."""

    def __init__(self, trainer: Any, config: CheckpointConfig) -> None:
        self._trainer = trainer
        self._config = config
        self._saver: Saver | None = None
        self._follow_ups: FollowUps | None = None
        self._since = STEPPED.num_steps
        self._lost: dict[str, BaseException] = {}  # by the path that it would have got
        self._order: dict[str, int] = {}  # of the checkpoints of this run
        self._given_up: list[SavingFolder] = []  # the flusher may still have made them again

    def install(self) -> None:
        trainer = self._trainer
        trainer._datastates = self
        for name in ("_save_checkpoint", "train"):
            original = getattr(trainer, name)
            setattr(
                trainer, name, functools.wraps(original)(functools.partial(getattr(self, name.strip("_")), original))
            )
        trainer.callback_handler.callbacks.insert(0, _Settle(self))

    def train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Complete what the last run has left, train, and wait for all checkpoints."""
        done_by_all(self._clean_up)
        self._since = STEPPED.num_steps
        try:
            result = original(*args, **kwargs)
        except BaseException:
            self._close_quietly()
            raise
        done_by_all(self._close)
        return result

    def save_checkpoint(self, original: Callable[..., None], model: Any, trial: Any = None) -> None:
        """What the Trainer calls on every rank to save."""
        directory = self._trainer._get_output_dir(trial)
        folder = SavingFolder(os.path.realpath(directory), f"{PREFIX}{self._trainer.state.global_step}")
        if self._trainer.args.should_save:
            pushes: list[str] = []
            self._save(folder, lambda: self._write(folder, directory, pushes, original, model, trial))
            if pushes or self._config.wait_on_save or os.path.exists(os.path.join(folder.target, _UNFINISHED_MARK)):
                self.settle()
            if pushes:
                self._trainer._push_from_checkpoint(os.path.join(directory, os.path.basename(folder.target)))
        else:
            self._write(folder, directory, [], original, model, trial)
            barrier()

    def _clean_up(self) -> None:
        """Complete or remove what an interrupted job has left where this rank saves."""
        if self._trainer.args.should_save:
            _complete_all(self._trainer.args.output_dir)

    def settle(self) -> None:
        """Block until all checkpoints are there, or lost."""
        if self._saver is not None and self._follow_ups is not None:
            self._saver.settle(self._config.close_timeout_seconds)
            self._follow_ups.finish(self._config.close_timeout_seconds)

    def end(self) -> str | None:
        """The training has ended: `settle`, and delete what the Trainer would, but never by halves.

        Returns:
            The best checkpoint, as the Trainer names it; None where there is none, or it is lost.

        Raises:
            CheckpointNotFoundError: it is lost, and its weights shall be loaded: the Trainer would go on with others.
        """
        self.settle()
        args, best = self._trainer.args, self._trainer.state.best_model_checkpoint
        if best is None:
            return None
        path = os.path.realpath(best)
        error = self._lost.get(path)
        if error is not None and args.load_best_model_at_end:
            raise CheckpointNotFoundError(f"{best}: the best checkpoint is lost: {error}") from error
        if error is not None:
            logger.warning("%s: the best checkpoint is lost, and nothing is kept for it: %s", best, error)
            return None
        if args.should_save and args.save_total_limit == 1 and os.path.isdir(path):
            self._remove(other for other in Series(os.path.dirname(path), PREFIX, 1).numbers() if other != path)
        return str(best)

    def _save(self, folder: SavingFolder, write: Callable[[], None]) -> None:
        """On a rank that saves: have the Trainer write all its files, and commit them."""
        saver, follow_ups = self._open()
        if os.path.lexists(folder.root):
            self.settle()  # the same step, a moment ago
        folder.make()
        attempt = saver.begin(folder.path, os.path.basename(folder.path), update_latest=False)
        try:
            with diverted(self._divert(saver, attempt, folder)):
                write()
            barrier()  # the other ranks have put their files into the folder
            folder.make_durable()
            saver.commit(attempt)
        except BaseException as error:
            saver.abort(attempt, f"{type(error).__name__}: {error}")
            self._given_up.append(folder)
            folder.discard()
            raise
        limit, best = self._trainer.args.save_total_limit, self._trainer.state.best_model_checkpoint
        follow_ups.after(attempt.committed, lambda error: self._settled(error, folder, limit, best))

    def _write(
        self,
        folder: SavingFolder,
        directory: str,
        pushes: list[str],
        original: Callable[..., None],
        model: Any,
        trial: Any,
    ) -> None:
        """Let the Trainer write its checkpoint into the hidden folder, and say in it that it is in ``directory``."""
        trainer, state = self._trainer, self._trainer.state

        def rename_best() -> None:
            best, step = state.best_model_checkpoint, state.best_global_step
            if best is not None and os.path.dirname(best) == folder.root:
                state.best_model_checkpoint = os.path.join(directory, os.path.basename(best))
            elif step and os.path.isdir(path := os.path.join(directory, f"{PREFIX}{step}")):
                state.best_model_checkpoint = path  # the run's folder may have been moved since

        def save_to_json(path: str) -> None:
            rename_best()
            type(state).save_to_json(state, path)

        with contextlib.ExitStack() as undo:
            for owner, name, value in (
                (trainer, "_get_output_dir", lambda *_, **__: folder.root),
                (trainer, "_push_from_checkpoint", pushes.append),
                (state, "save_to_json", save_to_json),
            ):
                undo.enter_context(_replaced(owner, name, value))
            original(model, trial)
        rename_best()

    def _open(self) -> tuple[Saver, FollowUps]:
        if self._saver is None or self._follow_ups is None:
            self._saver = Saver(self._config, run_id=uuid.uuid4().hex[:12], forgiving=True)
            self._follow_ups = FollowUps("datastates-trainer")
        return self._saver, self._follow_ups

    def _divert(self, saver: Saver, attempt: Attempt, folder: SavingFolder) -> Divert:
        """What is offered the files of one checkpoint: the large ones are saved lazily."""
        restless, torn = STEPPED.eager_rule(self._since), saver.torn_fqns
        rule = EagerRule(self._config.eager_bytes, lambda fqn, tensor: fqn in torn or restless(fqn, tensor))

        def divert(state: object, path: str, *, is_flat: bool) -> bool:
            if not os.path.realpath(path).startswith(folder.path + os.sep):
                return False
            tensors = [tensor for _, tensor in named_tensors(state).values()]
            if sum(tensor.numel() * tensor.itemsize for tensor in tensors) <= self._config.eager_bytes:
                return False
            if is_flat:
                flat = cast(dict[str, torch.Tensor], state)
                saver.save_plan(lambda captures: plan_flat(flat, captures.capture, rule), path, attempt=attempt)
            elif path.endswith(".safetensors"):
                return False  # a pickle, whatever its name says
            else:
                saver.save(state, path, attempt=attempt, is_eager=restless)
            return True

        return divert

    def _settled(self, error: BaseException | None, folder: SavingFolder, limit: int | None, best: str | None) -> None:
        """A checkpoint is complete, or lost."""
        if error is not None:
            self._lost[folder.target] = error
            folder.discard()
            return
        folder.publish()
        self._lost.pop(folder.target, None)
        self._order[folder.target] = 1 + max(self._order.values(), default=0)
        if limit is not None and limit > 0:
            self._rotate(os.path.dirname(folder.target), limit, best)

    def _rotate(self, run_dir: str, limit: int, best: str | None) -> None:
        """As the Trainer does it: the youngest stays, and the best; those of this run are younger than all others."""
        numbers = Series(run_dir, PREFIX, limit).numbers()
        ranked = sorted(numbers, key=lambda path: (self._order.get(path, 0), numbers[path]))
        keep = set(ranked[-1:])
        if best is not None and os.path.realpath(best) in numbers:
            keep.add(os.path.realpath(best))
        for path in reversed(ranked):
            if len(keep) < limit:
                keep.add(path)
        self._remove(path for path in ranked if path not in keep)

    def _remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            try:
                remove_folder(path)
            except DataStatesError as error:
                logger.warning("%s stays, it cannot be deleted: %s", path, error)

    def _close(self) -> None:
        """Wait for all checkpoints; raises why the last one is lost."""
        saver, follow_ups = self._saver, self._follow_ups
        if saver is None or follow_ups is None:
            return
        try:
            self.settle()
        finally:
            self._saver = self._follow_ups = None
            follow_ups.close()
            try:
                saver.close(self._config.close_timeout_seconds)
            finally:
                while self._given_up:
                    self._given_up.pop().discard()

    def _close_quietly(self) -> None:
        """The training has failed: that is what the caller hears of."""
        try:
            self._close()
        except (DataStatesError, OSError):
            logger.exception("datastates: not all checkpoints are there")


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give one object another attribute for a while, whether it had one of its own or that of its class."""
    own = vars(owner)
    before = own.get(name, own)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is own:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class _Settle(TrainerCallback):
    """All checkpoints are there before the Trainer, or another callback, looks at them at the end of the training.

    Source: transformers 5.24, trainer.py: what follows ``_inner_training_loop``'s steps begins with a log of the
    training's duration, on all ranks; then the best checkpoint is loaded and others are deleted.
    """

    def __init__(self, checkpoints: _Checkpoints) -> None:
        self._checkpoints = checkpoints

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        if "train_runtime" in (logs or {}):
            self._end(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self._end(state)

    def _end(self, state: Any) -> None:
        state.best_model_checkpoint = done_by_all(self._checkpoints.end)


def _complete_all(output_dir: str) -> None:
    """`complete_interrupted`, and the folders that the Trainer makes on SIGTERM before it calls for the save."""
    complete_interrupted(output_dir, PREFIX)
    for path in Series(os.path.realpath(output_dir), PREFIX, 1).numbers():
        if os.listdir(path) == [_UNFINISHED_MARK]:
            remove_folder(path)


def _last_checkpoint(output_dir: str) -> str | None:
    if not os.path.isdir(output_dir):
        return None
    _complete_all(output_dir)
    return cast("str | None", get_last_checkpoint(output_dir))  # type: ignore[no-untyped-call]
