"""The long form of the chaos suite: every fault several times, under heavier load, with a table.

    python -m benchmarks.chaos [--short] [WORDS OF A SCENARIO'S NAME ...]

The exit code is 1 if any check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from . import clients, stop, surroundings, workers
from .trial import LONG, SHORT, Report, run

ROW = "{:<62} {:>7} {:>9} {:>20} {:>9} {:>9}"


def row(report: Report) -> str:
    errors = ", ".join(f"{count} x {status}" for status, count in report.errors.items()) or "none"
    sent = report.sent
    recovery = f"{1000 * report.recovery:,.0f} ms"
    return ROW.format(
        report.scenario,
        sent["victim"],
        sent["bystander"],
        errors,
        recovery,
        f"{report.complete:.2f} s",
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="WORD", help="only scenarios whose name has one of these words"
    )
    parser.add_argument("--short", action="store_true", help="as heavy as in the tests")
    options = parser.parse_args()
    all_scenarios = [
        *workers.SCENARIOS,
        *clients.SCENARIOS,
        *surroundings.SCENARIOS,
        *stop.SCENARIOS,
    ]
    selected_scenarios = [
        scenario
        for scenario in all_scenarios
        if not options.names or any(name in scenario.name for name in options.names)
    ]
    print(
        ROW.format("fault", "victim", "bystander", "the victim's errors", "answers", "complete"),
        flush=True,
    )
    failed = 0
    for scenario in selected_scenarios:
        if reason := scenario.unavailable_reason():
            print(f"{scenario.name}: left out, since {reason}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as directory:
            report = asyncio.run(run(scenario, SHORT if options.short else LONG, Path(directory)))
        print(row(report), flush=True)
        for problem in report.problems:
            print(f"    {problem}", flush=True)
        failed += bool(report.problems)
    print(f"{len(selected_scenarios)} faults, {failed} with problems")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
