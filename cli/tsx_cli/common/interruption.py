"""Signals that end a run early, so that it reports what there is."""

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
    """Ctrl-C, SIGTERM and the end of the terminal: the first raises KeyboardInterrupt where the run
    is, which reports what there is, or calls `begin` instead, which has the run end soon; the
    second ends this process once `abandon` is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came += 1
        if came == 1 and begin is not None:
            begin()
            return
        if came == 1:
            raise KeyboardInterrupt
        abandon()
        os._exit(INTERRUPTED)

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
