"""Checks that the documents tell the truth about the repository: links, paths, commands and examples in them are alive.

For every Markdown file of the repository: relative links and their anchors exist, paths in `code` exist, with the
function behind ``::``, ``make`` targets and scripts in shell blocks exist, Python blocks compile, JSON blocks parse.
Nothing is fetched or run.
Prints each finding as ``file:line: what is wrong`` and ends with 1 when there is one.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "scripts")

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_CODE_PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)(?:::(\w+))?`")
_FENCE = re.compile(r"^(```+)\s*(\w*)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
_MAKE = re.compile(r"^\s*(?:\$ )?(?:\w+=\S+ )*make( .*)?$", re.MULTILINE)
_SCRIPT = re.compile(rf"(?:^|\s)((?:{'|'.join(FOLDERS)})/[\w./-]+\.py|scripts/\w+)(?=\s|$)", re.MULTILINE)


def documents(root: Path) -> list[Path]:
    """The Markdown files that belong to the repository, not those of a virtual environment or of a run's output."""
    return sorted([*root.glob("*.md"), *(path for folder in FOLDERS for path in root.glob(f"{folder}/**/*.md"))])


def problems(path: Path, root: Path) -> Iterator[str]:
    """What is wrong in one document, one line each."""
    text = path.read_text("utf-8")
    prose = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    name = path.relative_to(root)
    for found in _LINK.finditer(prose):
        if wrong := _wrong_link(found[1], path):
            yield f"{name}:{_line(prose, found.start())}: {wrong}"
    for found in _CODE_PATH.finditer(prose):
        if wrong := _wrong_path(found[1], found[2], root):
            yield f"{name}:{_line(prose, found.start())}: {wrong}"
    for block in _FENCE.finditer(text):
        for wrong in _wrong_block(block[2], block[3], root):
            yield f"{name}:{_line(text, block.start())}: {wrong}"


def _wrong_path(path: str, function: str | None, root: Path) -> str:
    """A path must exist; a function behind ``::`` (a test) must be defined there."""
    if not (root / path).exists():
        return f"`{path}` does not exist"
    if function and not re.search(rf"^\s*def {function}\(", (root / path).read_text("utf-8"), re.MULTILINE):
        return f"`{path}` has no function {function}"
    return ""


def _wrong_link(target: str, path: Path) -> str:
    if re.match(r"[a-z]+:", target):
        return ""
    file, _, anchor = target.partition("#")
    destination = path.parent / file if file else path
    if not destination.exists():
        return f"the link {target} leads to nothing"
    if anchor and destination.suffix == ".md" and anchor not in _anchors(destination.read_text("utf-8")):
        return f"the link {target} leads to no heading"
    return ""


def _anchors(text: str) -> set[str]:
    """Anchors of the headings of a document. Source: GitHub's rule, lower case, punctuation out, blanks to hyphens."""
    headings = re.findall(r"^#+\s+(.*?)\s*$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _wrong_block(language: str, code: str, root: Path) -> Iterator[str]:
    if language in ("sh", "bash", "console", "shell"):
        yield from _wrong_commands(code, root)
    elif language in ("python", "py"):
        try:
            compile(code, "<document>", "exec")
        except SyntaxError as error:
            yield f"the Python example does not compile: {error}"
    elif language == "json":
        try:
            json.loads(code if code.lstrip()[:1] in "[{" else f"{{{code}}}")  # also a part of an object: "key": value
        except ValueError as error:
            yield f"the JSON example does not parse: {error}"


def _wrong_commands(code: str, root: Path) -> Iterator[str]:
    targets = set(re.findall(r"^([\w-]+):(?!=)", (root / "Makefile").read_text("utf-8"), re.MULTILINE))
    for found in _MAKE.finditer(code):
        wanted = [
            word for word in shlex.split(found[1] or "", comments=True) if "=" not in word and not word.startswith("-")
        ]
        yield from (f"make has no target {word}" for word in wanted if word not in targets)
    for found in _SCRIPT.finditer(code):
        if not (root / found[1]).exists():
            yield f"the command uses {found[1]}, which does not exist"


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def main(root: Path) -> int:
    found = [problem for path in documents(root) for problem in problems(path, root)]
    for problem in found:
        print(problem)
    if not found:
        print(f"{len(documents(root))} documents: links, paths, commands and examples are alive")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
