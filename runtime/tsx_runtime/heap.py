"""Returns freed memory that the C library keeps to the system."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress


def return_freed_memory() -> None:
    """Return it to the system; where the C library is not glibc nothing happens.

    It takes up to 0.1 ms for each MiB.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
