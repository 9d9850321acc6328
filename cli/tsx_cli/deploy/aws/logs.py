"""The CloudWatch log of a deployment: its last lines, its lines since a time, and new lines.

The only permission needed is logs:FilterLogEvents.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import NamedTuple

from tsx_cli.deploy.aws.session import Cloud

GROUPS: Mapping[str, str] = {"sagemaker": "/aws/sagemaker/Endpoints/{}", "lambda": "/aws/lambda/{}"}
FAILURE_LINES = 40  # lines shown after a failure
POLL_S = 2.0  # CloudWatch itself is some seconds late
# The periods searched, one after the other, until there are enough lines.
PERIODS_S = (600, 3600, 6 * 3600, 48 * 3600, 14 * 86400)


class LogLine(NamedTuple):
    at: int | None  # milliseconds since 1970; None if the platform gives no time
    stream: str
    text: str

    @property
    def when(self) -> datetime | None:
        return None if self.at is None else datetime.fromtimestamp(self.at / 1000, timezone.utc)


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
        seen = self.last_lines(count, since)
        yield from seen
        shown = set(seen)
        start = seen[-1].at if seen else None
        yield from (
            line
            for line in self.follow(self._now() if start is None else start / 1000)
            if line not in shown
        )

    def follow(self, since: float) -> Iterator[LogLine]:
        """Yield the lines since a time, then new lines until the iterator is closed.

        Each line is yielded once.
        """
        seen_ids: dict[str, int] = {}
        start = since
        while True:
            for id, line in self._events(start):
                if id not in seen_ids:
                    seen_ids[id] = line.at or 0
                    yield line
            newest = max(seen_ids.values(), default=round(since * 1000))
            # Lines may come late, and in another order.
            start = newest / 1000 - 60
            seen_ids = {id: at for id, at in seen_ids.items() if at >= start * 1000}
            self._sleep(POLL_S)

    def _events(self, start: float) -> Iterator[tuple[str, LogLine]]:
        """Yield events with their ids, ordered by time."""
        which = {"logGroupName": self.group, "startTime": max(0, round(start * 1000))}
        events = self._cloud.list_items(
            "logs", "filter_log_events", "events", f"reading the log {self.group}", **which
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
