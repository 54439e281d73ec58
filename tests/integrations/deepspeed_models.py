"""Small models for DeepSpeed jobs, each with something that a lazy save could get wrong."""

from __future__ import annotations

import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

WIDTH = 64
NUM_PIPELINE_LAYERS = 12
"""More than ten, so that names of layers need a numeric order."""


class Net(torch.nn.Module):
    """Two large weights, and a large buffer that forward changes in place."""

    def __init__(self, width: int = WIDTH, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, hidden)
        self.second = torch.nn.Linear(hidden, width)
        self.norm = torch.nn.LayerNorm(width)
        self.register_buffer("average", torch.zeros(100, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average += 1.0
        return self.norm(self.second(torch.relu(self.first(x)))).square().mean()


class TiedNet(Net):
    """Decoder and encoder are one weight under two names."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.second.weight = self.first.weight


class FrozenNet(Net):
    """A frozen weight beside trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.frozen(x))


class AdapterNet(Net):
    """Everything is frozen but a small adapter of two thin matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = torch.nn.Linear(WIDTH, 8, bias=False)
        self.up = torch.nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.up(self.down(x)))


class ExpertNet(torch.nn.Module):
    """A mixture of four experts between two dense layers; half of them on each of two ranks."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        expert = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH))
        self.moe = MoE(WIDTH, expert, num_experts=4, ep_size=ep_size, k=1, use_rts=False)
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, balance, _ = self.moe(torch.relu(self.first(x)))
        return self.last(hidden).square().mean() + 0.01 * balance


class Attention(torch.nn.Module):
    """One block with the names that tensor parallelism looks for; its projections are cut between the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.o_proj = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.o_proj(torch.relu(self.q_proj(x)))


class ParallelNet(torch.nn.Module):
    """Two blocks to be cut, and a weight that every rank has as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Attention(), Attention()])
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).square().mean()


class Scale(torch.nn.Module):
    """A pipeline layer without any tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def mean_square(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def pipeline() -> PipelineModule:
    """Two stages of six layers."""
    layers = [LayerSpec(torch.nn.Linear, WIDTH, WIDTH) for _ in range(NUM_PIPELINE_LAYERS - 1)]
    layers.insert(1, LayerSpec(Scale))
    return PipelineModule(layers, num_stages=2, loss_fn=mean_square, partition_method="uniform")


def tied_pipeline() -> PipelineModule:
    """First and last layer are one weight, on two stages."""
    tied = [TiedLayerSpec("ends", torch.nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    inner = [LayerSpec(torch.nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    return PipelineModule([tied[0], *inner, tied[1]], num_stages=2, loss_fn=mean_square, partition_method="uniform")
