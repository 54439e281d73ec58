"""Lightning with lazily saved checkpoints: one more plugin, and nothing else.

    python examples/lightning_training.py --out runs/lightning --steps 40

Give the same command again, with more steps, and it goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from datastates.integrations.lightning import DataStatesCheckpointIO


class Denoiser(pl.LightningModule):
    """Learns to undo noise on random vectors."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        noisy = batch + 0.1 * torch.randn_like(batch)
        loss = torch.nn.functional.mse_loss(self.layers(noisy), batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    pl.seed_everything(7)
    data = torch.utils.data.DataLoader(torch.randn(512, 256), batch_size=16)
    trainer = pl.Trainer(
        max_steps=options.steps,
        plugins=[DataStatesCheckpointIO(host_cache_gb=0.25)],
        callbacks=[ModelCheckpoint(options.out, every_n_train_steps=10, monitor="loss", save_top_k=2, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Denoiser(), data, ckpt_path="last")
    print(f"step {trainer.global_step}, loss {trainer.callback_metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
