"""Signals that end a run early; it then reports the results so far."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tsx_cli.common.failure import INTERRUPTED

SIGNALS = [
    number
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if (number := getattr(signal, name, None)) is not None
]


@contextmanager
def interruptible(
    abandon: Callable[[], None] = lambda: None, begin: Callable[[], None] | None = None
) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM and the closing of the terminal.

    The first signal raises KeyboardInterrupt in the run, or calls `begin`. The second one calls
    `abandon` and ends this process.

    Args:
        abandon: Called before the process ends.
        begin: Called for the first signal, to end the run soon.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal_count = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal signal_count
        signal_count += 1
        if signal_count == 1 and begin is not None:
            begin()
            return
        if signal_count == 1:
            raise KeyboardInterrupt
        abandon()
        os._exit(INTERRUPTED)

    previous_handlers = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
