"""What a diagnosis says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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


def good(subject: str, message: str, advice: str = "") -> Finding:
    return Finding(Severity.GOOD, subject, message, advice)


def warning(subject: str, message: str, advice: str = "") -> Finding:
    return Finding(Severity.WARNING, subject, message, advice)


def wrong(subject: str, message: str, advice: str = "") -> Finding:
    return Finding(Severity.WRONG, subject, message, advice)
