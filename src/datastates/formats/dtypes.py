"""Names of dtypes in safetensors files, as dtypes of torch."""

from __future__ import annotations

import torch

from datastates.contents.dtypes import SAFETENSORS_TYPES

#: Bits per element and torch dtype of every name that may stand in a file, None where this torch has none.
SAFETENSORS_DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    name: (bits, None if torch_name is None else getattr(torch, torch_name, None))
    for name, (bits, torch_name) in SAFETENSORS_TYPES.items()
}

#: Names under which the stock library gives back the same torch dtype.
SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    dtype: name
    for name, (_bits, dtype) in SAFETENSORS_DTYPES.items()
    if dtype is not None and name not in ("F8_E8M0", "F4")
}
