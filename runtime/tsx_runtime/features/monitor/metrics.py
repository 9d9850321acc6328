"""The metrics of monitoring in `/metrics`, and the quality of versions for rollouts."""

from __future__ import annotations

import json
import logging
import time

from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.core.comparison.quality import VersionQuality
from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.errors import Unavailable
from tsx_runtime.feature import Families, Labels
from tsx_runtime.features.monitor.manager import MonitorManager
from tsx_runtime.features.monitor.messages import VersionState

MAX_FIELDS = 50  # fields of a version in `/metrics`, those with the largest drift
FRESH_S = 5.0  # A newer quality is not computed again.
MAX_QUALITIES = 1000  # qualities that are remembered

logger = logging.getLogger("tsx.monitor")


def add_state(families: Families, state: VersionState, labels: Labels) -> None:
    """Add the metrics of a version."""
    for name, text, value in (
        ("samples_total", "samples that the monitor process has examined", state.samples),
        ("windows_total", "windows of samples that were compared", state.windows),
        ("feedback_total", "answers whose truth is known", state.feedback),
        ("drifted", "inputs and facts of answers with an alarm", len(state.drifted)),
        ("drift", "largest population stability index of an input or answer", state.drift),
        ("accuracy", "share of right answers, of those whose truth is known", state.accuracy),
        ("mean_error", "mean absolute error of answers whose truth is known", state.mean_error),
    ):
        if value is not None:
            kind = "counter" if name.endswith("_total") else "gauge"
            families.add_rows(labels, (f"tsx_monitor_{name}", kind, text, value))
    largest = sorted(state.fields.items(), key=lambda item: -item[1])[:MAX_FIELDS]
    text = "population stability index of an input or answer in the last window"
    families.add_by("field", "tsx_monitor_field_drift", text, labels, dict(largest))


def add_process(families: Families, manager: MonitorManager, host: str) -> None:
    """Add the metrics of the monitor process, and of the samples that it does not get."""
    if not manager.samplers:
        return
    labels = {"hostname": host}
    text = "whether the monitor process runs"
    families.add_rows(labels, ("tsx_monitor_process_up", "gauge", text, manager.channel.is_up))
    text = "samples that were not examined"
    for name, sampler in manager.samplers.items():
        reasons = {reason: sampler.dropped[reason] for reason in ("size", "slow", "stopped")}
        families.add_by(
            "reason", "tsx_monitor_dropped_total", text, labels | {"model_name": name}, reasons
        )


class MonitoredQuality:
    """A `QualitySource` that remembers the last results of the monitor process."""

    def __init__(self, manager: MonitorManager) -> None:
        self._manager = manager
        self._qualities: dict[tuple[str, str, float], VersionQuality] = {}
        self._asked: dict[tuple[str, str, float], float] = {}  # time.monotonic() of the last call
        self._tasks = TaskGroup()

    def is_monitored(self, model: str) -> bool:
        return model in self._manager.samplers

    def quality_of(self, model: str, version: str, since: float) -> VersionQuality | None:
        key, now = (model, version, since), time.monotonic()
        if now - self._asked.get(key, -FRESH_S) >= FRESH_S:
            if len(self._asked) >= MAX_QUALITIES:
                self._asked.clear()
                self._qualities.clear()
            self._asked[key] = now
            self._tasks.begin(self._read(*key))
        return self._qualities.get(key)

    async def _read(self, model: str, version: str, since: float) -> None:
        arguments = {"model": model, "version": version, "since": since}
        try:
            status, body = await self._manager.channel.call("quality", arguments)
        except Unavailable as error:
            logger.warning("model %s: its quality is not known: %s", model, error.message)
            return
        if status == 200:
            facts = json.loads(body)
            counts = {name: MetricCounts(**facts[name]) for name in ("accuracy", "error")}
            self._qualities[model, version, since] = VersionQuality(**facts | counts)
