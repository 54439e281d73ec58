"""The command line: ``datastates COMMAND``.

Each command is a module of this package that has a click command named ``command``; it is imported when it is
called, so that ``datastates ls`` loads no torch.
"""

from __future__ import annotations

from datastates.cli.main import main

__all__ = ["main"]
