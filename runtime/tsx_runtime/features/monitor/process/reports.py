"""The report on a model, from the windows of its versions and the counts in the store."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.errors import StoreUnavailable
from tsx_runtime.features.monitor.process.monitor import Monitor, MonitoredVersion
from tsx_runtime.features.monitor.process.store import MonitorStore
from tsx_runtime.features.monitor.report import MonitorReport, VersionComparison, VersionReport
from tsx_runtime.features.monitor.statistics.comparisons import compare_versions
from tsx_runtime.features.monitor.statistics.groups import GroupCount, groups_of
from tsx_runtime.features.monitor.statistics.quality import (
    ErrorSum,
    OutcomeCount,
    accuracy_counts,
    error_counts,
    quality_of,
)

RECENT_S = 7 * 86400  # Older outcomes are read by day.
_PERIOD = "CASE WHEN hour < :recent THEN hour - hour % 24 ELSE hour END * 3600"
_OF_ALL = "FROM tsx_monitor_counts WHERE model = :model AND attribute = ''"
_OF_GROUPS = "FROM tsx_monitor_counts WHERE model = :model AND attribute != ''"
SERVED = f"""
SELECT version, MIN(hour) * 3600, (MAX(hour) + 1) * 3600, SUM(answers) {_OF_ALL} AND kind = 0
GROUP BY version
"""
OUTCOMES = f"""
SELECT version, {_PERIOD}, prediction, truth, CAST(value AS INTEGER), SUM(answers), SUM(confidence)
{_OF_ALL} AND kind = 1 GROUP BY 1, 2, 3, 4, 5 HAVING SUM(answers) > 0
"""
ERRORS = f"""
SELECT version, {_PERIOD}, SUM(answers), SUM(total), SUM(squares)
{_OF_ALL} AND kind = 2 GROUP BY 1, 2 HAVING SUM(answers) > 0
"""
KNOWN_GROUPS = f"""
SELECT version, attribute, value, prediction, truth, SUM(answers), SUM(confidence)
{_OF_GROUPS} AND kind = 1 GROUP BY 1, 2, 3, 4, 5 HAVING SUM(answers) > 0
"""
# Answers whose attribute only feedback has are not among all answers of the group.
OTHER_GROUPS = f"""
SELECT version, attribute, value, NULLIF(prediction, ''), NULL,
  SUM(CASE kind WHEN 0 THEN answers WHEN 1 THEN -answers ELSE 0 END),
  SUM(CASE kind WHEN 0 THEN confidence WHEN 1 THEN -confidence ELSE 0 END)
{_OF_GROUPS} GROUP BY version, attribute, value, prediction
HAVING SUM(CASE kind WHEN 0 THEN answers WHEN 1 THEN -answers ELSE 0 END) > 0
"""
GROUP_ERRORS = f"""
SELECT version, attribute, value, SUM(answers), SUM(total), SUM(squares)
{_OF_GROUPS} AND kind = 2 GROUP BY 1, 2, 3 HAVING SUM(answers) > 0
"""
OPEN_CONTESTS = """
SELECT COUNT(*) FROM tsx_monitor_contests WHERE model = :model AND state = 'open'
"""


class StoredCounts:
    """What the store has of one version."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.samples = 0
        self.outcomes: list[OutcomeCount] = []
        self.errors: list[ErrorSum] = []
        self.groups: list[GroupCount] = []
        self.group_errors: dict[tuple[str, str], MetricCounts] = {}


def read_counts(store: MonitorStore, model: str) -> dict[str, StoredCounts]:
    """Return the counts of a model by version.

    Raises:
        StoreUnavailable: They cannot be read.
    """
    counts = defaultdict[str, StoredCounts](StoredCounts)
    recent = int((time.time() - RECENT_S) // 3600)
    for version, first, last, samples in store.read(SERVED, model=model):
        stored = counts[version]
        stored.first, stored.last, stored.samples = first, min(last, time.time()), int(samples)
    for version, *values in store.read(OUTCOMES, model=model, recent=recent):
        counts[version].outcomes.append(OutcomeCount(*values))
    for version, *values in store.read(ERRORS, model=model, recent=recent):
        counts[version].errors.append(ErrorSum(*values))
    for sql in (KNOWN_GROUPS, OTHER_GROUPS):
        for version, *values in store.read(sql, model=model):
            counts[version].groups.append(GroupCount(*values))
    for version, attribute, value, *sums in store.read(GROUP_ERRORS, model=model):
        counts[version].group_errors[attribute, value] = MetricCounts(*sums)
    return counts


def build_report(monitor: Monitor, model: str) -> MonitorReport:
    """Return the report on a model; without the store, it has the drift only."""
    versions = monitor.versions_of(model)
    config = next((version.config for version in reversed(versions.values())), None)
    stored, contests, problem = dict[str, StoredCounts](), 0, monitor.store_problem
    try:
        monitor.flush()
        stored = read_counts(monitor.store, model)
        contests = monitor.store.read(OPEN_CONTESTS, model=model)[0][0]
    except StoreUnavailable as error:
        problem = error.message
    ended = sorted(stored.keys() - versions.keys(), key=lambda name: stored[name].last or 0.0)
    names = [*reversed(versions), *reversed(ended)]
    counts = {name: stored.get(name, StoredCounts()) for name in names}
    groups_config = config or MonitorConfig.model_validate({})
    report = {
        "model": model,
        "monitoring": bool(versions),
        "config": config,
        "samples": sum(version.samples for version in versions.values()),
        "dropped": monitor.dropped_of(model),
        "problem": problem,
        "versions": [
            _version(name, versions.get(name), counts[name], groups_config) for name in names
        ],
        "comparisons": [
            comparison
            for new, old in pairwise(names)
            for comparison in _comparisons(old, new, counts[old], counts[new])
        ],
        "contests": contests,
    }
    return MonitorReport.model_validate(report)


def _version(
    name: str, version: MonitoredVersion | None, stored: StoredCounts, config: MonitorConfig
) -> VersionReport:
    report: dict[str, Any] = {
        "version": name,
        "first": stored.first,
        "last": stored.last,
        "samples": stored.samples,
        "quality": quality_of(stored.outcomes, stored.errors),
        "groups": groups_of(stored.groups, stored.group_errors, config),
    }
    if version is not None:
        state = version.windows.state
        kind = "archive" if version.baseline is not None else "first window"
        report |= {
            "baseline": kind if state.baseline_rows else "none",
            "baseline_rows": state.baseline_rows,
            "problem": version.problem,
            "first": stored.first or state.first,
            "last": state.latest or stored.last,
            "samples": max(stored.samples, version.samples),
            "windows": state.windows,
            "window_samples": state.rows,
            "drift": state.drift,
            "alarm": any(drift.alarm for drift in state.drifts.values()),
            "columns": version.windows.drifts(),
        }
    return VersionReport.model_validate(report)


def _comparisons(
    old: str, new: str, old_counts: StoredCounts, new_counts: StoredCounts
) -> Iterator[VersionComparison]:
    """Compare two versions by their answers since the new one has been answering."""
    if new_counts.outcomes:
        start = min(count.period for count in new_counts.outcomes)
        outcomes = [count for count in old_counts.outcomes if count.period >= start]
        if outcomes:
            sums = accuracy_counts(outcomes), accuracy_counts(new_counts.outcomes)
            yield compare_versions(old, new, "accuracy", *sums)
    if new_counts.errors:
        start = min(count.period for count in new_counts.errors)
        errors = [count for count in old_counts.errors if count.period >= start]
        if errors:
            error_sums = error_counts(errors), error_counts(new_counts.errors)
            yield compare_versions(old, new, "mean_error", *error_sums)
