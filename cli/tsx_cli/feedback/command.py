"""`tsx feedback` reports the truth of earlier answers, from a file to a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import typer

from tsx_cli.batch.rows import Position
from tsx_cli.common.client import AnswerCommand, Server, path, reading_answers
from tsx_cli.common.failure import FAILED, CliError
from tsx_cli.common.management import with_inference
from tsx_cli.common.options import AsJson
from tsx_cli.common.output import one_line, print_result
from tsx_cli.common.status_line import StatusLine

BATCH_ITEMS = 1000
GROUP_PREFIX = "groups."  # A column of this name has the group of an attribute.
MEMBERS = ("request_id", "key", "row", "truth", "contest", "groups", "at", "version", "replace")
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
    if model is None:
        names = server.call_json("GET", "/v1/models")["models"]
        if len(names) != 1:
            raise CliError(f"{server.url} serves {len(names)} models; name one with --model")
        model = names[0]
    with StatusLine("the file is read", quiet=as_json) as status:
        result = send_feedback(server, model, file, status)
    print_result(result, as_json, _show)
    if result["errors"]:
        raise typer.Exit(FAILED)


def send_feedback(server: Server, model: str, file: str, status: StatusLine) -> dict[str, Any]:
    """Send the items of a file in batches, and return the sum of the server's answers.

    `errors` of the result has the lines of the items that are not stored.

    Raises:
        CliError: The file cannot be read or is empty, or the server refuses a batch.
    """
    items, stored = _read_items(file), {"accepted": 0, "duplicates": 0}
    errors: list[dict[str, Any]] = []
    while batch := list(islice(items, BATCH_ITEMS)):
        lines, values, faults = zip(*batch, strict=True)
        try:
            answer = server.call_json("POST", path("feedback", model), values)
        except CliError as error:
            error.message += (
                f"; {sum(stored.values()):,} items before {lines[0]} are stored. The command may"
                " be repeated: each item is counted once"
            )
            raise
        with reading_answers():
            for name in stored:
                stored[name] += answer[name]
            for problem in answer["errors"]:
                index = problem.pop("index")
                message = faults[index] or problem["message"]
                errors.append({"line": lines[index], **problem, "message": message})
        status.update(f"{sum(stored.values()):,} items are stored")
    if not errors and not sum(stored.values()):
        raise CliError(f"{file} has no items; an item has request_id or key, and truth")
    return {"model": model, **stored, "errors": errors}


def _read_items(file: str) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the line of each item, such as truth.csv:17, the item, and why it cannot be read."""
    from tsx_cli.batch.readers import InputReader  # a slow import

    for row in InputReader([file]).rows(Position(), 0):
        try:
            values = None if row.error else json.loads(row.body)
        except (ValueError, RecursionError) as error:
            raise CliError(f"{file} is neither a table nor JSON: {error}") from error
        if isinstance(values, list):  # It is a file of JSON.
            for number, value in enumerate(values, 1):
                yield f"{row.id}, item {number}", _item(value), None
        else:
            yield row.id, _item(values), row.error


def _item(row: Any) -> Any:
    """Return the item of a row; the server refuses a row that is not an object."""
    if not isinstance(row, dict):
        return row
    values = {name: value for name, value in row.items() if value not in (None, "")}
    groups = {
        name.removeprefix(GROUP_PREFIX): str(value)
        for name, value in values.items()
        if name.startswith(GROUP_PREFIX)
    }
    if isinstance(values.get("contest"), str):
        values["contest"] = {"reason": values["contest"]}
    return {"groups": groups} | {name: values[name] for name in MEMBERS if name in values}


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
