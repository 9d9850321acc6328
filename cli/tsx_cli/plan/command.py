"""`tsx plan`: its options, and the call of its calculation."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from tsx_archiver.quantities import parse_share
from tsx_cli.common.failure import UsageError
from tsx_cli.common.options import AsJson, finite
from tsx_cli.common.output import print_result

app = typer.Typer(add_completion=False)


@app.command("plan")
def plan_command(
    archive: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL.mar", help="An archive that `tsx bench --write` has measured."
        ),
    ] = None,
    rps: Annotated[
        float | None,
        typer.Option(
            "--rps", min=1e-6, max=1e9, help="Requests per second of all replicas together."
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="Bounds, such as 'p99<50ms'; by default those of the benchmark."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Workers per replica; by default the winner's."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Batch size; by default the winner's.")
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0, help="Price of a replica per hour, in any currency; adds the cost."),
    ] = None,
    headroom: Annotated[
        str, typer.Option(help="Extra load above --rps that must still keep the bounds.")
    ] = "0%",
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="results.json", help="Use the results in this file instead of the archive's."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print how many replicas a request rate needs, and their cost.

    The highest load that a benchmark measured within the bounds decides.
    """
    # This module imports pydantic, which would slow --help down.
    from tsx_cli.plan import planning

    record = planning.read_measurements(archive, results)
    if rps is None:
        raise UsageError("give the request rate: --rps 300")
    rate, share = finite(rps, "--rps"), _share(headroom)
    price = None if price_per_hour is None else finite(price_per_hour, "--price-per-hour")
    bounds = planning.bounds_of(slo, archive, record)
    load = planning.highest_load(record, bounds, workers, batch_size, archive)
    report = planning.plan(record, load, rate, bounds, share, price)
    print_result(report, as_json, planning.show)


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (share := parse_share(text)) <= 100:
            return share
    raise UsageError(f"--headroom: '{text}' is not a share; write 20% or 0.2")
