"""`tsx bench compare`: its options, and its exit code for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tsx_cli.bench.commands import options
from tsx_cli.common.failure import FAILED, CliError, UsageError
from tsx_cli.common.options import AsJson

app = typer.Typer(add_completion=False)
RESULTS = "results.json"

FIRST = typer.Argument(
    help="results.json of the run before, or the directory that has it.", metavar="A.json"
)
SECOND = typer.Argument(help="The later run.", metavar="B.json")
FAIL_IF = typer.Option(
    "--fail-if",
    help=(
        "A change to fail at, with exit code 1: 'throughput<-5%' or 'p99>10%'; may be repeated."
        " Changes within the noise never count."
    ),
    metavar="CHANGE",
)


@app.command("compare")
def compare_command(
    first: Annotated[Path, FIRST],
    second: Annotated[Path, SECOND],
    fail_if: Annotated[list[str] | None, FAIL_IF] = None,
    all_pairs: Annotated[
        bool,
        typer.Option(
            "--all", help="Apply --fail-if to every configuration and load, not only to the best."
        ),
    ] = False,
    junit: options.JUnit = None,
    as_json: AsJson = False,
) -> None:
    """Compare two runs of tsx bench, and say which differences are real.

    Exit code 0: nothing that --fail-if names; 1: something; 2: the files or the words of the
    command are wrong.
    """
    from tsx_cli.bench.load.results import read_results

    # These modules are slow to import, and --help needs none of them.
    from tsx_cli.bench.report.compare import compare, parse_condition, print_compared, show_compared
    from tsx_cli.bench.report.junit import check_junit, condition_cases, write_junit

    if junit is not None:
        check_junit(junit, fail_if, "--fail-if")
    conditions = [parse_condition(text) for text in fail_if or ()]
    try:
        results = [
            read_results(path / RESULTS if path.is_dir() else path) for path in (first, second)
        ]
    except CliError as error:
        # UsageError gives exit code 2, since exit code 1 means that --fail-if found a change.
        raise UsageError(error.message) from error
    compared = compare(results[0], results[1], conditions, all_pairs=all_pairs)
    (print_compared if as_json else show_compared)(compared)
    if junit is not None:
        write_junit(junit, condition_cases(compared, results[1]), results[1])
    if compared.met:
        raise typer.Exit(FAILED)
