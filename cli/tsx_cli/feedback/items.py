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
        CliError: The file cannot be read, or the server refuses a batch.
    """
    lines, stored = _lines(file), {"accepted": 0, "duplicates": 0}
    errors: list[dict[str, str]] = []
    while batch := list(islice(lines, BATCH_ITEMS)):
        faults = [(line, item) for line, item in batch if isinstance(item, str)]
        errors += [{"line": line, "code": "invalid", "message": text} for line, text in faults]
        sent = [(line, item) for line, item in batch if isinstance(item, dict)]
        try:
            answer = server.call_json("POST", path("feedback", model), [item for _, item in sent])
        except CliError as error:
            error.message += (
                f"; {sum(stored.values()):,} items before {batch[0][0]} are stored. The command may"
                " be repeated: each item is counted once"
            )
            raise
        with reading_answers():
            for name in stored:
                stored[name] += answer[name]
            for problem in answer["errors"]:
                errors.append({"line": sent[problem.pop("index")][0], **problem})
        show_progress(f"{sum(stored.values()):,} items are stored")
    return {"model": model, **stored, "errors": errors}


def _lines(file: str) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yield each item with its line, such as truth.csv:17; one that cannot be read is its error."""
    for row in InputReader([file]).rows(Position(), 0):
        try:
            values = row.error or json.loads(row.body)
        except (ValueError, RecursionError) as error:
            values = str(error)
        if isinstance(values, list):  # It is a file of JSON.
            for number, value in enumerate(values, 1):
                yield f"{row.id}, item {number}", _item(value)
        else:
            yield row.id, values if isinstance(values, str) else _item(values)


def _item(row: Any) -> dict[str, Any] | str:
    if not isinstance(row, dict):
        return "it is not an object with request_id or key, and truth"
    values = {name: value for name, value in row.items() if value not in (None, "")}
    item = {name: values[name] for name in MEMBERS if name in values}
    groups = {
        name.removeprefix(GROUP_PREFIX): str(value)
        for name, value in values.items()
        if name.startswith(GROUP_PREFIX)
    }
    if groups:
        item["groups"] = groups
    if isinstance(item.get("contest"), str):
        item["contest"] = {"reason": item["contest"]}
    return item
