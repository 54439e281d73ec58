"""What jobs do that train with Hugging Face's Trainer without DeepSpeed."""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback, TrainingArguments

from datastates import removal
from datastates.errors import DataStatesError
from datastates.integrations.saving_folders import SavingFolder
from datastates.integrations.transformers import last_checkpoint, use_datastates
from datastates.saver import Saver, open_savers
from integrations.fork_server import announce, job_number
from integrations.tiny_llama import Sentences, make_model

SETTINGS = {"host_cache_gb": 2**-7, "eager_bytes": 1024}  # so that most tensors of a tiny model are lazy


class Scored(Trainer):
    """A Trainer whose evaluations come out as the script says."""

    scores: dict[int, float] = {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.6}  # noqa: RUF012 - one for all

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_score": self.scores[self.state.global_step]}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class Script(TrainerCallback):
    """Keeps losses and the states of saves; calls what is given when a step begins or ends."""

    def __init__(self) -> None:
        self.losses: dict[int, str] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.optimizers: dict[int, Any] = {}
        self.begin: Any = None
        self.end: Any = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            self.losses[state.global_step] = str(logs["loss"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.begin is not None:
            self.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.end is not None:
            self.end(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        self.weights[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}
        self.optimizers[state.global_step] = copy.deepcopy(optimizer.state_dict())


def make_trainer(
    out: Path, steps: int, *, model: Any = None, kind: type[Trainer] = Trainer, is_lazy: bool = True, **options: Any
) -> tuple[Any, Script]:
    script = Script()
    args = TrainingArguments(
        str(out),
        max_steps=steps,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_steps": 2, **options},
    )
    trainer = kind(
        make_model() if model is None else model,
        args,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=[script],
    )
    return (use_datastates(trainer, **SETTINGS) if is_lazy else trainer), script


def train(folder: str, resume: str, wait_after: int, steps: int, num_ranks: int = 1) -> None:
    """Train, keeping two checkpoints; be killed after a step, or resume: ``"true"``, ``"last"``, or not at all."""
    place = Path(folder)
    rank = int(os.environ["RANK"])
    if num_ranks > 1:
        meeting = f"file://{place}/rendezvous-{job_number()}"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # asked for, and not used any more
    else:
        _alone()
    out = place / "out"
    trainer, script = make_trainer(out, steps, save_total_limit=2, gradient_accumulation_steps=2)
    name = "resumed" if resume else "whole"

    def wait_to_be_killed(step: int) -> None:
        if step == wait_after:
            (place / f"losses-killed-{rank}.json").write_text(json.dumps(script.losses))
            for saver in open_savers():
                saver.wait_staged()
            os.environ["RANK"] = str(rank)
            announce(json.dumps([saver.flusher_pid for saver in open_savers()]))
            threading.Event().wait(120)

    script.begin = wait_to_be_killed if wait_after else None
    checkpoint = {"": None, "true": True, "last": last_checkpoint(str(out)) if resume == "last" else None}[resume]
    trainer.train(resume_from_checkpoint=checkpoint)
    (place / f"losses-{name}-{rank}.json").write_text(json.dumps(script.losses))
    if num_ranks > 1:
        distributed.destroy_process_group()


def _alone() -> None:
    """No other ranks, whatever the server has said."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]


MOMENTS = {
    "before anything is written": (SavingFolder, "make", False),
    "when the folder is made": (SavingFolder, "make", True),
    "behind the weights": (Saver, "save_plan", True),
    "when the Trainer's own files are durable": (SavingFolder, "make_durable", True),
    "when the commit was asked for": (Saver, "commit", True),
    "when all is durable": (SavingFolder, "publish", False),
    "when the folder has its name": (SavingFolder, "discard", False),
    "when the hidden folder is gone": (SavingFolder, "publish", True),
    "in the midst of a deletion": (removal, "_remove_tree", False),
}
"""By what has been done: where, in the third save, a job dies; before or behind that call."""


def die(folder: str, moment: str) -> None:
    """Train, keeping one checkpoint, and be killed at a moment of the third save, on whatever thread that is."""
    _alone()
    owner, name, is_behind = MOMENTS[moment]
    trainer, script = make_trainer(Path(folder) / "out", 6, save_total_limit=1)

    def arm(step: int) -> None:
        if step != 4:
            return
        trainer._datastates.settle()  # the second checkpoint is there, and the first one is deleted
        original = getattr(owner, name)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs) if is_behind else None
            os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, deadly)

    script.begin = arm
    trainer.train()


def train_on_two_nodes(folder: str) -> None:
    """Two nodes of one rank each: both save, in folders of their own, and the second one's last save is lost."""
    place, rank = Path(folder), int(os.environ["RANK"])
    distributed.init_process_group("gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", LOCAL_RANK="0")
    out = place / f"node{rank}"
    trainer, script = make_trainer(out, 4, save_on_each_node=True)
    assert trainer.args.should_save

    def lose(step: int) -> None:
        if step == 4 and rank == 1:
            (saver,) = open_savers()
            saver.settle()
            begin = saver.begin

            def begin_and_fail(*args: Any, **kwargs: Any) -> Any:
                attempt = begin(*args, **kwargs)
                attempt.error = DataStatesError("a fault of the test")
                saver._requests.give_up(attempt)
                return attempt

            saver.begin = begin_and_fail

    script.end = lose
    try:
        trainer.train()
    except DataStatesError as error:
        (place / f"error-{rank}").write_text(str(error))
    assert open_savers() == []
    distributed.destroy_process_group()
