"""Whether `tsx bench` finds a configuration about as good as the best of its grid, in a fraction of
the time, also on a machine that is not quiet: an exhaustive measurement of the grid first, then
searches, judged by the exhaustive figures.

    python benchmarks/search_quality.py detector.mar --exhaustive 25m --directory
    docs/reference/bench/detector python benchmarks/search_quality.py detector.mar --searches 5
    --time-limit 100s --directory docs/reference/bench/detector python benchmarks/search_quality.py
    detector.mar --searches 5 --time-limit 100s --stress --directory docs/reference/bench/detector

The first can be interrupted; the same command goes on where it ended. It leaves exhaustive.json in
the directory, and exhaustive.csv for people. `--stress` runs `stress-ng --cpu 1` beside each
search, and ends it by its process id.
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
# of the exhaustive measurement; as long again for the warm-up, which counts where it turns out to
# be none
ROUND = "1s"
START = 10.0  # seconds: a run that ends earlier than so long before its limit was not ended by it
TABLE, ROWS = "exhaustive.json", "exhaustive.csv"
WITHIN, STRESSED = (
    0.95,
    0.9,
)  # of the best of the table, on the quiet machine and beside another process
TENTH = 0.1


def bench(words: Sequence[str], limit: float) -> None:
    command = [sys.executable, "-m", "tsx_cli", "bench", *words, "--time-limit", f"{limit:.0f}s"]
    subprocess.run(command, check=False, timeout=2 * limit + 120)


def exhaustive(archive: Path, directory: Path, limit: float, words: Sequence[str]) -> None:
    """Each configuration with a server of its own, up and down the loads to its best within the
    bound, which is measured twice.
    """
    run = directory / "exhaustive-run"
    began = time.monotonic()
    if (run / "journal.jsonl").exists():
        words = ["--resume", str(run)]
    else:
        words = [str(archive), *words, "--exhaustive", "--duration", ROUND, "--output", str(run)]
    bench(words, limit)
    results = read_results(run / "results.json")
    before = (
        json.loads((directory / TABLE).read_text())["seconds"]
        if (directory / TABLE).exists()
        else 0.0
    )
    table = rows(results)
    took = time.monotonic() - began
    left = [str(trial.as_configuration()) for trial in results.trials if trial.state == "predicted"]
    if not left and took > limit - START:
        left = [
            str(results.trials[-1].as_configuration())
        ]  # which was begun, and perhaps not at its best load
    content = {
        "machine": machine.describe(),
        "seconds": round(before + took, 1),
        "missing": left,
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
    if left:
        print(f"{len(left)} are missing, such as {left[0]}: the same command goes on with them")
    else:
        shutil.rmtree(run)


def rows(results: Results) -> list[dict[str, Any]]:
    """A row for each configuration that was begun, the best first; the throughput of what never
    held the bound is 0.
    """
    found = []
    for trial in results.trials:
        if trial.state == "predicted":
            continue
        point = trial.chosen
        found.append(
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
    return sorted(found, key=lambda row: -row["throughput"])


@contextmanager
def stressed(really: bool, limit: float) -> Iterator[None]:
    if not really:
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
    archive: Path, directory: Path, number: int, limit: float, stress: bool, words: Sequence[str]
) -> bool:
    """Whether enough of them found what is good enough."""
    table = json.loads((directory / TABLE).read_text())
    quiet = {
        Configuration(**{name: row[name] for name in Configuration().as_json()}): row["throughput"]
        for row in table["rows"]
    }
    best, needed, good = max(quiet, key=lambda how: quiet[how]), STRESSED if stress else WITHIN, 0
    print(
        f"best of the table: {best}, {quiet[best]:.1f} requests/s; {len(quiet)} configurations in"
        f" {table['seconds']:.0f} s\n",
        flush=True,
    )
    lines = []
    for at in range(number):
        with tempfile.TemporaryDirectory() as place, stressed(stress, limit):
            began = time.monotonic()
            bench([str(archive), *words, "--output", f"{place}/run"], limit)
            took = time.monotonic() - began
            results = read_results(Path(place) / "run" / "results.json")
        how = None if results.winner is None else results.trials[results.winner].as_configuration()
        share = 0.0 if how is None else quiet.get(how, 0.0) / quiet[best]
        good += share >= needed
        chosen = "none" if how is None else str(how)
        tied = f", tied with {len(results.tied)}" if results.tied else ""
        lines.append(
            f"{at + 1}: {chosen}{tied}: {quiet.get(how, 0.0) if how else 0.0:.1f} requests/s in the"
            f" table, {share:.1%} of the best; {took:.0f} s, {took / table['seconds']:.1%} of the"
            f" exhaustive time; {sum(bool(trial.points) for trial in results.trials)}"
            f" configurations measured; {results.disturbed.says or 'undisturbed'}"
        )
        print(f"\n{lines[-1]}\n", flush=True)
    print("\n".join(lines))
    short = limit <= TENTH * table["seconds"]
    print(
        f"\n{good} of {number} within {1 - needed:.0%} of the best; the time limit is"
        f" {'' if short else 'not '}under a tenth of it"
    )
    return short and good >= number - number // 5


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
    own, words = sys.argv[1:], [*GRID, *TOLERANCE]
    if "--" in own:
        own, words = own[: own.index("--")], own[own.index("--") + 1 :]
    given = parser.parse_args(own)
    if (warning := machine.busy_before()) is not None:
        print(f"NOT QUIET: {warning}", file=sys.stderr)
    if given.exhaustive:
        exhaustive(given.archive, given.directory, seconds(given.exhaustive, "--exhaustive"), words)
    if given.searches:
        limit = seconds(given.time_limit, "--time-limit")
        raise SystemExit(
            not searches(given.archive, given.directory, given.searches, limit, given.stress, words)
        )


if __name__ == "__main__":
    main()
