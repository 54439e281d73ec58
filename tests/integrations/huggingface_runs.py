"""What the ranks of a job do that trains with Hugging Face's Trainer, or with Accelerate: train, be killed, resume."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, ProjectConfiguration
from torch import distributed
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers import trainer as trainer_module

from datastates.integrations.huggingface import last_checkpoint
from integrations.deepspeed_runs import join
from integrations.fork_server import announce
from integrations.tiny_llama import LENGTH, VOCABULARY, Sentences, make_model

SCORES = {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.6}  # by step: the best one is neither the first nor the last


def meet(folder: Path) -> None:
    """Meet the other ranks, and have Accelerate believe that a launcher did it."""
    join(folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # asked for, and not used any more


def ds_config(stage: int, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "torch_adam": True}},
        "datastates_ckpt": {"host_cache_size": 0.03125, **section},
    }


class ScriptedTrainer(Trainer):
    """A Trainer whose evaluations come out as the script says."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_score": SCORES[self.state.global_step]}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class Script(TrainerCallback):
    """Stops the flusher of this rank after a step, and has the job killed after a later one."""

    def __init__(self, out: Path, stop_after: int = 0, wait_after: int = 0) -> None:
        self.trainer: Trainer | None = None
        self._out, self._stop_after, self._wait_after = out, stop_after, wait_after
        self.losses: dict[int, str] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        inner = self.trainer.deepspeed.checkpoint_engine.ckpt_engine
        if state.global_step == self._stop_after:
            inner.wait(persist=True)
            distributed.barrier()
            os.kill(inner.saver.flusher_pid, signal.SIGSTOP)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in (logs or {}):
            return
        self.losses[state.global_step] = str(logs["loss"])
        if state.global_step == self._wait_after:
            inner = self.trainer.deepspeed.checkpoint_engine.ckpt_engine
            inner.wait()
            self.write()
            announce(str(inner.saver.flusher_pid))
            threading.Event().wait(120)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        note = self._out / f"weights-{state.global_step}-rank{distributed.get_rank()}"
        note.write_text(digest(self.trainer.deepspeed))

    def write(self) -> None:
        (self._out / f"losses-{os.getpid()}-rank{distributed.get_rank()}.json").write_text(json.dumps(self.losses))


def digest(engine: Any) -> str:
    """A digest of this rank's master weights."""
    groups = (
        engine.optimizer.fp32_partitioned_groups_flat
        if engine.zero_optimization_stage() == 3
        else engine.optimizer.single_partition_of_fp32_groups
    )
    return hashlib.sha256(b"".join(group.detach().numpy().tobytes() for group in groups)).hexdigest()


def train(folder: str, stage: int, resume: str, stop_after: int, wait_after: int, max_steps: int) -> None:
    """Train with the Trainer, keeping one checkpoint beside the best.

    ``resume``: ``"no"``, ``"true"`` for ``resume_from_checkpoint=True``, or ``"last"`` for `last_checkpoint`.
    """
    place = Path(folder)
    meet(place)
    out = place / "out"
    args = TrainingArguments(
        str(out),
        deepspeed=ds_config(stage),
        max_steps=max_steps,
        save_steps=2,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        logging_steps=1,
        learning_rate=5e-5,
        lr_scheduler_type="constant",
        per_device_train_batch_size=2,
        bf16=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    script = Script(place, stop_after, wait_after)
    trainer = ScriptedTrainer(
        make_model(), args, train_dataset=Sentences(), eval_dataset=Sentences(), callbacks=[script]
    )
    script.trainer = trainer
    checkpoint = {"no": None, "true": True, "last": None}[resume]
    trainer.train(resume_from_checkpoint=last_checkpoint(str(out)) if resume == "last" else checkpoint)
    script.write()
    (place / f"final-rank{distributed.get_rank()}").write_text(digest(trainer.deepspeed))
    trainer.deepspeed.destroy()
    distributed.destroy_process_group()


def accelerate_steps(accelerator: Any, model: Any, optimizer: Any, count: int, first: int) -> list[str]:
    losses = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def use_accelerate(folder: str, is_resumed: bool) -> None:
    """Train with Accelerate, keeping one checkpoint; be killed while the second one is in flight, or resume."""
    place = Path(folder)
    meet(place)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as its launcher says
    project = ProjectConfiguration(str(place / "project"), automatic_checkpoint_naming=True, total_limit=1)
    plugin = DeepSpeedPlugin(hf_ds_config=ds_config(2))
    PartialState(cpu=True)  # two ranks without a device; Accelerator(cpu=True) would refuse DeepSpeed
    accelerator = Accelerator(deepspeed_plugin=plugin, project_config=project)
    model = make_model()
    model, optimizer = accelerator.prepare(model, DummyOptim(model.parameters()))
    inner = model.checkpoint_engine.ckpt_engine
    if is_resumed:
        accelerator.load_state()
        losses = accelerate_steps(accelerator, model, optimizer, 2, 2)
        project.iteration = 1  # the number of the checkpoint that was lost is free again
        accelerator.save_state()
        (place / f"resumed-rank{accelerator.process_index}.json").write_text(json.dumps(losses))
        model.destroy()
        distributed.destroy_process_group()
        return
    accelerate_steps(accelerator, model, optimizer, 2, 0)
    accelerator.save_state()
    inner.wait(persist=True)
    distributed.barrier()
    os.kill(inner.saver.flusher_pid, signal.SIGSTOP)
    losses = accelerate_steps(accelerator, model, optimizer, 2, 2)
    accelerator.save_state()
    (place / f"killed-rank{accelerator.process_index}.json").write_text(json.dumps(losses))
    inner.wait()
    announce(str(inner.saver.flusher_pid))
    threading.Event().wait(120)


def leave_others_alone(folder: str) -> None:
    """In a process that has an engine of ours: what another Trainer saves without DeepSpeed is its own business."""
    place = Path(folder)
    meet(place)
    engine, *_ = deepspeed.initialize(model=make_model(), config=ds_config(2))
    theirs, ours = place / "theirs", place / "ours"
    for number in (1, 2, 3):
        checkpoint = theirs / f"checkpoint-{number}"
        checkpoint.mkdir(parents=True)
        for name in ("trainer_state.json", "rng_state.pth", "optimizer.pt"):
            (checkpoint / name).write_text("{}")
    assert trainer_module.get_last_checkpoint(str(theirs)) == str(theirs / "checkpoint-3")
    trainer_module.rotate_checkpoints(str(theirs), 1)
    assert sorted(path.name for path in theirs.iterdir()) == ["checkpoint-3"]
    engine.save_checkpoint(str(ours / "checkpoint-5"))
    (ours / "checkpoint-5" / "trainer_state.json").write_text("{}")
    (ours / "checkpoint-6").mkdir()
    assert trainer_module.get_last_checkpoint(str(ours)) == str(ours / "checkpoint-5")
    engine.destroy()
    distributed.destroy_process_group()
