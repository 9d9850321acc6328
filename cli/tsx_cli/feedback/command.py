"""`tsx feedback` reports the truth of earlier answers, from a file to a running server."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from tsx_cli.common.client import AnswerCommand, Server
from tsx_cli.common.failure import FAILED, CliError
from tsx_cli.common.management import with_inference
from tsx_cli.common.options import AsJson
from tsx_cli.common.output import one_line, print_result
from tsx_cli.common.status_line import StatusLine

MAX_SHOWN = 20  # shown items that are not stored

app = typer.Typer(add_completion=False)


@app.command(cls=AnswerCommand)
@with_inference
def feedback(
    server: Server,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|-",
            help=(
                "A .csv, .jsonl, .json or .parquet file; - reads JSON lines. Columns: request_id"
                " or key, and truth; also contest, groups.NAME, at, version, row and replace."
            ),
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="Name of the model, unless the server has only one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report what the right answers to earlier requests were.

    The command may be repeated with the same file: each item is counted once.

    Exit code 0: all items are stored; 1: some are not, as their lines say.
    """
    from tsx_cli.feedback.items import send_feedback  # a slow import

    if model is None:
        names = server.call_json("GET", "/v1/models")["models"]
        if len(names) != 1:
            raise CliError(f"{server.url} serves {len(names)} models; name one with --model")
        model = names[0]
    with StatusLine("the file is read", quiet=as_json) as status:
        result = send_feedback(server, model, file, status.update)
    print_result(result, as_json, _show)
    if result["errors"]:
        raise typer.Exit(FAILED)


def _show(result: dict[str, Any]) -> None:
    errors = result["errors"]
    for error in errors[:MAX_SHOWN]:
        print(one_line(f"{error['line']}: {error['message']}"), file=sys.stderr)
    if len(errors) > MAX_SHOWN:
        print(f"and {len(errors) - MAX_SHOWN:,} more; --json prints all", file=sys.stderr)
    print(
        f"{result['model']}: {result['accepted']:,} items stored, {result['duplicates']:,} were"
        f" stored before, {len(errors):,} failed"
    )
