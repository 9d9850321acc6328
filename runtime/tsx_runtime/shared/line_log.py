"""Log lines in TorchServe's format, passed to the logger together: many lines cost one call."""

from __future__ import annotations

import asyncio
import logging
import time

from tsx_runtime.shared.log_format import json_line

EVERY = 0.5  # seconds for which lines are gathered
MOST = 50_000  # lines that may wait; a log that cannot follow loses some, and says how many

ACCESS_LOG, TS_METRICS, MODEL_METRICS = "ACCESS_LOG", "TS_METRICS", "MODEL_METRICS"


class Logbook:
    """A logger under one of TorchServe's names, whose lines are written as they stand: the time, then the text.

    With `threads` each line names, as TorchServe's model_log.log does, the level, the thread and the logger too. With `is_json`, what
    is added is a line as it stands.
    """

    def __init__(self, name: str, *, threads: bool = False, is_json: bool = False) -> None:
        self.name = name
        self.is_json = is_json
        self._logger = logging.getLogger(name)
        self._threads = threads
        self._lines: list[str] = []
        self._lost = 0
        self._second = 0
        self._prefix = ""

    def add(self, text: str, now: float, thread: str = "") -> None:
        """`now` is time.time(). Exactly two colons stand before `text`, which is where TorchServe's benchmark scripts look for it."""
        if len(self._lines) >= MOST:
            self._lost += 1
            return
        if self.is_json:
            self._lines.append(text)
            return
        second = int(now)
        if second != self._second:
            self._second = second
            self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second))
        between = f"[INFO ] {thread} {self.name} - " if self._threads else "- "
        self._lines.append(f"{self._prefix},{int(1000 * (now - second)):03d} {between}{text}")

    def add_soon(self, text: str, now: float) -> None:
        """And write it by itself before long."""
        if not self._lines:
            asyncio.get_running_loop().call_later(EVERY, self.flush)
        self.add(text, now)

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._lost:
            text = f"[{self._lost} lines were dropped]"
            lines.append(json_line(time.time(), "warning", self.name, text) if self.is_json else text)
            self._lost = 0
        if lines:
            self._logger.info("%s", "\n".join(lines), extra={"whole": True, "is_json": self.is_json})
