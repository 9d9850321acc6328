"""Logs of lines in TorchServe's format, which pass many lines to the logger in one call."""

from __future__ import annotations

import logging
import time
from functools import lru_cache

FLUSH_INTERVAL_S = 0.5
MAX_BATCH_LINES = 4096  # A larger batch would delay the event loop.

ACCESS_LOG, TS_METRICS, MODEL_METRICS = "ACCESS_LOG", "TS_METRICS", "MODEL_METRICS"


class Logbook:
    """A logger with one of TorchServe's names, whose lines consist of the time and a text.

    With `threads`, each line also contains the level, the thread and the logger's name, as in
    TorchServe's model_log.log. With `is_json`, each added text is a complete line.
    """

    def __init__(self, name: str, *, threads: bool = False, is_json: bool = False) -> None:
        self.name = name
        self.is_json = is_json
        self._logger = logging.getLogger(name)
        self._threads = threads
        self._lines: list[str] = []
        self._level = logging.INFO  # the highest level of the added lines
        self._millisecond = 0
        self._stamp = ""

    def add(self, text: str, now: float, thread: str = "", level: int = logging.INFO) -> None:
        """Add a line.

        Exactly two colons precede `text`: TorchServe's benchmark scripts split the line at them.

        Args:
            text: The line without its time.
            now: The result of time.time().
            thread: The name of the thread, for a log with `threads`.
            level: A level of `logging`.
        """
        if not self._logger.isEnabledFor(level):
            return
        self._level = max(self._level, level)
        if self.is_json:
            self._lines.append(text)
        else:
            millisecond = int(1000 * now)
            if millisecond != self._millisecond:
                self._millisecond, self._stamp = millisecond, stamp(millisecond)
            prefix = (
                f"[{logging.getLevelName(level):<5}] {thread} {self.name} - "
                if self._threads
                else "- "
            )
            self._lines.append(f"{self._stamp} {prefix}{text}")
        if len(self._lines) >= MAX_BATCH_LINES:
            self.flush()

    def add_whole(self, lines: list[str]) -> None:
        """Add lines that already contain their time."""
        self._lines += lines

    def flush(self) -> None:
        """Pass the added lines to the logger as one record."""
        lines, self._lines = self._lines, []
        level, self._level = self._level, logging.INFO
        if lines:
            self._logger.log(
                level, "%s", "\n".join(lines), extra={"whole": True, "is_json": self.is_json}
            )


def stamp(millisecond: int) -> str:
    """Format a time, given in milliseconds since the epoch."""
    return f"{_second(millisecond // 1000)},{millisecond % 1000:03d}"


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second))
