"""The report on a model, from the windows of its versions and the counts in the store."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.core.comparison.quality import Metric
from tsx_runtime.errors import StoreUnavailable
from tsx_runtime.features.monitor.process.monitor import Monitor, MonitoredVersion
from tsx_runtime.features.monitor.process.store import HOUR_S, MonitorStore
from tsx_runtime.features.monitor.report import MonitorReport, VersionComparison, VersionReport
from tsx_runtime.features.monitor.statistics.comparisons import compare_versions
from tsx_runtime.features.monitor.statistics.groups import GroupCount, groups_of
from tsx_runtime.features.monitor.statistics.quality import (
    ErrorSum,
    OutcomeCount,
    quality_of,
    sum_counts,
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
# The answers of a group without a truth are those that remain; if only feedback has the attribute,
# there are none.
GROUPS = f"""
SELECT version, attribute, value, prediction, truth, SUM(answers), SUM(confidence)
{_OF_GROUPS} AND kind = 1 GROUP BY 1, 2, 3, 4, 5 HAVING SUM(answers) > 0
UNION ALL
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


QUERIES: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "served": (SERVED, lambda *values: values),
    "outcomes": (OUTCOMES, OutcomeCount),
    "errors": (ERRORS, ErrorSum),
    "groups": (GROUPS, GroupCount),
    "group_errors": (GROUP_ERRORS, lambda *values: (values[:2], MetricCounts(*values[2:]))),
}
Stored = Mapping[str, Mapping[str, Sequence[Any]]]  # results of the queries by version


def build_report(monitor: Monitor, model: str) -> MonitorReport:
    """Return the report on a model; without the store, it has the drift only."""
    versions = monitor.versions_of(model)
    config = next((version.message.config for version in versions.values()), None)
    stored: Stored = {name: {} for name in QUERIES}
    contests, problem = 0, monitor.store_problem
    try:
        monitor.flush()
        stored = {name: _read(monitor.store, model, *query) for name, query in QUERIES.items()}
        contests = monitor.store.read(OPEN_CONTESTS, model=model)[0][0]
    except StoreUnavailable as error:
        problem = error.message
    served = stored["served"]
    ended = sorted(served.keys() - versions.keys(), key=lambda name: served[name][0][0])
    names = [*versions, *reversed(ended)]
    report = {
        "model": model,
        "monitoring": bool(versions),
        "config": config,
        "samples": sum(version.samples for version in versions.values()),
        "dropped": monitor.dropped_of(model),
        "problem": problem,
        "versions": [
            _version(name, versions.get(name), stored, config or MonitorConfig.model_validate({}))
            for name in names
        ],
        "comparisons": [
            comparison for new, old in pairwise(names) for comparison in _compare(old, new, stored)
        ],
        "contests": contests,
    }
    return MonitorReport.model_validate(report)


def _read(
    store: MonitorStore, model: str, sql: str, kind: Callable[..., Any]
) -> dict[str, list[Any]]:
    result = defaultdict[str, list[Any]](list)
    recent = int((time.time() - RECENT_S) // HOUR_S)
    for version, *values in store.read(sql, model=model, recent=recent):
        result[version].append(kind(*values))
    return dict(result)


def _version(
    name: str, version: MonitoredVersion | None, stored: Stored, config: MonitorConfig
) -> VersionReport:
    rows = {kind: by_version.get(name, []) for kind, by_version in stored.items()}
    report: dict[str, Any] = {
        "version": name,
        "quality": quality_of(rows["outcomes"], rows["errors"]),
        "groups": groups_of(rows["groups"], dict(rows["group_errors"]), config),
    }
    for first, last, samples in rows["served"]:
        report |= {"first": first, "last": min(last, time.time()), "samples": samples}
    if version is not None:
        windows = version.windows.state
        kind = "archive" if version.baseline is not None else "first window"
        report = {
            "first": windows.first,
            "samples": version.samples,
            **report,
            "last": windows.latest or report.get("last"),
            "baseline": kind if windows.baseline_rows else "none",
            "baseline_rows": windows.baseline_rows,
            "problem": version.problem,
            "windows": windows.windows,
            "window_samples": len(version.windows.rows),
            "drift": windows.drift,
            "alarm": any(drift.alarm for drift in windows.drifts.values()),
            "columns": version.windows.drifts(),
        }
    return VersionReport.model_validate(report)


def _compare(old: str, new: str, stored: Stored) -> Iterator[VersionComparison]:
    """Compare two versions by their answers since the new one has been answering."""
    metrics: tuple[tuple[Metric, str], ...] = (("accuracy", "outcomes"), ("mean_error", "errors"))
    for metric, kind in metrics:
        by_version = stored[kind]
        new_counts = by_version.get(new, [])
        start = min((count.period for count in new_counts), default=math.inf)
        old_counts = [count for count in by_version.get(old, []) if count.period >= start]
        if old_counts:
            yield compare_versions(old, new, metric, sum_counts(old_counts), sum_counts(new_counts))
