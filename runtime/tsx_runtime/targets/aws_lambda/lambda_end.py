"""The end of a Lambda environment that is of no further use: a fresh one takes its place."""

from __future__ import annotations

import os
import sys


def leave(why: str, code: int = 1) -> None:
    """At once: a thread that hangs would hold up an orderly end."""
    if why:
        print(f"this environment ends, and a fresh one takes its place: {why}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
