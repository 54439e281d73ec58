"""What a diagnosis says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_FOUR_DIGITS = 999.5


class Severity(Enum):
    """How bad a finding is. Only `WRONG` makes a diagnosis a bad one."""

    GOOD = "good"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what it is about, in one word.
        message: what was found, with numbers and units.
        advice: what to do about it; empty where there is nothing to do.
    """

    severity: Severity
    subject: str
    message: str
    advice: str = ""


def figure(value: float) -> str:
    """A number for people, in three digits: ``1.71``, ``504``, ``7150``; never with an exponent from 1000 on."""
    return f"{value:.0f}" if abs(value) >= _FOUR_DIGITS else f"{value:.3g}"


def good(subject: str, message: str, advice: str = "") -> Finding:
    return Finding(Severity.GOOD, subject, message, advice)


def warning(subject: str, message: str, advice: str = "") -> Finding:
    return Finding(Severity.WARNING, subject, message, advice)


def wrong(subject: str, message: str, advice: str = "") -> Finding:
    return Finding(Severity.WRONG, subject, message, advice)
