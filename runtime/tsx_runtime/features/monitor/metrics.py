"""The metrics of monitoring in `/metrics`."""

from __future__ import annotations

from tsx_runtime.feature import Families, Labels
from tsx_runtime.features.monitor.manager import MonitorManager
from tsx_runtime.features.monitor.messages import VersionState

MAX_FIELDS = 50  # fields of a version in `/metrics`, those with the largest drift


def add_state(families: Families, state: VersionState, labels: Labels) -> None:
    """Add the metrics of a version."""
    families.add_rows(
        labels,
        (
            "tsx_monitor_samples_total",
            "counter",
            "samples that the monitor process has examined",
            state.samples,
        ),
        (
            "tsx_monitor_windows_total",
            "counter",
            "windows of samples that were compared with the baseline",
            state.windows,
        ),
        (
            "tsx_monitor_drifted",
            "gauge",
            "inputs and facts of answers that have drifted, by the last window",
            len(state.drifted),
        ),
        (
            "tsx_monitor_feedback_total",
            "counter",
            "answers whose truth is known",
            state.feedback,
        ),
    )
    for name, text, value in (
        ("drift", "largest population stability index of an input or answer", state.drift),
        ("accuracy", "share of right answers, of those whose truth is known", state.accuracy),
        ("mean_error", "mean absolute error of answers whose truth is known", state.mean_error),
    ):
        if value is not None:
            families.add_rows(labels, (f"tsx_monitor_{name}", "gauge", text, value))
    largest = sorted(state.fields.items(), key=lambda item: -item[1])[:MAX_FIELDS]
    text = "population stability index of an input or answer in the last window"
    families.add_by("field", "tsx_monitor_field_drift", text, labels, dict(largest))


def add_process(families: Families, manager: MonitorManager, host: str) -> None:
    """Add the metrics of the monitor process, and of the samples that it does not get."""
    if not manager.channel.has_started:
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
