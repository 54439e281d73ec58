"""DeepSpeed's checkpoints of ZeRO taken apart, and put together for other tools and other numbers of ranks."""

from __future__ import annotations

from datastates.universal.building import Conversion, Progress
from datastates.universal.convert import convert_to_universal

__all__ = ["Conversion", "Progress", "convert_to_universal"]
