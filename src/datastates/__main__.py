"""``python -m datastates``: the command line."""

from __future__ import annotations

from datastates.cli import main

if __name__ == "__main__":
    main(prog_name="datastates")
