"""`tsx bench CONFIG.yaml` runs a configuration of TorchServe's auto-benchmark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tsx_cli.bench.commands import options
from tsx_cli.common.failure import FAILED, CliError, UsageError
from tsx_cli.common.options import Token, read_token

app = typer.Typer(add_completion=False)
OUTPUT = Path("ts_benchmark")


@app.command("bench")
def bench_torchserve(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG.yaml", help="File of auto_benchmark.py, or of one model."),
    ] = None,
    torchserve_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same file, as an option.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Measure this server, TorchServe or tsx, instead of starting one."
        ),
    ] = None,
    management: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Its management address; by default the next port of the same host."
        ),
    ] = None,
    token: Token = None,
    management_token: Annotated[
        str | None, typer.Option(metavar="TOKEN|@FILE", help="Token for its management address.")
    ] = None,
    certificate: options.Certificate = None,
    logs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of its logs, if it runs on this machine: adds times inside the server.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Directory of the reports.")
    ] = OUTPUT,
    time_limit: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Longest duration of one load, however many requests it has."
        ),
    ] = "2m",
) -> None:
    """Run a configuration file of TorchServe's auto-benchmark.

    It writes ab_report.csv of each case, and a report of each model.
    """
    from tsx_cli.bench.commands.against_command import trusted_certificate
    from tsx_cli.bench.commands.torchserve_plan import read_plan
    from tsx_cli.bench.commands.torchserve_run import MeasuredServer, management_of, run_plan
    from tsx_cli.bench.load.results import command_line
    from tsx_cli.bench.report import show
    from tsx_cli.bench.search.options import seconds

    file = torchserve_config or config
    if file is None or (torchserve_config and config):
        raise UsageError("give one file of TorchServe's auto-benchmark: tsx bench CONFIG.yaml")
    if against is None and (management or token or management_token or certificate or logs):
        raise UsageError(
            "--management, --token, --management-token, --certificate and --logs go with --against;"
            " tsx's own server needs none of them"
        )
    if logs is not None and not logs.is_dir():
        raise CliError(
            f"--logs: there is no directory '{logs}'; name the one that has ts_metrics.log and"
            " model_metrics.log"
        )
    limit, plan = seconds(time_limit, "--time-limit"), read_plan(file)
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    server = None
    if against is not None:
        tokens = read_token(token), read_token(management_token, "--management-token")
        management_url = management or management_of(against)
        server = MeasuredServer(
            against,
            management_url,
            logs,
            *tokens,
            trusted_certificate(
                certificate, management_url if management_url.startswith("https:") else against
            ),
        )
    count = len(plan.cases)
    results_by_group = run_plan(
        plan,
        output,
        against=server,
        seconds=limit,
        command=command_line(token, management_token),
        on_case=lambda number, case: print(
            f"{number + 1} of {count}: {case.name}", file=sys.stderr
        ),
    )
    for results in results_by_group.values():
        show(results)
    print(
        f"reports: {output}, with ab_report.csv of each case and report.html of each model and mode"
        " in its directory"
    )
    if any(
        trial.state == "failed" for results in results_by_group.values() for trial in results.trials
    ):
        raise typer.Exit(FAILED)
