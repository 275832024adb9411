"""The command line. Nothing here imports torch, numpy or pydantic until a verb needs them."""

from __future__ import annotations

import os
import sys
import threading

READER = "read-ahead"  # the thread that waits for stdin


def main() -> None:
    """Run the command line and leave with its exit code."""
    from regard.cli.app import run

    code = run()
    if any(thread.name == READER for thread in threading.enumerate()):
        # It holds stdin, which Python would wait for on its way out.
        if sys.stdout is not None:
            sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)
