"""A GPT in the plain form: what the training step of the GPU check trains, and the data that it is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Size of a model and of a batch. ``num_parameters`` is about ``12 * layers * width**2 + vocabulary * width``."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    sequences: int


BILLION = Shape(layers=20, width=2048, heads=16, vocabulary=32768, context=1024, sequences=16)
TINY = Shape(layers=2, width=32, heads=2, vocabulary=64, context=16, sequences=2)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.first_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))


class Gpt(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting each next token."""
        x = self.tokens(tokens[:, :-1]) + self.positions.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """A model with AdamW, weights and moments in bfloat16; where a batch does not fit the device, it is halved."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            self.model = Gpt(shape).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self._device = device
        self._shape = shape
        self.sequences = shape.sequences

    def warm_up(self) -> None:
        """Steps that make the optimizer's moments and find the batch that fits."""
        while True:
            try:
                for _ in range(3):
                    self.backward()
                    self.step()
                return
            except torch.OutOfMemoryError:
                if self.sequences == 1:
                    raise
            self.optimizer.zero_grad(set_to_none=True)
            self.sequences //= 2

    def backward(self) -> None:
        shape = (self.sequences, self._shape.context)
        tokens = torch.randint(0, self._shape.vocabulary, shape, device=self._device)
        self.model(tokens).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def nbytes_of(state: object) -> int:
    """Bytes of all tensors in nested containers."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(nbytes_of(value) for value in values)
