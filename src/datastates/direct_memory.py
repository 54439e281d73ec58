"""How memory must be aligned for a file to be read into it past the page cache.

Source: statx(2), ``STATX_DIOALIGN`` of Linux 6.1, and ``struct statx`` in ``linux/stat.h``.
"""

from __future__ import annotations

import ctypes
import sys

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_MASK_OFFSET, _MEMORY_OFFSET, _FILE_OFFSET, _STRUCT_BYTES = 0, 152, 156, 256

_libc = ctypes.CDLL(None, use_errno=True)


def memory_alignment(descriptor: int, default: int) -> int:
    """A multiple of what addresses must be, where offset and length of a read are multiples of ``default``.

    Never more than ``default``, which is the answer where the kernel does not tell.
    """
    answer = (ctypes.c_uint8 * _STRUCT_BYTES)()
    statx = getattr(_libc, "statx", None)
    arguments = ctypes.c_int(descriptor), b"", ctypes.c_int(_AT_EMPTY_PATH), ctypes.c_uint(_STATX_DIOALIGN)
    if statx is None or statx(*arguments, ctypes.byref(answer)) != 0:
        return default
    mask, memory, offset = (
        int.from_bytes(answer[begin : begin + 4], sys.byteorder)
        for begin in (_MASK_OFFSET, _MEMORY_OFFSET, _FILE_OFFSET)
    )
    is_told = mask & _STATX_DIOALIGN and memory and offset and default % offset == 0
    return min(memory, default) if is_told else default
