"""What the ranks of DeepSpeed jobs do whose nodes share no directory; `test_nodes_deepspeed` starts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
from torch import distributed

import nodes_worker
from checkpointer_worker import raised
from datastates.errors import CheckpointNotFoundError
from integrations.deepspeed_worker import Net, train


def begin(place: str) -> Path:
    directory = nodes_worker.enter(place)
    os.environ["LOCAL_RANK"] = str(nodes_worker.RANK % nodes_worker.RANKS_PER_NODE)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    return directory


def make_engine(*, local: bool = True) -> Any:
    distributed.barrier()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "checkpoint": {"use_node_local_storage": local},
        "datastates_ckpt": {"host_cache_size": 0.03125, "shared_directory": False},
    }
    model = Net()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def save(place: str) -> None:
    directory = begin(place)
    engine = make_engine()
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(str(directory))
    print("losses", *train(engine, 2), flush=True)
    engine.destroy()
    assert (directory / "latest").read_text() == "global_step2"
    told = raised(RuntimeError, make_engine, local=False)  # DeepSpeed's own, with the message of ours
    assert '"use_node_local_storage": true' in told, told
    distributed.barrier()


def resume(place: str, tag: str) -> None:
    directory = begin(place)
    engine = make_engine()
    path, _ = engine.load_checkpoint(str(directory))
    assert Path(path).parent.name == tag, path
    print("losses", *train(engine, 2), flush=True)
    engine.destroy()
    distributed.barrier()


def find_nothing(place: str) -> None:
    directory = begin(place)
    engine = make_engine()
    print(raised(CheckpointNotFoundError, engine.load_checkpoint, str(directory)), flush=True)
    engine.destroy()
    distributed.barrier()
