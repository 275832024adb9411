"""The command line: `app` is the program, and each verb is a module, loaded on use."""

from __future__ import annotations

READER = "read-ahead"  # name of the thread that reads stdin
