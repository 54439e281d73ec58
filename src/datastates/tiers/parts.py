"""How large the parts of an upload are."""

from __future__ import annotations

MAX_PARTS = 10_000
"""Parts of one upload. Source: Amazon S3 User Guide, "Amazon S3 multipart upload limits"."""

MIN_PART_BYTES = 16 << 20
"""More than the 5 MiB that S3 asks for, so that a part takes longer than its request."""

MEMORY_BYTES = 256 << 20
"""So much of one upload is in memory at most, unless a single part is larger."""

_STEP_BYTES = 1 << 20
_MAX_IN_FLIGHT = 4


def part_nbytes(nbytes: int) -> int:
    """The size of all parts but the last of an object of so many bytes: 16 MiB, or as large as 10,000 parts need.

    All parts are of one size, which some stores (R2) ask for.
    """
    needed = -(-nbytes // MAX_PARTS)
    return max(MIN_PART_BYTES, -(-needed // _STEP_BYTES) * _STEP_BYTES)


def num_in_flight(part: int) -> int:
    """How many parts of that size are sent at a time."""
    return max(1, min(_MAX_IN_FLIGHT, MEMORY_BYTES // part))
