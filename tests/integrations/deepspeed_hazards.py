"""Shows that a rule is needed: a save that is copied as late as may be is right with it, and torn without."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import datastates.integrations.deepspeed as integration
from datastates.errors import TornSnapshotError
from datastates.staging_job import StagingJob
from integrations.deepspeed_configurations import CONFIGURATIONS
from integrations.deepspeed_runs import Trainer, join, make_engine, swap_files
from integrations.deepspeed_worker import Expected, assert_equal


class LateStaging:
    """Nothing is staged before the fence closes, or before `release`."""

    def __init__(self, inner: Any, *, has_fence: bool) -> None:
        self._gate = threading.Event()
        fill, close = inner.saver._stager._fill, inner.fence.close
        inner.saver._stager._fill = lambda *arguments: (self._gate.wait(60), fill(*arguments))[1]
        if has_fence:
            inner.fence.close = lambda *arguments: (self._gate.set(), close(*arguments))[1]
        else:
            inner.fence.close = lambda *_: None

    def release(self) -> None:
        self._gate.set()


def copy_nothing_eagerly() -> None:
    integration.eager_rule = lambda *_: lambda *_: False


def close_no_fence_in_model_step() -> None:
    """Leave the fence to the hook on ``torch.optim.Optimizer``."""
    step = integration.DeepSpeedEngine._take_model_step
    integration.DeepSpeedEngine._take_model_step = step.__wrapped__


def copy_late(name: str, folder: str, without: str, num_steps_before: int = 3) -> None:
    """Save, train on for two steps with copies that come late, and write down what of the files is torn.

    Args:
        name: of the configuration.
        folder: for the checkpoint.
        without: the rule to leave out: ``"eager"``, ``"model_step"``, ``"fence"``, or empty for none.
        num_steps_before: the save follows so many steps.
    """
    place, configuration = Path(folder), CONFIGURATIONS[name]
    join(place)
    engine = make_engine(configuration, place, eager_bytes=0)
    trainer = Trainer(configuration, engine)
    trainer.steps(num_steps_before)
    inner = engine.checkpoint_engine.ckpt_engine
    if without:
        StagingJob.check_versions = lambda *_: None  # the net under the rules would drop the save: look below it
    if without == "eager":
        copy_nothing_eagerly()
    elif without == "model_step":
        close_no_fence_in_model_step()
    late = LateStaging(inner, has_fence=without != "fence")
    expected, swapped = Expected(engine), swap_files(engine, place / "late")
    client_state = {"user": torch.full((50, 50), 5.0)}
    engine.save_checkpoint(str(place), tag="late", client_state=client_state)
    expected.stop()
    client_state["user"].fill_(-1.0)
    trainer.steps(2)
    late.release()
    try:
        inner.wait(persist=True)
    except TornSnapshotError as error:  # a swap file, which always notices
        torn = set(error.fqns)
    else:
        torn = {fqn for path, state in expected.states.items() for fqn in differing(path, state)}
        torn |= {str(path) for path, data in swapped.items() if path.read_bytes() != data}
    (place / f"torn{distributed.get_rank()}.json").write_text(json.dumps(sorted(torn)))
    engine.destroy()


def differing(path: str, expected: object) -> list[str]:
    """Names of the tensors of a file that are not what was to be saved."""
    found = torch.load(path, map_location="cpu", weights_only=False)
    names: list[str] = []

    def compare(left: Any, right: Any, name: str) -> None:
        if isinstance(right, torch.Tensor):
            if not _is_equal(left, right, name):
                names.append(name)
        elif isinstance(right, dict):
            for key, value in right.items():
                compare(left[key], value, f"{name}.{key}" if name else str(key))
        elif type(right) in (list, tuple):
            for index, value in enumerate(right):
                compare(left[index], value, f"{name}.{index}")

    compare(found, expected, "")
    return names


def _is_equal(found: torch.Tensor, expected: torch.Tensor, name: str) -> bool:
    try:
        assert_equal(found, expected, name)
    except AssertionError:
        return False
    return True
