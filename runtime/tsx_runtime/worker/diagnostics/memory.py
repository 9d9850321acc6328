"""Freed memory is kept for the next batch, and returned to the system once the worker is idle."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

from tsx_runtime.heap import return_freed_memory

MAX_KEPT_BYTES = 1 << 30  # the freed memory that a busy worker may keep
# glibc maps each larger block separately and returns it when it is freed. This is its upper limit.
MMAP_THRESHOLD_BYTES = 32 << 20

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Make glibc keep freed memory of large bodies and of the model's computations.

    By default glibc returns such blocks to the system at once, and the next batch must map every
    page again. This costs a third of the worker's time for bodies of 128 KiB, two thirds for 10
    MiB, and a quarter for a small convolutional network on 32 images.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # C libraries other than glibc have no mallopt.
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_TRIM_THRESHOLD, MAX_KEPT_BYTES)
            libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


class IdleWatch:
    """A counter of heartbeats, which returns freed memory at the second one after a batch."""

    def __init__(self) -> None:
        self.heartbeats = 0  # heartbeats since the last batch

    def reset(self) -> None:
        """Start to count again after a batch."""
        self.heartbeats = 0

    def on_ping(self) -> None:
        """Count a heartbeat, and return freed memory at the second one."""
        self.heartbeats += 1
        if self.heartbeats == 2:
            return_freed_memory()
