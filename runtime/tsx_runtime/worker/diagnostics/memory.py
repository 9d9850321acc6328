"""Keeps freed memory for the next batch, and returns it to the system once the worker is idle."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

from tsx_runtime.heap import return_freed_memory

KEPT = 1 << 30  # bytes of freed memory that stay with the process while it is busy
MAPPED = (
    32 << 20
    # bytes from which on a block is mapped on its own, and given back when it is freed; glibc's own
    # upper bound
)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Make glibc keep freed memory of large bodies and of the model's computations.

    By default it returns such blocks to the system at once, and the next batch pays for every page
    again: a third of the worker's time for bodies of 128 KiB, two thirds for 10 MiB, a quarter for
    a small convolutional network on 32 images.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_TRIM_THRESHOLD, KEPT)
            libc.mallopt(_M_MMAP_THRESHOLD, MAPPED)


class Idle:
    """Returns kept memory to the system once the worker is idle: after two heartbeats without a
    batch between them.
    """

    def __init__(self) -> None:
        self.asked = 0  # since the last batch

    def end(self) -> None:
        self.asked = 0

    def on_ping(self) -> None:
        self.asked += 1
        if self.asked == 2:
            return_freed_memory()
