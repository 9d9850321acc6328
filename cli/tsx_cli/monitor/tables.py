"""The report on a monitored model as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from tsx_cli.common.output import number, one_line, print_table
from tsx_runtime.features.monitor.report import ColumnDrift, Estimate, MonitorReport, VersionReport

MAX_COLUMNS = 20  # shown columns of a version
RATES = ("selection_rate", "error", "false_positives", "false_negatives")


def show_report(content: dict[str, Any]) -> None:
    """Print a report in the form of `MonitorReport`."""
    report = MonitorReport.model_validate(content)
    name = one_line(report.model)
    dropped = [f"{count:,} {reason}" for reason, count in report.dropped.items() if count]
    if report.config is None:
        print(f"{name}: not monitored; `tsx models monitor {name} --share 5%` starts it")
    else:
        share = f"{report.config.share:g} % of the requests are examined"
        print(f"{name}: {share}" + (f"; dropped: {', '.join(dropped)}" if dropped else ""))
    for version in report.versions:
        _show_version(version)
    for comparison in report.comparisons:
        print(one_line(comparison.sentence))
    if report.contests:
        print(f"{report.contests} contested answers wait: `tsx monitor contests {name}`")
    if report.problem:
        print(one_line(report.problem))


def _show_version(version: VersionReport) -> None:
    compared = f"baseline: {version.baseline}, {version.baseline_rows:,} rows"
    counts = {"sample": version.samples, "window": version.windows}
    seen = ", ".join(f"{count:,} {noun}{'s' * (count != 1)}" for noun, count in counts.items())
    print(f"\nversion {one_line(version.version)}: {seen}; {compared}")
    if version.problem:
        print(one_line(version.problem))
    if version.columns:
        print_table(
            ["column", "drift since", "psi", "js", "p", "missing", "before", "psi to old version"],
            [
                [
                    column.column,
                    clock(column.alarm_since),
                    figure(column.psi),
                    figure(column.js),
                    "" if column.p_value is None else f"{column.p_value:.2g}",
                    percent(column.missing),
                    percent(column.baseline_missing),
                    figure(column.previous_psi),
                ]
                for column in moved_first(version.columns)[:MAX_COLUMNS]
            ],
        )
    if len(version.columns) > MAX_COLUMNS:
        print(f"and {len(version.columns) - MAX_COLUMNS} more; --json has all")
    if quality := version.quality:
        measures = {"accuracy": quality.accuracy, "mean error": quality.mean_error}
        figures = [f"{name} {rate(value)}" for name, value in measures.items() if value]
        print(f"{quality.answers:,} answers have a known truth: {', '.join(figures)}")
    for attribute in version.groups:
        print_table(
            [attribute.attribute, "requests", *(name.replace("_", " ") for name in RATES)],
            [
                [group.group, group.count, *(rate(getattr(group, name)) for name in RATES)]
                for group in attribute.groups
            ],
        )
        for item in attribute.differences:
            larger, smaller = map(one_line, item.groups)
            print(f"{item.name}: {rate(item.difference)}, {larger} over {smaller}")


def moved_first(columns: Iterable[ColumnDrift]) -> list[ColumnDrift]:
    return sorted(columns, key=lambda column: (not column.alarm, -(column.psi or 0.0)))


def rate(estimate: Estimate | None) -> str:
    """Format a figure with its interval: 0.942 (0.926 to 0.955)."""
    if estimate is None:
        return ""
    value, low, high = map(figure, (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})" if low and high else value


def figure(value: float | None) -> str:
    return "" if value is None else number(value)


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
