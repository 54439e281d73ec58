"""Dotted names of the leaves of a state, and what a name selects."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

_MAX_HINTS = 3
_MAX_NAMES_COMPARED = 20_000  # comparing is slow, and a hint is only a hint


def join(prefix: str, key: object) -> str:
    """Dotted name of the child ``key`` of the container named ``prefix``."""
    name = key if isinstance(key, str) else repr(key) if isinstance(key, (bytes, tuple)) else str(key)
    return f"{prefix}.{name}" if prefix else name


def beginnings(fqn: str) -> list[str]:
    """Of ``"a.b.c"``: ``"a"``, ``"a.b"`` and the whole name."""
    return [*(fqn[:position] for position, character in enumerate(fqn) if character == "."), fqn]


def selected_by(fqn: str, keys: Collection[str]) -> set[str]:
    """Those of the keys that mean a leaf.

    A key is its name, or the beginning of it up to a dot; ``"a.*"`` means what is below ``"a"``.
    """
    names = beginnings(fqn)
    found = {name for name in names if name in keys}
    return found | {f"{name}.*" for name in names[:-1] if f"{name}.*" in keys}


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names for a message: at most so many of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def near(name: str, known: Iterable[str]) -> str:
    """The known names that resemble one, as the end of a sentence; empty when there are none."""
    candidates = [other for _, other in zip(range(_MAX_NAMES_COMPARED), known, strict=False)]
    last = name.removesuffix(".*").rpartition(".")[2].lower()
    found = difflib.get_close_matches(name, candidates, _MAX_HINTS, cutoff=0.6)
    found += [other for other in candidates if last in other.lower() and other not in found]
    return f"; near names: {', '.join(map(repr, found[:_MAX_HINTS]))}" if found else ""
