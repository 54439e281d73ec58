"""What ``transformers.Trainer`` does to checkpoints in flight, wrapped function by function.

Each function of this module takes the original and gives what replaces it; see `datastates.integrations.huggingface`.

Source: transformers 5.24 and 4.57, trainer.py, trainer_utils.py and integrations/deepspeed.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from datastates.errors import CheckpointNotFoundError
from datastates.integrations.agreement import agreed, barrier, settle
from datastates.integrations.deepspeed import engine_of
from datastates.integrations.rotation import ROTATION, set_aside
from datastates.integrations.series import Series, finish_interrupted, is_complete, is_of_datastates, youngest_complete
from datastates.removal import remove_folder
from datastates.saver import open_savers

PREFIX = "checkpoint-"
"""Names of the Trainer's checkpoint folders. Source: transformers, trainer_utils.py, ``PREFIX_CHECKPOINT_DIR``."""


def rotate_checkpoints(original: Callable[..., None]) -> Callable[..., None]:
    """``save_total_limit``: older checkpoints go when a younger one is complete, not when its save is begun."""

    @functools.wraps(original)
    def wrapper(
        output_dir: str,
        save_total_limit: int | None = None,
        best_model_checkpoint: str | None = None,
        use_mtime: bool = False,
        checkpoint_prefix: str = PREFIX.removesuffix("-"),
    ) -> None:
        if ROTATION.has_saved_in(output_dir):
            _rotate(output_dir, save_total_limit, best_model_checkpoint, checkpoint_prefix)
        else:
            original(output_dir, save_total_limit, best_model_checkpoint, use_mtime, checkpoint_prefix)

    return wrapper


def rotate_checkpoints_of_release_4(original: Callable[..., None]) -> Callable[..., None]:
    """`rotate_checkpoints` as a method, in transformers 4."""

    @functools.wraps(original)
    def wrapper(self: Any, use_mtime: bool = False, output_dir: str | None = None) -> None:
        if output_dir is not None and ROTATION.has_saved_in(output_dir):
            _rotate(output_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
        else:
            original(self, use_mtime, output_dir)

    return wrapper


def sort_checkpoints(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Called on all ranks when training has ended, before a checkpoint may be deleted at once: all saves settle."""

    @functools.wraps(original)
    def wrapper(
        output_dir: str,
        checkpoint_prefix: str = PREFIX.removesuffix("-"),
        use_mtime: bool = False,
        best_model_checkpoint: str | None = None,
    ) -> list[str]:
        _end_of_training(output_dir, best_model_checkpoint)
        return original(output_dir, checkpoint_prefix, use_mtime, best_model_checkpoint)

    return wrapper


def sorted_checkpoints_of_release_4(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """`sort_checkpoints` as a method, in transformers 4."""

    @functools.wraps(original)
    def wrapper(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> list[str]:
        if output_dir is not None:
            _end_of_training(output_dir, self.state.best_model_checkpoint)
        return original(self, output_dir, *args, **kwargs)

    return wrapper


def get_last_checkpoint(original: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """``resume_from_checkpoint=True`` in a process that has made an engine before: never an incomplete one."""

    @functools.wraps(original)
    def wrapper(folder: str) -> str | None:
        settle()
        barrier()
        is_ours = agreed(lambda: is_of_datastates(folder, PREFIX))
        return agreed(lambda: youngest_complete(folder, PREFIX)) if is_ours else original(folder)

    return wrapper


def deepspeed_load_checkpoint(original: Callable[..., None]) -> Callable[..., None]:
    """Refuse a checkpoint that was never completed, and see that the next start finds an older one."""

    @functools.wraps(original)
    def wrapper(engine: Any, checkpoint_path: str, *args: Any, **kwargs: Any) -> None:
        if engine_of(engine) is not None and os.path.isdir(checkpoint_path):
            settle()
            barrier()
            if message := agreed(lambda: _fault_of(checkpoint_path)):
                raise CheckpointNotFoundError(message)
        original(engine, checkpoint_path, *args, **kwargs)

    return wrapper


def save_model(original: Callable[..., None]) -> Callable[..., None]:
    """Who calls it wants the files: under ZeRO-3 they may be a checkpoint of DeepSpeed. Raises why that one is lost."""

    @functools.wraps(original)
    def wrapper(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        original(self, output_dir, _internal_call)
        if _internal_call:
            return
        folder = os.path.realpath(self.args.output_dir if output_dir is None else output_dir)
        settle()
        for error in (error for saver in open_savers() for error in saver.losses_in(folder)):
            raise error

    return wrapper


def push_from_checkpoint(original: Callable[..., None]) -> Callable[..., None]:
    """The folder is uploaded as it is: not before it is complete."""

    @functools.wraps(original)
    def wrapper(self: Any, checkpoint_folder: str) -> None:
        settle()
        original(self, checkpoint_folder)

    return wrapper


def _rotate(output_dir: str, limit: int | None, best: str | None, prefix: str = PREFIX.removesuffix("-")) -> None:
    if limit is not None and limit > 0:
        protected = frozenset({os.path.realpath(best)} if best else ())
        ROTATION.ask(Series(os.path.realpath(output_dir), f"{prefix}-", limit, protected))


def _end_of_training(output_dir: str, best: str | None) -> None:
    """All ranks: nothing is in flight, and what the Trainer would not delete at once is deleted."""
    if not open_savers():
        return
    settle()
    ROTATION.finish()
    barrier()  # no rank's flusher still waits for a word of rank 0 in a folder that is deleted here
    series = ROTATION.asked(output_dir)
    if series is not None and series.limit == 1 and best is not None:
        _delete_all_but(best, series)


def _fault_of(folder: str) -> str:
    """Why training cannot go on from a checkpoint, empty where it can; one that no living job owns is set aside."""
    is_owned = finish_interrupted(folder)
    if is_complete(folder):
        return ""
    if is_owned:
        return f"{folder}: a process of an earlier run is still completing it: start again when it has ended"
    if ROTATION.has_saved(folder):
        return f"{folder}: its save is lost (the log says why), load another checkpoint"
    target = set_aside(folder)
    return (
        f"{folder} was never completed, and is now {target}: start again, and training resumes from the youngest"
        " complete checkpoint"
    )


def _delete_all_but(best: str, series: Series) -> None:
    for path in series.numbers():
        if not os.path.samefile(path, best) and not series.is_awaited(path):
            remove_folder(path)
