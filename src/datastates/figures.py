"""Numbers for people."""

from __future__ import annotations

_FOUR_DIGITS = 999.5


def figure(value: float) -> str:
    """A number in three digits: ``1.71``, ``504``, ``7150``; never with an exponent from 1000 on."""
    return f"{value:.0f}" if abs(value) >= _FOUR_DIGITS else f"{value:.3g}"
