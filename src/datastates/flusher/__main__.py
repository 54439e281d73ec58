"""``python -m datastates.flusher``: started by the trainer's `datastates.flusher.client`, not by people."""

from __future__ import annotations

import sys

from datastates.flusher.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
