"""The report on a monitored model as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from tsx_cli.common.output import number, one_line, print_table

MAX_COLUMNS = 20  # shown columns of a version
RATES = ("selection_rate", "error", "false_positives", "false_negatives")


def show_report(report: dict[str, Any]) -> None:
    """Print a report in the form of `MonitorReport`."""
    name = one_line(report["model"])
    share = f"{report['config']['share']:g} %" if report["monitoring"] else "none"
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in report["dropped"].items())
    print(f"{name}: {share} of the requests are examined; not examined: {dropped or 'none'}")
    for version in report["versions"]:
        _show_version(version)
    for comparison in report["comparisons"]:
        print(one_line(comparison["sentence"]))
    if report["contests"]:
        print(f"{report['contests']} contested answers wait: `tsx monitor contests {name}`")
    if report["problem"]:
        print(one_line(report["problem"]))


def _show_version(version: dict[str, Any]) -> None:
    compared = f"baseline: {version['baseline']}, {version['baseline_rows']:,} rows"
    seen = f"{version['samples']:,} samples, {version['windows']} windows"
    print(f"\nversion {one_line(version['version'])}: {seen}; {compared}")
    if version["problem"]:
        print(one_line(version["problem"]))
    columns = moved_first(version["columns"])
    if columns:
        print_table(
            ["column", "drift since", "psi", "js", "p", "missing", "before", "psi to old version"],
            [
                [
                    column["column"],
                    clock(column["alarm_since"]) if column["alarm"] else "",
                    figure(column["psi"]),
                    figure(column["js"]),
                    "" if column["p_value"] is None else f"{column['p_value']:.2g}",
                    percent(column["missing"]),
                    percent(column["baseline_missing"]),
                    figure(column["previous_psi"]),
                ]
                for column in columns[:MAX_COLUMNS]
            ],
        )
    if len(columns) > MAX_COLUMNS:
        print(f"and {len(columns) - MAX_COLUMNS} more; --json has all")
    quality = version["quality"]
    if quality:
        accuracy = f"accuracy {rate(quality['accuracy'])}" if quality["accuracy"] else ""
        error = f"mean error {rate(quality['mean_error'])}" if quality["mean_error"] else ""
        known = f"{quality['answers']:,} answers have a known truth"
        print(f"{known}: {', '.join(filter(None, [accuracy, error]))}")
    for attribute in version["groups"]:
        groups = attribute["groups"]
        print_table(
            [attribute["attribute"], "requests", *(name.replace("_", " ") for name in RATES)],
            [
                [group["group"], group["count"], *(rate(group[name]) for name in RATES)]
                for group in groups
            ],
        )
        for item in attribute["differences"]:
            larger, smaller = map(one_line, item["groups"])
            print(f"{item['name']}: {rate(item['difference'])}, {larger} over {smaller}")


def moved_first(columns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(columns, key=lambda column: (not column["alarm"], -(column["psi"] or 0.0)))


def rate(estimate: dict[str, Any] | None) -> str:
    """Format a figure with its interval: 0.942 (0.926 to 0.955)."""
    if estimate is None or estimate["value"] is None:
        return ""
    value, low, high = (figure(estimate[name]) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})" if low and high else value


def figure(value: float | None) -> str:
    return "" if value is None else number(value)


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
