"""A memory for names that does not grow for ever."""

from __future__ import annotations


class RecentNames:
    """Remembers the youngest names that were added, and forgets the older ones. Not thread safe."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._names: dict[str, None] = {}  # in the order of adding

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        self._names[name] = None
        if len(self._names) > self._limit:
            del self._names[next(iter(self._names))]
