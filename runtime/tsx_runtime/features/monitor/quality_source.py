"""The quality of versions for rollouts, which the monitor process computes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.core.comparison.quality import VersionQuality
from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.errors import Unavailable
from tsx_runtime.features.monitor.manager import MonitorManager

FRESH_S = 5.0  # A newer result is not computed again.

logger = logging.getLogger("tsx.monitor")


class QualityReading(NamedTuple):
    """The last result for a version, or None while the first one is computed."""

    since: float
    at: float  # time.monotonic() of the request for it
    quality: VersionQuality | None


class MonitoredQuality:
    """A `QualitySource` that remembers the last result for each version."""

    def __init__(
        self, manager: MonitorManager, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._manager = manager
        self._monotonic = monotonic
        self._readings: dict[tuple[str, str], QualityReading] = {}
        self._tasks = TaskGroup()

    def is_monitored(self, model: str) -> bool:
        return model in self._manager.samplers

    def quality_of(self, model: str, version: str, since: float) -> VersionQuality | None:
        key, now = (model, version), self._monotonic()
        reading = self._readings.get(key)
        if reading is None or reading.since != since:
            reading = QualityReading(since, float("-inf"), None)
        if now - reading.at > FRESH_S:
            reading = self._readings[key] = reading._replace(at=now)
            self._tasks.begin(self._read(key, since))
        return reading.quality

    async def _read(self, key: tuple[str, str], since: float) -> None:
        arguments = {"model": key[0], "version": key[1], "since": since}
        try:
            status, body = await self._manager.channel.call("quality", arguments)
        except Unavailable as error:
            logger.warning("model %s: its quality is not known: %s", key[0], error.message)
            return
        reading = self._readings[key]
        if status == 200 and reading.since == since:
            facts = json.loads(body)
            counts = {name: MetricCounts(**facts[name]) for name in ("accuracy", "error")}
            quality = VersionQuality(**facts | counts)
            self._readings[key] = reading._replace(quality=quality)
