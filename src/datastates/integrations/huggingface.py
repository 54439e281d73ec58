"""Hugging Face: what ``transformers.Trainer`` and Accelerate do to checkpoints that are still in flight, repaired.

Both save with DeepSpeed and add files of their own (random states, the trainer's state, weights) to the same folder.
They delete old checkpoints as soon as a save has returned, and resume from the folder with the highest number,
whether or not it was completed. `repair` wraps those functions; it is called when this package's engine is made in
a process that has imported either, and changes nothing for other checkpoint engines.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from datastates.integrations import accelerate, trainer
from datastates.integrations.agreement import agreed
from datastates.integrations.deepspeed import engine_of
from datastates.integrations.rotation import ROTATION
from datastates.integrations.series import youngest_complete

logger = logging.getLogger(__name__)

_MARK = "_is_of_datastates_for_huggingface"


def repair() -> None:
    """Wrap what there is of the two libraries; idempotent."""
    module = sys.modules.get("transformers.trainer")
    if module is not None:
        if not hasattr(module, "rotate_checkpoints") and not hasattr(module.Trainer, "_rotate_checkpoints"):
            logger.warning(
                "this release of transformers deletes old checkpoints in a way that datastates does not know:"
                ' set "wait_on_save": true in datastates_ckpt, or save_total_limit=None, or install transformers 5'
            )
        _wrap(
            module,
            rotate_checkpoints=trainer.rotate_checkpoints,
            sort_checkpoints=trainer.sort_checkpoints,
            get_last_checkpoint=trainer.get_last_checkpoint,
            deepspeed_load_checkpoint=trainer.deepspeed_load_checkpoint,
        )
        _wrap(
            module.Trainer,
            _rotate_checkpoints=trainer.rotate_checkpoints_of_release_4,
            _sorted_checkpoints=trainer.sorted_checkpoints_of_release_4,
            save_model=trainer.save_model,
            _push_from_checkpoint=trainer.push_from_checkpoint,
        )
    accelerator = sys.modules.get("accelerate.accelerator")
    if accelerator is not None:
        _wrap(accelerator.Accelerator, save_state=accelerate.save_state, load_state=accelerate.load_state)
    if module is not None or accelerator is not None:
        _wrap(DeepSpeedEngine, save_checkpoint=save_checkpoint, destroy=destroy)


def last_checkpoint(output_dir: str, prefix: str = trainer.PREFIX) -> str | None:
    """The checkpoint to resume from: the youngest in a folder that was completed, None where there is none.

    Completes first what an interrupted job has left durable. With ``torch.distributed`` initialised every rank calls
    it, and all get the same answer. Made for
    ``trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))``.

    Args:
        output_dir: the Trainer's ``output_dir``, or Accelerate's ``checkpoints`` (with its ``prefix``).
        prefix: of the checkpoints' names; a number follows.
    """
    return agreed(lambda: youngest_complete(output_dir, prefix))


def save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note the order of the saves: neither numbers nor times of folders tell it reliably."""

    @functools.wraps(original)
    def wrapper(self: DeepSpeedEngine, save_dir: str, *args: Any, **kwargs: Any) -> Any:
        if engine_of(self) is not None and save_dir:
            ROTATION.note_saved(save_dir)
        return original(self, save_dir, *args, **kwargs)

    return wrapper


def destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    """An engine that has ended leaves nothing to be deleted; the process may end without further ado."""

    @functools.wraps(original)
    def wrapper(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        ROTATION.finish()
        return result

    return wrapper


def _wrap(owner: Any, **wraps: Callable[[Any], Any]) -> None:
    """Put each around the owner's function of that name; what is wrapped already, or not there, stays as it is."""
    for name, wrap in wraps.items():
        original = getattr(owner, name, None)
        if original is not None and not hasattr(original, _MARK):
            replacement = wrap(original)
            setattr(replacement, _MARK, True)
            setattr(owner, name, replacement)
