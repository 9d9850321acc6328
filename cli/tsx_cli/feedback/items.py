"""The feedback items of a file, and their way to the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from tsx_cli.batch.readers import InputReader
from tsx_cli.batch.rows import Position
from tsx_cli.common.client import Server, path, reading_answers
from tsx_cli.common.failure import CliError

BATCH_ITEMS = 1000
GROUP_PREFIX = "groups."  # A column of this name has the group of an attribute.
MEMBERS = ("request_id", "key", "row", "truth", "contest", "groups", "at", "version", "replace")


def send_feedback(
    server: Server, model: str, file: str, show_progress: Callable[[str], None]
) -> dict[str, Any]:
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
        show_progress(f"{sum(stored.values()):,} items are stored")
    if not errors and not sum(stored.values()):
        raise CliError(f"{file} has no items")
    return {"model": model, **stored, "errors": errors}


def _read_items(file: str) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the line of each item, such as truth.csv:17, the item, and why it cannot be read."""
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
