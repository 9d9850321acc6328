"""Freed memory: kept for the next batch, and returned to the system once the worker is idle."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

from tsx_runtime.heap import return_freed_memory

MAX_KEPT_BYTES = 1 << 30  # freed memory that stays with a busy process
# Larger blocks are mapped on their own and returned when freed. This is glibc's upper bound.
MMAP_THRESHOLD_BYTES = 32 << 20

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Make glibc keep freed memory of large bodies and of the model's computations.

    By default it returns such blocks to the system at once, and the next batch pays for every page
    again: a third of the worker's time for bodies of 128 KiB, two thirds for 10 MiB, a quarter for
    a small convolutional network on 32 images.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # Another C library has no mallopt.
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_TRIM_THRESHOLD, MAX_KEPT_BYTES)
            libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


class Idle:
    """A watch that returns memory after two heartbeats without a batch between them."""

    def __init__(self) -> None:
        self.asked = 0  # heartbeats since the last batch

    def end(self) -> None:
        """Count anew after a batch."""
        self.asked = 0

    def on_ping(self) -> None:
        """Count a heartbeat, and return memory at the second one."""
        self.asked += 1
        if self.asked == 2:
            return_freed_memory()
