"""Pretrain a small byte-level GPT with DeepSpeed: saved lazily, resumed to the last bit.

Start it with ``torchrun --nproc-per-node 2`` or ``deepspeed --num_gpus 2``, on GPUs or on CPUs::

    torchrun --standalone --nproc-per-node 2 examples/pretrain_gpt.py \\
        --deepspeed_config examples/ds_config.json --save checkpoints --load checkpoints --save-interval 5 --steps 20

The same command starts and resumes: `--load` with no checkpoint there yet is a fresh start. All of datastates
is the section ``datastates_ckpt`` of the DeepSpeed config; without it DeepSpeed's own engine writes the files.

A resumed run continues as if it had never stopped: weights, optimizer and learning rate schedule are saved by
DeepSpeed, the random states of every rank and the place in the data by this script, as ``client_state``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sysconfig
import time
import zlib
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS; read when CUDA starts

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that the whole field uses
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

VOCABULARY = 256  # a token is a byte
SIZES = {  # layers, heads, width: 0.5, 14 and 85 million parameters
    "tiny": (2, 4, 128),
    "small": (8, 6, 384),
    "medium": (12, 12, 768),
}
DROPOUT = 0.1


class Block(nn.Module):
    """Attention, then a two-layer perceptron; each normalised before and added to its input after."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.projection(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Bytes in, mean cross entropy of the next byte out."""

    def __init__(self, num_layers: int, num_heads: int, width: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.token.weight  # tied: one tensor under two names

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


class Batches:
    """Random windows of a corpus, the same order on every rank; each rank takes its own share of a batch."""

    def __init__(self, corpus: bytes, batch: int, length: int, seed: int) -> None:
        if len(corpus) <= length + 1:
            raise SystemExit(f"pretrain_gpt: the data has {len(corpus)} bytes, --seq {length} needs more")
        self.corpus = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
        self.fingerprint = zlib.crc32(corpus)
        self.batch, self.length = batch, length
        self.generator = torch.Generator().manual_seed(seed)

    def next(self, device: torch.device) -> tuple[Tensor, Tensor]:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        begins = torch.randint(len(self.corpus) - self.length - 1, (world_size, self.batch), generator=self.generator)
        windows = torch.stack([self.corpus[begin : begin + self.length + 1] for begin in begins[rank]])
        windows = windows.to(device).long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["fingerprint"] != self.fingerprint:
            say("note: the data is not what the checkpoint was trained on; the run goes on with the new data")
        self.generator.set_state(state["generator"])


class Recorder:
    """Appends JSON lines: losses from rank 0 (exact, as hexadecimal floats), timings from every rank."""

    def __init__(self, loss_file: str | None, metrics_file: str | None) -> None:
        self.loss_file = loss_file if dist.get_rank() == 0 else None
        self.metrics_file = metrics_file

    def loss(self, step: int, loss: float) -> None:
        append_json(self.loss_file, {"step": step, "loss": loss.hex()})

    def metric(self, event: str, begin: float, **fields: Any) -> None:
        """A record of what happened between `begin` and now, in seconds of the monotonic clock."""
        record = {"event": event, "rank": dist.get_rank(), "begin": begin, "end": time.monotonic(), **fields}
        append_json(self.metrics_file, record)


def append_json(path: str | None, record: dict[str, Any]) -> None:
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")


def say(message: str) -> None:
    if dist.get_rank() == 0:
        print(f"pretrain_gpt: {message}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="DIR", help="save checkpoints into this directory")
    parser.add_argument("--load", metavar="DIR", help="resume from the latest checkpoint there, if there is one")
    parser.add_argument("--save-interval", type=int, default=50, metavar="N", help="save every N steps and at the end")
    parser.add_argument("--steps", type=int, default=200, help="stop after this step (default: 200)")
    parser.add_argument("--model-size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, help="sequences per rank and micro-step (default: the config's)")
    parser.add_argument("--seq", type=int, default=256, help="bytes per sequence (default: 256)")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--data", metavar="PATH", help="a file or directory of text (default: Python's own sources)")
    parser.add_argument("--loss-file", metavar="FILE", help="append step and exact loss here, as JSON lines")
    parser.add_argument("--metrics-file", metavar="FILE", help="append timings of every rank here, as JSON lines")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # the deepspeed launcher's
    parser = deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    if not arguments.deepspeed_config:
        parser.error("--deepspeed_config is required, for example examples/ds_config.json")
    if min(arguments.save_interval, arguments.steps, arguments.seq) < 1:
        parser.error("--save-interval, --steps and --seq must be at least 1")
    return arguments


def read_corpus(path: str | None) -> bytes:
    """The bytes of a file, of all files of a directory in sorted order, or of the standard library's sources."""
    if path and os.path.isfile(path):
        with open(path, "rb") as file:
            return file.read()
    root = path or sysconfig.get_paths()["stdlib"]
    texts = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "test", "tests", "__pycache__"})
        for name in sorted(names):
            if path or name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as file:
                    texts.append(file.read())
    return b"\n".join(texts)


def start_distributed() -> None:
    """Start communication. On CPUs, do without DeepSpeed's own shared-memory collectives: gloo's need no compiler.

    DeepSpeed would compile them at every first start (half a minute), and could not start where there is no compiler.
    """
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)


def build_engine(arguments: argparse.Namespace) -> deepspeed.DeepSpeedEngine:
    with open(arguments.deepspeed_config) as file:
        config = json.load(file)
    if arguments.batch:
        config.pop("train_batch_size", None)
        config["train_micro_batch_size_per_gpu"] = arguments.batch
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(arguments.seed)  # the same weights on every rank ...
    model = GPT(*SIZES[arguments.model_size], arguments.seq)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(arguments.seed + 1 + dist.get_rank())  # ... and another dropout on each
    random.seed(arguments.seed + 1 + dist.get_rank())
    return engine


def describe_engine(engine: deepspeed.DeepSpeedEngine) -> dict[str, Any]:
    """Which checkpoint engine DeepSpeed really uses, asked of the objects themselves."""
    outer = engine.checkpoint_engine
    inner = getattr(outer, "ckpt_engine", None)
    module = type(inner).__module__
    return {"checkpoint_engine": type(outer).__name__, "datastates": module.split(".")[0] == "datastates"}


def random_states() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "device": get_accelerator().get_rng_state(), "python": random.getstate()}


def save(engine: deepspeed.DeepSpeedEngine, directory: str, batches: Batches, recorder: Recorder) -> None:
    """Save everything that a later run needs to go on; with datastates this returns before the copies are made.

    DeepSpeed stores ``client_state`` once, from rank 0, so the random states of all ranks are gathered first.
    """
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, random_states())
    client_state = {"random_states": states, "batches": batches.state_dict()}
    begin = time.monotonic()
    engine.save_checkpoint(directory, client_state=client_state)
    recorder.metric("save_checkpoint", begin, step=engine.global_steps)
    say(f"step {engine.global_steps}: save_checkpoint returned after {time.monotonic() - begin:.3f} s")


def load(engine: deepspeed.DeepSpeedEngine, directory: str, batches: Batches) -> None:
    path, client_state = engine.load_checkpoint(directory)
    if path is None:
        say(f"no checkpoint in {os.path.abspath(directory)} yet: starting from scratch")
        return
    states = client_state["random_states"]
    if len(states) != dist.get_world_size():
        raise SystemExit(f"pretrain_gpt: {path} is of {len(states)} ranks, this run has {dist.get_world_size()}")
    mine = states[dist.get_rank()]
    torch.set_rng_state(mine["torch"])
    get_accelerator().set_rng_state(mine["device"])
    random.setstate(mine["python"])
    batches.load_state_dict(client_state["batches"])
    say(f"resumed from {os.path.abspath(os.path.dirname(path))}, after step {engine.global_steps}")


def train_step(engine: deepspeed.DeepSpeedEngine, batches: Batches) -> float:
    """One optimizer step; returns the mean loss over micro-steps and ranks."""
    total = torch.zeros((), device=engine.device)
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(*batches.next(engine.device))
        engine.backward(loss)
        engine.step()
        total += loss.detach().float()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size() / engine.gradient_accumulation_steps()


def train(engine: deepspeed.DeepSpeedEngine, batches: Batches, arguments: argparse.Namespace, out: Recorder) -> None:
    if engine.global_steps >= arguments.steps:
        say(f"nothing to do: the checkpoint is of step {engine.global_steps}, --steps is {arguments.steps}")
    while engine.global_steps < arguments.steps:
        begin = time.monotonic()
        loss = train_step(engine, batches)
        step = engine.global_steps
        out.metric("step", begin, step=step, loss=loss)
        out.loss(step, loss)
        say(f"step {step}: loss {loss:.4f}, {time.monotonic() - begin:.2f} s")
        if arguments.save and (step % arguments.save_interval == 0 or step == arguments.steps):
            save(engine, arguments.save, batches, out)


def main() -> None:
    arguments = parse_arguments()
    start_distributed()
    engine = build_engine(arguments)
    batches = Batches(
        read_corpus(arguments.data), engine.train_micro_batch_size_per_gpu(), arguments.seq, arguments.seed
    )
    out = Recorder(arguments.loss_file, arguments.metrics_file)
    described = describe_engine(engine)
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    say(f"{parameters / 1e6:.1f} million parameters, {len(batches.corpus) / 2**20:.1f} MiB of text")
    say(f"{dist.get_world_size()} ranks on {get_accelerator().device_name()}, communicating by {dist.get_backend()}")
    activity = "active" if described["datastates"] else "not active"
    say(f"checkpoint engine: {described['checkpoint_engine']}; datastates is {activity}")
    say(f"checkpoints: {os.path.abspath(arguments.save) if arguments.save else 'none are saved without --save'}")
    begin = time.monotonic()
    if arguments.load:
        load(engine, arguments.load, batches)
    out.metric("start", begin, step=engine.global_steps, **described)
    train(engine, batches, arguments, out)
    engine.destroy()  # waits until the last checkpoint is on disk
    say("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
