"""The CloudWatch log of a deployment: its last lines, those since a time, and new ones.

One permission is needed for all of it, logs:FilterLogEvents.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import NamedTuple

from tsx_cli.deploy.aws.session import Cloud

GROUPS: Mapping[str, str] = {"sagemaker": "/aws/sagemaker/Endpoints/{}", "lambda": "/aws/lambda/{}"}
LAST = 40  # lines shown after a failure
POLL = 2.0  # seconds between two questions for new lines: CloudWatch itself is some seconds late
LOOKS = (
    600,
    3600,
    6 * 3600,
    48 * 3600,
    14 * 86400,
)  # seconds that are looked back, until there is enough


class LogLine(NamedTuple):
    at: int | None  # milliseconds since 1970; None where it is part of the line, if anywhere
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

    def last(self, count: int, since: float | None = None) -> list[LogLine]:
        """So many of the newest, no older than `since` (seconds since 1970); none where there is no
        log yet. Raises CloudError.
        """
        for look in LOOKS:
            start = max(self._now() - look, since or 0)
            found: deque[LogLine] = deque((line for _, line in self._events(start)), maxlen=count)
            if len(found) == count or start == since:
                break
        return list(found)

    def onwards(self, count: int, since: float | None = None) -> Iterator[LogLine]:
        """These, then new ones as they arrive, until the iterator is closed."""
        seen = self.last(count, since)
        yield from seen
        again = set(seen)
        start = seen[-1].at if seen else None
        yield from (
            line
            for line in self.follow(self._now() if start is None else start / 1000)
            if line not in again
        )

    def follow(self, since: float) -> Iterator[LogLine]:
        """Lines since then, then new ones as they arrive, until the iterator is closed.

        Each line once.
        """
        seen_ids: dict[str, int] = {}
        start = since
        while True:
            for id, line in self._events(start):
                if id not in seen_ids:
                    seen_ids[id] = line.at or 0
                    yield line
            newest = max(seen_ids.values(), default=round(since * 1000))
            start = newest / 1000 - 60  # lines may come late, and in another order
            seen_ids = {id: at for id, at in seen_ids.items() if at >= start * 1000}
            self._sleep(POLL)

    def _events(self, start: float) -> Iterator[tuple[str, LogLine]]:
        """In the order of their time."""
        which = {"logGroupName": self.group, "startTime": max(0, round(start * 1000))}
        found = self._cloud.listed(
            "logs", "filter_log_events", "events", f"reading the log {self.group}", **which
        )
        for event in sorted(found, key=lambda event: int(event["timestamp"])):
            yield (
                event["eventId"],
                LogLine(
                    event["timestamp"],
                    event.get("logStreamName", ""),
                    event["message"].rstrip("\n"),
                ),
            )
