"""What the scripts have in common that keep a part of a document up to date."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path


def rewrite(document: Path, updated: Callable[[str], str], arguments: Sequence[str], script: str) -> int:
    """Put what ``updated`` makes of a document in its place; gives the exit code of the script.

    Args:
        document: the file.
        updated: gives its text of today.
        arguments: of the script: with ``--check`` nothing is written, and 1 means that the document is out of date.
        script: its file, to be named then.
    """
    found = document.read_text("utf-8")
    wanted = updated(found)
    if found == wanted:
        return 0
    if "--check" in arguments:
        print(f"{document.name} is out of date: run python scripts/{Path(script).name}")
        return 1
    document.write_text(wanted, "utf-8")
    return 0
