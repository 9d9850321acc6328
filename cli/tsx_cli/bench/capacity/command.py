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
    rps: Annotated[float | None, typer.Option("--rps", min=1e-6, max=1e9, help="Requests per second, of all replicas together.")] = None,
    slo: Annotated[str | None, typer.Option(help="The bounds, such as 'p99<50ms'; those of the benchmark if none are given.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Workers of a replica, if not those that won.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, max=4096, help="Its batch size, if not the one that won.")] = None,
    recording: Annotated[
        Path | None, typer.Option(metavar="FILE|DIRECTORY", help="Requests come as in this recording, and as quickly if there is no --rps.")
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(min=0, help="Of a replica, in any currency: tells the cost.")] = None,
    headroom: Annotated[str, typer.Option(help="How much more than --rps shall still keep the bounds.")] = "0%",
    results: Annotated[Path | None, typer.Option(metavar="results.json", help="Take the curve from here and not from the archive.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is left to chance.")] = 0,
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
