"""A check that `tsx bench` quickly finds a configuration near the best of its grid.

    python benchmarks/search_quality.py detector.mar --exhaustive 25m --directory
    docs/reference/bench/detector python benchmarks/search_quality.py detector.mar --searches 5
    --time-limit 100s --directory docs/reference/bench/detector python benchmarks/search_quality.py
    detector.mar --searches 5 --time-limit 100s --stress --directory docs/reference/bench/detector

The first command measures the whole grid. The other commands run searches and compare their results
with that measurement. The measurement can be interrupted; the same command continues it. It writes
exhaustive.json into the directory, and exhaustive.csv for people. `--stress` runs `stress-ng --cpu
1` during each search, to simulate a busy machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine

from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import Results, read_results
from tsx_cli.bench.search.options import seconds

GRID = (
    "--slo",
    "p99<100ms",
    "--batch-sizes",
    "1..32",
    "--workers",
    "1..16",
    "--precision",
    "fp32,bf16",
)
TOLERANCE = ("--tolerance", "rtol=0.05,atol=0.05")
# The duration of a round of the exhaustive measurement; its warm-up takes as long.
ROUND_DURATION = "1s"
START_S = 10.0  # A run that ends more than this time before its limit was not ended by the limit.
TABLE, ROWS = "exhaustive.json", "exhaustive.csv"
# The required fraction of the table's best on a quiet machine, and with stress.
QUIET_SHARE, STRESSED_SHARE = 0.95, 0.9
MAX_TIME_SHARE = 0.1


def bench(arguments: Sequence[str], limit: float) -> None:
    command = [
        sys.executable,
        "-m",
        "tsx_cli",
        "bench",
        *arguments,
        "--time-limit",
        f"{limit:.0f}s",
    ]
    subprocess.run(command, check=False, timeout=2 * limit + 120)


def exhaustive(archive: Path, directory: Path, limit: float, arguments: Sequence[str]) -> None:
    """Measure each configuration with its own server, at several loads, to find its best.

    The best load within the latency limit is measured twice.
    """
    run = directory / "exhaustive-run"
    start = time.monotonic()
    if (run / "journal.jsonl").exists():
        arguments = ["--resume", str(run)]
    else:
        arguments = [
            str(archive),
            *arguments,
            "--exhaustive",
            "--duration",
            ROUND_DURATION,
            "--output",
            str(run),
        ]
    bench(arguments, limit)
    results = read_results(run / "results.json")
    earlier_seconds = (
        json.loads((directory / TABLE).read_text())["seconds"]
        if (directory / TABLE).exists()
        else 0.0
    )
    table = rows(results)
    elapsed = time.monotonic() - start
    missing_trials = [
        str(trial.as_configuration()) for trial in results.trials if trial.state == "predicted"
    ]
    if not missing_trials and elapsed > limit - START_S:
        # The last trial may not have reached its best load.
        missing_trials = [str(results.trials[-1].as_configuration())]
    content = {
        "machine": machine.describe(),
        "seconds": round(earlier_seconds + elapsed, 1),
        "missing": missing_trials,
        "rows": table,
    }
    content["disturbed"] = results.disturbed.says
    directory.mkdir(parents=True, exist_ok=True)
    (directory / TABLE).write_text(json.dumps(content, indent=1) + "\n")
    with (directory / ROWS).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    print(
        f"{len(table)} configurations in {content['seconds']:.0f} s: {directory / TABLE}",
        flush=True,
    )
    if missing_trials:
        print(
            f"{len(missing_trials)} are missing, such as {missing_trials[0]}: the same command goes on with them"
        )
    else:
        shutil.rmtree(run)


def rows(results: Results) -> list[dict[str, Any]]:
    """Return a row for each started configuration, the best first.

    The throughput is 0 if no load was within the latency limit.
    """
    table_rows = []
    for trial in results.trials:
        if trial.state == "predicted":
            continue
        point = trial.chosen
        table_rows.append(
            {
                **trial.as_configuration().as_json(),
                "throughput": 0.0 if point is None else round(point.throughput.value, 2),
                "p99_ms": None if point is None else round(point.p99_ms.value, 2),
                "load": None if point is None else str(point.offered),
                "rounds": 0 if point is None else len(point.counted),
                "loads": len(trial.points),
                "reason": trial.reason,
            }
        )
    return sorted(table_rows, key=lambda row: -row["throughput"])


@contextmanager
def stressed(is_stressed: bool, limit: float) -> Iterator[None]:
    if not is_stressed:
        yield
        return
    program = shutil.which("stress-ng")
    if program is None:
        raise SystemExit("stress-ng is not installed: apt install stress-ng")
    process = subprocess.Popen(
        [program, "--cpu", "1", "--timeout", f"{2 * limit + 60:.0f}s", "--quiet"]
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def searches(
    archive: Path,
    directory: Path,
    number: int,
    limit: float,
    stress: bool,
    arguments: Sequence[str],
) -> bool:
    """Run searches; return whether enough of them found a good configuration."""
    table = json.loads((directory / TABLE).read_text())
    throughputs = {
        Configuration(**{name: row[name] for name in Configuration().as_json()}): row["throughput"]
        for row in table["rows"]
    }
    best = max(throughputs, key=lambda configuration: throughputs[configuration])
    min_fraction = STRESSED_SHARE if stress else QUIET_SHARE
    good_runs = 0
    print(
        f"best of the table: {best}, {throughputs[best]:.1f} requests/s; {len(throughputs)}"
        f" configurations in {table['seconds']:.0f} s\n",
        flush=True,
    )
    lines = []
    for index in range(number):
        with tempfile.TemporaryDirectory() as temporary, stressed(stress, limit):
            start = time.monotonic()
            bench([str(archive), *arguments, "--output", f"{temporary}/run"], limit)
            elapsed = time.monotonic() - start
            results = read_results(Path(temporary) / "run" / "results.json")
        winner = (
            None if results.winner is None else results.trials[results.winner].as_configuration()
        )
        share = 0.0 if winner is None else throughputs.get(winner, 0.0) / throughputs[best]
        good_runs += share >= min_fraction
        choice = "none" if winner is None else str(winner)
        tie_text = f", tied with {len(results.tied)}" if results.tied else ""
        lines.append(
            f"{index + 1}: {choice}{tie_text}: {throughputs.get(winner, 0.0) if winner else 0.0:.1f}"
            f" requests/s in the table, {share:.1%} of the best; {elapsed:.0f} s,"
            f" {elapsed / table['seconds']:.1%} of the exhaustive time; {sum(bool(trial.points) for trial in results.trials)}"
            f" configurations measured; {results.disturbed.says or 'undisturbed'}"
        )
        print(f"\n{lines[-1]}\n", flush=True)
    print("\n".join(lines))
    is_short = limit <= MAX_TIME_SHARE * table["seconds"]
    print(
        f"\n{good_runs} of {number} within {1 - min_fraction:.0%} of the best; the time limit is"
        f" {'' if is_short else 'not '}under a tenth of it"
    )
    return is_short and good_runs >= number - number // 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    parser.add_argument(
        "--exhaustive", metavar="TIME", help="measure the grid, for at most so long"
    )
    parser.add_argument(
        "--searches", type=int, default=0, help="how many searches are judged by it"
    )
    parser.add_argument("--time-limit", default="100s", help="of each search")
    parser.add_argument("--stress", action="store_true", help="beside stress-ng --cpu 1")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("docs/reference/bench/detector"),
        help="where the table is kept",
    )
    parser.epilog = "Options after -- are those of tsx bench, instead of the detector's grid."
    script_arguments, bench_arguments = sys.argv[1:], [*GRID, *TOLERANCE]
    if "--" in script_arguments:
        script_arguments, bench_arguments = (
            script_arguments[: script_arguments.index("--")],
            script_arguments[script_arguments.index("--") + 1 :],
        )
    options = parser.parse_args(script_arguments)
    if (warning := machine.busy_before()) is not None:
        print(f"NOT QUIET: {warning}", file=sys.stderr)
    if options.exhaustive:
        exhaustive(
            options.archive,
            options.directory,
            seconds(options.exhaustive, "--exhaustive"),
            bench_arguments,
        )
    if options.searches:
        limit = seconds(options.time_limit, "--time-limit")
        raise SystemExit(
            not searches(
                options.archive,
                options.directory,
                options.searches,
                limit,
                options.stress,
                bench_arguments,
            )
        )


if __name__ == "__main__":
    main()
