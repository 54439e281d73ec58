"""The digest is zlib's CRC-32, whoever computes it."""

from __future__ import annotations

import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates import checksum


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_parts_combine(first: bytes, second: bytes) -> None:
    whole = zlib.crc32(first + second)
    for combine in (checksum.crc32_combine, checksum.combine_crc32):
        assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == whole
    assert checksum.crc32(memoryview(first + second)) == whole
    assert checksum.crc32(second, zlib.crc32(first)) == whole


@pytest.mark.parametrize("nbytes", [1 << 16, (1 << 20) + 3])
def test_long_parts_combine(nbytes: int) -> None:
    tail = bytes(nbytes)
    for combine in (checksum.crc32_combine, checksum.combine_crc32):
        assert combine(zlib.crc32(b"head"), zlib.crc32(tail), nbytes) == zlib.crc32(b"head" + tail)


def test_without_isal() -> None:
    code = (
        "import sys, zlib; sys.modules['isal'] = None\n"
        "from datastates import checksum\n"
        "assert checksum.crc32 is zlib.crc32 and checksum.crc32_combine is checksum.combine_crc32"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
