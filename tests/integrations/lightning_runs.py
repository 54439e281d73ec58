"""What jobs do that train with Lightning: a model with dropout, BatchNorm and a frozen teacher that moves."""

from __future__ import annotations

import copy
import json
import os
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed

from datastates.integrations.lightning import DataStatesCheckpointIO
from datastates.ranks import Ranks
from datastates.saver import open_savers
from integrations.fork_server import announce, job_number

WIDTH = 400  # one weight has 625 KiB, so it is lazy


class Model(pl.LightningModule):
    """The losses of its steps depend on everything that a checkpoint has to hold."""

    def __init__(self, width: int = WIDTH, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.teacher = torch.nn.Linear(width, width).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(width)
        self.register_buffer("moving", torch.zeros(width, width))  # large, and changed in forward
        self.losses: dict[int, str] = {}
        self.references: dict[str, Any] = {}  # by step: what was handed over to be saved, copied
        self.watch: Any = None  # called at the beginning of each step

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if self.watch is not None:
            self.watch(self)
        batch = sample(self.trainer.global_step, self.trainer.global_rank)  # Lightning resumes at the first batch
        self.moving.add_(1)
        self.teacher.weight.data.mul_(0.9).add_(self.layers[0].weight.data, alpha=0.1)  # no version counter sees it
        x = torch.nn.functional.dropout(batch, 0.1)
        for layer in self.layers:
            x = self.norm(layer(x))
        loss = (x - self.teacher(batch)).square().mean() + self.moving.mean() / 1000
        self.losses[self.trainer.global_step + 1] = loss.item().hex()
        self.log("score", loss)
        return loss

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("weight", self.layers[0].weight.sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["random"] = Ranks().gather(torch.get_rng_state())
        self.references[str(checkpoint["global_step"])] = copy.deepcopy(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.set_rng_state(checkpoint["random"][Ranks().rank])


def sample(step: int, rank: int = 0) -> torch.Tensor:
    """The batch of a step, the same in every run."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


def batches(rank: int = 0, count: int = 32) -> torch.utils.data.DataLoader[torch.Tensor]:
    """Draws no number that the training would draw."""
    data = [sample(step, rank) for step in range(count)]
    return torch.utils.data.DataLoader(data, batch_size=None, generator=torch.Generator())


def make_trainer(folder: Path, steps: int, plugin: Any, callbacks: Any = (), **options: Any) -> pl.Trainer:
    return pl.Trainer(
        max_steps=steps,
        plugins=[plugin, *options.pop("more_plugins", [])],
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        use_distributed_sampler=False,
        **{"devices": 1, **options},
    )


class Keeper(pl.Callback):
    """Waits to be killed after a step, when all that was saved is in the host cache, or durable."""

    def __init__(self, folder: Path, wait_after: int) -> None:
        self._folder, self._wait_after = folder, wait_after

    def on_train_batch_start(self, trainer: pl.Trainer, module: Model, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.strategy.checkpoint_io.wait()  # the file of step 2 is there, and the link points to it
        if self._wait_after and trainer.global_step == self._wait_after:
            (self._folder / f"losses-killed-{trainer.global_rank}.json").write_text(json.dumps(module.losses))
            for saver in open_savers():
                saver.wait_staged()
            announce(json.dumps([saver.flusher_pid for saver in open_savers()]))
            threading.Event().wait(120)


def train(folder: str, resume: str, wait_after: int, steps: int, num_ranks: int = 1) -> None:
    """Train, saving every second step and keeping the best, and ``last`` as a link; ``resume`` may be empty."""
    place = Path(folder)
    options: dict[str, Any] = {}
    rank = int(os.environ["RANK"])
    if num_ranks > 1:
        meeting = f"file://{place}/rendezvous-{job_number()}"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
        strategy = DDPStrategy(process_group_backend="gloo")
        options = {"strategy": strategy, "devices": num_ranks, "more_plugins": [LightningEnvironment()]}
    torch.manual_seed(11)
    plugin = DataStatesCheckpointIO(host_cache_gb=2**-6)
    keep = ModelCheckpoint(place / "out", every_n_train_steps=2, save_top_k=1, save_last="link", monitor="score")
    model = Model()
    trainer = make_trainer(place, steps, plugin, [keep, Keeper(place, wait_after)], **options)
    torch.manual_seed(100 + rank)
    trainer.fit(model, batches(rank), ckpt_path=resume or None)
    name = "resumed" if resume else "whole"
    (place / f"losses-{name}-{rank}.json").write_text(json.dumps(model.losses))
    trainer.test(model, batches(rank, 1), ckpt_path="best", verbose=False)
    assert keep.best_model_path == trainer.ckpt_path
    if num_ranks > 1:
        distributed.destroy_process_group()
