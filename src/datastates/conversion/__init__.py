"""Checkpoints written again in other formats: torch, safetensors, Hugging Face, and torch's distributed one."""

from __future__ import annotations

from datastates.conversion.distributed import convert_to_distributed
from datastates.conversion.huggingface import convert_to_huggingface
from datastates.conversion.same_state import convert_to_safetensors, convert_to_torch
from datastates.conversion.weights_file import convert_to_weights

__all__ = [
    "convert_to_distributed",
    "convert_to_huggingface",
    "convert_to_safetensors",
    "convert_to_torch",
    "convert_to_weights",
]
