"""A training loop in the style of Megatron: a pipeline of many layers, ``--save-interval``, resumed from ``latest``."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import distributed

from integrations.deepspeed_runs import join
from integrations.fork_server import announce

NUM_LAYERS, WIDTH = 102, 8  # layer_10 and layer_100 begin alike


class Layer(torch.nn.Linear):
    """A small step, so that gradients live through a hundred of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.tanh(super().forward(x))


def train(folder: str, train_iters: int, save_interval: int, wait: bool) -> None:
    place = Path(folder)
    join(place)
    torch.manual_seed(7)
    module = PipelineModule(
        [LayerSpec(Layer, WIDTH, WIDTH) for _ in range(NUM_LAYERS)],
        num_stages=2,
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "datastates_ckpt": {"host_cache_size": 0.0078125},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    save = place / "checkpoints"
    if (save / "latest").exists():
        engine.load_checkpoint(str(save))
    losses = {}
    while engine.global_steps < train_iters:
        loss = engine.train_batch(batches(engine.global_steps))
        losses[engine.global_steps] = loss.item().hex()
        if engine.global_steps % save_interval == 0:
            engine.save_checkpoint(str(save))
            note_layers(place, engine, module)
    (place / f"losses-{'first' if wait else 'resumed'}-{distributed.get_rank()}.json").write_text(json.dumps(losses))
    if wait:
        engine.checkpoint_engine.ckpt_engine.wait(persist=True)
        announce("ready")
        threading.Event().wait(120)
    engine.destroy()
    distributed.destroy_process_group()


def batches(step: int):
    """Micro-batches that depend on the step alone."""
    generator = torch.Generator().manual_seed(step)
    while True:
        yield torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)


def note_layers(place: Path, engine: deepspeed.PipelineEngine, module: PipelineModule) -> None:
    """What ``torch.save`` would have stored of this stage's layers at this moment."""
    layers = {
        module._local_start + index: {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}
        for index, layer in enumerate(module.forward_funcs)
    }
    torch.save(layers, place / f"layers-{engine.global_steps}-{distributed.get_rank()}.pt")
