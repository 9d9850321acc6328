"""The CloudWatch log of a deployment: its last lines, its lines since a time, and new lines.

The only permission needed is logs:FilterLogEvents.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import NamedTuple

from tsx_cli.deploy.aws.session import Cloud

FAILURE_LINES = 40  # lines shown after a failure
POLL_S = 2.0  # CloudWatch shows lines some seconds late anyway
# The periods that are searched one after the other, until there are enough lines.
PERIODS_S = (600, 3600, 6 * 3600, 48 * 3600, 14 * 86400)


class LogLine(NamedTuple):
    timestamp_ms: int | None  # since 1970; None if the platform gives no time
    stream: str
    text: str

    @property
    def time(self) -> datetime | None:
        return (
            None
            if self.timestamp_ms is None
            else datetime.fromtimestamp(self.timestamp_ms / 1000, timezone.utc)
        )


class CloudWatch:
    def __init__(
        self,
        cloud: Cloud,
        group: str,
        *,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cloud, self.group, self._now, self._sleep = cloud, group, now, sleep

    def last_lines(self, count: int, since: float | None = None) -> list[LogLine]:
        """Return up to `count` of the newest lines; none if there is no log yet.

        Args:
            count: The largest number of lines.
            since: The time of the oldest line, in seconds since 1970.

        Raises:
            CloudError: The log cannot be read.
        """
        for period_s in PERIODS_S:
            start = max(self._now() - period_s, since or 0)
            lines: deque[LogLine] = deque((line for _, line in self._events(start)), maxlen=count)
            if len(lines) == count or start == since:
                break
        return list(lines)

    def follow_from_last(self, count: int, since: float | None = None) -> Iterator[LogLine]:
        """Yield the last lines, then new lines until the iterator is closed."""
        last_lines = self.last_lines(count, since)
        yield from last_lines
        yielded_lines = set(last_lines)
        start = last_lines[-1].timestamp_ms if last_lines else None
        yield from (
            line
            for line in self.follow(self._now() if start is None else start / 1000)
            if line not in yielded_lines
        )

    def follow(self, since: float) -> Iterator[LogLine]:
        """Yield the lines since a time, then new lines until the iterator is closed.

        Each line is yielded once.
        """
        yielded_ids: dict[str, int] = {}
        start = since
        while True:
            for id, line in self._events(start):
                if id not in yielded_ids:
                    yielded_ids[id] = line.timestamp_ms or 0
                    yield line
            newest = max(yielded_ids.values(), default=round(since * 1000))
            # Lines may arrive late and out of order, so the last minute is read again.
            start = newest / 1000 - 60
            yielded_ids = {
                id: time_ms for id, time_ms in yielded_ids.items() if time_ms >= start * 1000
            }
            self._sleep(POLL_S)

    def _events(self, start: float) -> Iterator[tuple[str, LogLine]]:
        """Yield events with their ids, ordered by time."""
        arguments = {"logGroupName": self.group, "startTime": max(0, round(start * 1000))}
        events = self._cloud.list_items(
            "logs", "filter_log_events", "events", f"reading the log {self.group}", **arguments
        )
        for event in sorted(events, key=lambda event: int(event["timestamp"])):
            yield (
                event["eventId"],
                LogLine(
                    event["timestamp"],
                    event.get("logStreamName", ""),
                    event["message"].rstrip("\n"),
                ),
            )
