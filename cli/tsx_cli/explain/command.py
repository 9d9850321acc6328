"""`tsx explain` shows the stages of one request's time."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tsx_cli.common.client import AnswerCommand, Server, path
from tsx_cli.common.failure import UsageError
from tsx_cli.common.management import with_server
from tsx_cli.common.options import AsJson
from tsx_cli.common.output import one_line, print_result
from tsx_cli.common.stages import PARTS, bar, milliseconds

app = typer.Typer(add_completion=False)


@app.command(cls=AnswerCommand)
@with_server
def explain(
    server: Server,
    request_id: Annotated[str, typer.Argument(help="The x-request-id of the request's answer.")],
    as_json: AsJson = False,
) -> None:
    """Show where the time of one request went, from its arrival to its answer.

    The server keeps the newest 2000 requests of each version of a model, and the slowest hundred of
    the last half hour.
    """
    ids = request_id.split()  # A copied header may end with a line break.
    if len(ids) != 1:
        raise UsageError("give the id of a request: it is in the header x-request-id of its answer")
    timeline = server.call("GET", path("debug", "requests", ids[0])).json()
    print_result(
        timeline, as_json, lambda timeline: print("\n".join(map(one_line, lines(timeline))))
    )


def lines(timeline: dict[str, Any]) -> list[str]:
    milliseconds_by_part = timeline["milliseconds"]
    outcome = f"was refused ({timeline['error']})" if timeline.get("error") else "was answered"
    batch = {None: "", 1: ", alone in its batch"}.get(
        timeline.get("batchSize"), f", in a batch of {timeline.get('batchSize')}"
    )
    text_lines = [
        (
            f"{timeline['requestId']} {outcome} with {timeline['status']} after"
            f" {milliseconds(milliseconds_by_part['total'])}"
        ),
        (
            f"{timeline['modelName']} {timeline['modelVersion']}{batch}; it arrived at"
            f" {timeline['arrived']}"
        ),
    ]
    known_parts = [part for part in PARTS if part in milliseconds_by_part]
    if known_parts:
        text_lines.append("")
        text_lines += [
            f"  {part:11} {milliseconds(milliseconds_by_part[part]):>12}  {bar(milliseconds_by_part[part], milliseconds_by_part['total']):30}"
            f" {PARTS[part]}".rstrip()
            for part in known_parts
        ]
    return text_lines
