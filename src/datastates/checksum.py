"""The one digest of the project: the CRC-32 of zlib and zip, fast where `isal` is installed.

The same value serves as CRC of a zip entry and as digest in a manifest, so every byte is hashed once.

Source: polynomial 0xEDB88320, ITU-T V.42 and PKWARE's APPNOTE 4.4.7.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

_POLYNOMIAL = 0xEDB88320


def combine_crc32(first: int, second: int, second_nbytes: int) -> int:
    """CRC-32 of the concatenation of two byte strings from their CRCs, in pure Python.

    Advancing a CRC over ``n`` zero bytes is a linear map over GF(2). Its matrix is squared for each bit of
    ``n``, so the cost grows with the logarithm of the length.

    Source: zlib's ``crc32_combine`` (Mark Adler).
    """
    if second_nbytes <= 0:
        return first
    matrix = [_POLYNOMIAL] + [1 << bit for bit in range(31)]  # one zero bit
    for _ in range(3):  # one zero byte
        matrix = _squared(matrix)
    remaining = second_nbytes
    while remaining:
        if remaining & 1:
            first = _times(matrix, first)
        remaining >>= 1
        if remaining:
            matrix = _squared(matrix)
    return first ^ second


def _times(matrix: list[int], vector: int) -> int:
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


def _squared(matrix: list[int]) -> list[int]:
    return [_times(matrix, column) for column in matrix]


crc32: Callable[..., int]
"""``crc32(data, value=0)``: the CRC-32 of ``data``, continued from ``value``. Releases the GIL for large data."""
crc32_combine: Callable[[int, int, int], int]
"""``crc32_combine(first, second, second_nbytes)``: CRC-32 of the concatenation."""

try:
    from isal import isal_zlib
except ImportError:
    crc32, crc32_combine = zlib.crc32, combine_crc32
else:
    crc32, crc32_combine = isal_zlib.crc32, isal_zlib.crc32_combine
