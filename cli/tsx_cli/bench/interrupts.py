"""Ctrl-C and SIGTERM end a run in order, with a partial report; once more, and it ends at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tsx_cli.failure import INTERRUPTED


@contextmanager
def interruptible(servers: Callable[[], Iterable[int]]) -> Iterator[None]:
    """The first signal raises KeyboardInterrupt where the run is; the second kills this process and the groups that servers lead."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came += 1
        if came == 1:
            raise KeyboardInterrupt
        for pid in servers():
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(INTERRUPTED)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
