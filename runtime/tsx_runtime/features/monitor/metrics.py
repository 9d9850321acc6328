"""The metrics of monitoring in `/metrics`, and the quality of versions for rollouts."""

from __future__ import annotations

import json
import time
from contextlib import suppress

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
        # The time.monotonic() of the last call, and the last result.
        self._known: dict[tuple[str, str, float], tuple[float, VersionQuality | None]] = {}
        self._tasks = TaskGroup()

    def is_monitored(self, model: str) -> bool:
        return model in self._manager.samplers

    def quality_of(self, model: str, version: str, since: float) -> VersionQuality | None:
        key, now = (model, version, since), time.monotonic()
        called, quality = self._known.get(key, (-FRESH_S, None))
        if now - called >= FRESH_S:
            if len(self._known) >= MAX_QUALITIES:
                self._known.clear()
            self._known[key] = now, quality
            self._tasks.begin(self._read(*key))
        return quality

    async def _read(self, model: str, version: str, since: float) -> None:
        arguments = {"model": model, "version": version, "since": since}
        with suppress(Unavailable):  # The channel logs why.
            status, body = await self._manager.channel.call("quality", arguments)
            if status == 200:
                facts = json.loads(body)
                counts = {name: MetricCounts(**facts[name]) for name in ("accuracy", "error")}
                quality = VersionQuality(**facts | counts)
                self._known[model, version, since] = time.monotonic(), quality
