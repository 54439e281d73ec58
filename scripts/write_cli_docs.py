"""Writes into docs/cli.md what ``datastates COMMAND --help`` and the table of exit codes say.

Each block of the document is replaced that stands between ``<!-- help: COMMAND -->`` (or ``<!-- exit codes -->``) and
``<!-- end -->``, each in a line of its own. ``--check`` writes nothing, and ends with 1 where the document is out of
date. A command that has no section yet gets one at the end of "Commands".
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from click.testing import CliRunner
from rewriting import rewrite

from datastates.cli import exit_codes, main
from datastates.cli.main import COMMANDS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
WIDTH = 100

_HELP = re.compile(r"^<!-- help: (\w*) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
_CODES = re.compile(r"^<!-- exit codes -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
_LAST_OF_COMMANDS = "<!-- end of commands -->\n"


def updated(text: str) -> str:
    """The document with all blocks of today, and a section for every command."""
    for name in sorted(COMMANDS):
        if f"<!-- help: {name} -->" not in text:
            section = f"### {name}\n\n<!-- help: {name} -->\n<!-- end -->\n\n"
            text = text.replace(_LAST_OF_COMMANDS, section + _LAST_OF_COMMANDS)
    text = _HELP.sub(lambda found: _block(f"help: {found[1]}", f"```text\n{help_of(found[1])}```\n"), text)
    return _CODES.sub(lambda _: _block("exit codes", exit_code_table()), text)


def _block(name: str, content: str) -> str:
    return f"<!-- {name} -->\n{content}<!-- end -->"


def help_of(command: str) -> str:
    """What ``--help`` says, of the program itself where the command is empty."""
    arguments = [command, "--help"] if command else ["--help"]
    done = CliRunner().invoke(main, arguments, prog_name="datastates", terminal_width=WIDTH, max_content_width=WIDTH)
    if done.exit_code != 0:
        raise RuntimeError(f"datastates {' '.join(arguments)} failed: {done.output}")
    return "\n".join(line.rstrip() for line in done.output.splitlines()) + "\n"


def exit_code_table() -> str:
    """The exit codes as a table of Markdown."""
    rows = [
        (exit_codes.SUCCESS, "done, and nothing is wrong"),
        (exit_codes.NEGATIVE, "done, and the answer is no: something is wrong, or different"),
        (exit_codes.USAGE, "wrong arguments"),
        *sorted([*((code, meaning) for _, code, meaning in exit_codes.BY_ERROR), *_faults()]),
        (exit_codes.DEFECT, "a defect of datastates itself; `--debug` shows where"),
        (exit_codes.INTERRUPTED, "interrupted by Ctrl-C"),
    ]
    return "".join(["| code | meaning |\n|---|---|\n", *(f"| {code} | {meaning} |\n" for code, meaning in rows)])


def _faults() -> list[tuple[int, str]]:
    """Those of `verify` that share no code with an error."""
    known = {code for _, code, _ in exit_codes.BY_ERROR}
    return [(fault.exit_code, fault.meaning) for fault in exit_codes.Fault if fault.exit_code not in known]


def run(arguments: list[str]) -> int:
    return rewrite(DOCUMENT, updated, arguments, __file__)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
