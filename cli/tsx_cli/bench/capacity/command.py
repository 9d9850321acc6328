"""`tsx plan`: the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import AsJson
from tsx_cli.common.output import milliseconds, print_result

app = typer.Typer(add_completion=False)


@app.command("plan")
def plan_command(
    archive: Annotated[Path | None, typer.Argument(metavar="MODEL.mar", help="An archive that `tsx bench --write` has measured.")] = None,
    rps: Annotated[float | None, typer.Option("--rps", min=1e-6, max=1e9, help="Requests per second of all replicas together.")] = None,
    slo: Annotated[str | None, typer.Option(help="Bounds, such as 'p99<50ms'; by default those of the benchmark.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Workers per replica; by default the winner's.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, max=4096, help="Batch size; by default the winner's.")] = None,
    recording: Annotated[
        Path | None, typer.Option(metavar="FILE|DIRECTORY", help="Use the arrival times of this recording; without --rps, also its rate.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of a replica per hour, in any currency; adds the cost.")
    ] = None,
    headroom: Annotated[str, typer.Option(help="Extra load above --rps that must still keep the bounds.")] = "0%",
    results: Annotated[
        Path | None, typer.Option(metavar="results.json", help="Use the results in this file instead of the archive's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random choices.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Simulate the batching of a measured model and print how many replicas keep the bounds, with their latency and their cost."""
    from tsx_cli.bench.capacity import report  # here, all of them, as they import the simulation, and help must be quick
    from tsx_cli.bench.capacity.planning import plan
    from tsx_cli.bench.model.slo import parse_slo
    from tsx_cli.bench.search.run_options import finite

    measured, moments = report.measured_in(archive, results), report.moments_of(recording)
    replica = report.replica_of(measured, archive, workers, batch_size)
    rate, wanted = report.rate_of(rps, moments), slo or (replica.target.text if replica.target else measured.slo)
    bounds = parse_slo(wanted) if wanted else None
    if bounds is not None and bounds.of_streams:
        raise UsageError(
            f"{bounds.of_streams[0].text}: tsx plan simulates whole answers; give bounds of their time, such as --slo 'p99<2s'"
        )
    planned = plan(replica, rate, bounds, headroom=report.share_of(headroom), moments=moments, seed=seed)
    if planned is None:
        alone = f"one request at a time takes {milliseconds(replica.times[0])} already"
        raise CliError(f"no number of replicas keeps {bounds}: {alone}; find a quicker way to run the model with tsx bench")
    price = None if price_per_hour is None else finite(price_per_hour, "--price-per-hour")
    found = report.as_json(measured, replica, planned, rate, bounds, price)
    print_result(found, as_json, lambda found: report.show(found, planned))
