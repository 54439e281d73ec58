"""The dtypes of both formats by name, with their sizes.

Source: ``Dtype`` in ``safetensors/src/tensor.rs`` and ``_TYPES`` in ``safetensors/torch.py``, version 0.8;
``torch.storage._dtype_to_storage_type_map``.
"""

from __future__ import annotations

#: Bits per element and name in torch of every dtype that may stand in a safetensors file. ``F4`` counts single
#: elements, torch pairs of them; the six-bit types have no counterpart in torch.
SAFETENSORS_TYPES: dict[str, tuple[int, str | None]] = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "F32": (32, "float32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F4": (4, "float4_e2m1fn_x2"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
}

#: Dtype of the elements of each storage class of torch.
STORAGE_TYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}

#: Bytes per element of each dtype of torch.
ITEMSIZES = {
    **{name: bits // 8 for bits, name in SAFETENSORS_TYPES.values() if name is not None and bits >= 8},
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "complex128": 16,
    "quint8": 1,
    "qint8": 1,
    "qint32": 4,
    "quint4x2": 1,
    "quint2x4": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    **{f"bits{name}": size for name, size in (("1x8", 1), ("2x4", 1), ("4x2", 1), ("8", 1), ("16", 2))},
}
