"""`tsx plan`: the words of its command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tsx_cli.common.options import AsJson

app = typer.Typer(add_completion=False)


@app.command("plan")
def plan_command(
    archive: Annotated[Path | None, typer.Argument(metavar="MODEL.mar", help="An archive that `tsx bench --write` has measured.")] = None,
    rps: Annotated[float | None, typer.Option("--rps", min=1e-6, max=1e9, help="Requests per second of all replicas together.")] = None,
    slo: Annotated[str | None, typer.Option(help="Bounds, such as 'p99<50ms'; by default those of the benchmark.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Workers of a replica, if not those that won.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, max=4096, help="Batch size; by default the winner's.")] = None,
    recording: Annotated[
        Path | None, typer.Option(metavar="FILE|DIRECTORY", help="Arrivals as in this recording, and at its rate without --rps.")
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
    from tsx_cli.bench.capacity.report import tell_plan  # here, as it imports the simulation, and help must be quick

    tell_plan(
        archive,
        rps=rps,
        slo=slo,
        workers=workers,
        batch_size=batch_size,
        recording=recording,
        price_per_hour=price_per_hour,
        headroom=headroom,
        results=results,
        seed=seed,
        as_json=as_json,
    )
