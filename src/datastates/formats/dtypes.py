"""Names of dtypes in safetensors files.

Source: ``Dtype`` in ``safetensors/src/tensor.rs`` and ``_TYPES`` in ``safetensors/torch.py``, version 0.8.
"""

from __future__ import annotations

import torch

#: Names under which the stock library gives back the same torch dtype.
SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}

#: Bits per element and torch dtype of every name that may stand in a file. ``F4`` counts single elements, torch
#: pairs of them; the six-bit types have no counterpart in torch.
SAFETENSORS_DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    **{name: (dtype.itemsize * 8, dtype) for dtype, name in SAFETENSORS_NAMES.items()},
    "F8_E8M0": (8, torch.float8_e8m0fnu),
    "F4": (4, torch.float4_e2m1fn_x2),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
}
