"""What "the same state" means: types, order and bits."""

from __future__ import annotations

import struct
from typing import Any

import numpy
import torch

from datastates.copying import copy_to_bytes


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(copy_to_bytes(tensor))


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    """Compare recursively; floats by their bits, dictionaries with their order."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert_same_tensor(found, expected, where)
    elif isinstance(expected, dict):
        assert len(found) == len(expected), where
        for (found_key, found_value), (key, value) in zip(found.items(), expected.items(), strict=True):
            assert_same(found_key, key, f"key of {where}")
            assert_same(found_value, value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert struct.pack(">d", found) == struct.pack(">d", expected), where
    elif isinstance(expected, complex):
        assert_same((found.real, found.imag), (expected.real, expected.imag), where)
    elif isinstance(expected, (numpy.ndarray, numpy.generic)):
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        assert found.tobytes() == expected.tobytes(), where
    else:
        assert found == expected, where


def assert_same_tensor(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    assert found.dtype is expected.dtype, where
    assert found.shape == expected.shape, where
    assert found.layout is expected.layout, where
    assert found.requires_grad == expected.requires_grad, where
    if expected.layout is torch.strided and not expected.is_quantized:
        assert bits(found) == bits(expected), where
    elif expected.is_quantized:
        assert bits(found.int_repr()) == bits(expected.int_repr()), where
        assert torch.equal(found.dequantize(), expected.dequantize()), where
    else:
        assert torch.equal(found.to_dense(), expected.to_dense()), where
