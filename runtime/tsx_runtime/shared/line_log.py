"""Log lines in TorchServe's format, passed to the logger together: many lines cost one call."""

from __future__ import annotations

import logging
import time
from functools import lru_cache

EVERY = 0.5  # seconds for which lines are gathered
TOGETHER = 4096  # lines that are passed on at once: more in one piece would hold up the event loop

ACCESS_LOG, TS_METRICS, MODEL_METRICS = "ACCESS_LOG", "TS_METRICS", "MODEL_METRICS"


class Logbook:
    """A logger under one of TorchServe's names, whose lines are written as they stand: the time,
    then the text.

    With `threads` each line names, as TorchServe's model_log.log does, the level, the thread and
    the logger too. With `is_json`, what is added is a line as it stands.
    """

    def __init__(self, name: str, *, threads: bool = False, is_json: bool = False) -> None:
        self.name = name
        self.is_json = is_json
        self._logger = logging.getLogger(name)
        self._threads = threads
        self._lines: list[str] = []
        self._level = logging.INFO  # the highest of these
        self._millisecond = 0
        self._stamp = ""

    def add(self, text: str, now: float, thread: str = "", level: int = logging.INFO) -> None:
        """`now` is time.time().

        Exactly two colons stand before `text`, which is where TorchServe's benchmark scripts look
        for it.
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
            between = (
                f"[{logging.getLevelName(level):<5}] {thread} {self.name} - "
                if self._threads
                else "- "
            )
            self._lines.append(f"{self._stamp} {between}{text}")
        if len(self._lines) >= TOGETHER:
            self.flush()

    def add_whole(self, lines: list[str]) -> None:
        """Lines that have their time already."""
        self._lines += lines

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        level, self._level = self._level, logging.INFO
        if lines:
            self._logger.log(
                level, "%s", "\n".join(lines), extra={"whole": True, "is_json": self.is_json}
            )


def stamp(millisecond: int) -> str:
    """`millisecond`: since the epoch."""
    return f"{_second(millisecond // 1000)},{millisecond % 1000:03d}"


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second))
