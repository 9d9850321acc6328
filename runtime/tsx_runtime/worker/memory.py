"""Memory that a worker has freed and will need again for the next batch."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

KEPT = 64 << 20  # bytes of freed memory that stay with the process
MAPPED = 32 << 20  # bytes from which on a block is mapped on its own, and given back when it is freed; glibc's own upper bound

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Have glibc hold on to what large bodies are read into.

    By default it returns such blocks to the system at once, and the next batch pays for every page anew: a third of the
    worker's time for bodies of 128 KiB, two thirds for 10 MiB.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_TRIM_THRESHOLD, KEPT)
            libc.mallopt(_M_MMAP_THRESHOLD, MAPPED)
