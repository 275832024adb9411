"""The command line: `app` is the program, and every verb has a module of its own, which is loaded when it is called."""

from __future__ import annotations

READER = "read-ahead"  # name of the thread that waits for stdin
