"""`tsx slowest` shows the slowest requests and the stages of their times."""

from __future__ import annotations

from typing import Annotated

import typer

from tsx_cli.common.client import AnswerCommand, Server, path
from tsx_cli.common.management import with_server
from tsx_cli.common.options import AsJson
from tsx_cli.common.output import print_json, print_table
from tsx_cli.common.stages import legend, milliseconds, strip

app = typer.Typer(add_completion=False)


@app.command(cls=AnswerCommand)
@with_server
def slowest(
    server: Server,
    model: Annotated[str | None, typer.Argument(help="Only requests of this model.")] = None,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, max=100, help="Number of requests to show.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the slowest requests of the last 30 to 60 minutes, and where their time went."""
    answer = server.call("GET", path("debug", "slowest", model=model, count=count)).json()
    if as_json:
        print_json(answer)
        return
    if not answer["requests"]:
        print(f"no request was answered yet at {server.url}")
        return
    rows = [
        [
            milliseconds(request["milliseconds"]["total"]),
            strip(request["milliseconds"]),
            request.get("error") or request["status"],
            request["modelName"],
            request["modelVersion"],
            request.get("batchSize"),
            request["arrived"],
            request["requestId"],
        ]
        for request in answer["requests"]
    ]
    print_table(
        ["took", "where", "answer", "model", "version", "batch", "arrived", "request"], rows
    )
    print(legend())
