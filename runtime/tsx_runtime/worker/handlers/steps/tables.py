"""Tables in requests: the rows of MLflow's `dataframe_split` and `dataframe_records`, and of CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from tsx_runtime.worker.codecs.v2_json import MalformedTensors

SPLIT, RECORDS = "dataframe_split", "dataframe_records"


def rows_of_table(request: dict[str, Any]) -> list[Any] | None:
    """None where the request holds no table. Raises MalformedTensors."""
    if SPLIT in request:
        table = request[SPLIT]
        rows = table.get("data") if isinstance(table, dict) else None
        if not isinstance(rows, list):
            raise MalformedTensors(f'"{SPLIT}" must be an object with "columns" and "data", a list of rows.')
        return rows
    if RECORDS not in request:
        return None
    records = request[RECORDS]
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise MalformedTensors(f'"{RECORDS}" must be a list of objects, one for each row.')
    names = list(records[0]) if records else []
    if any(set(record) != set(names) for record in records):
        raise MalformedTensors(f'All "{RECORDS}" must have the same columns.')
    return [[record[name] for name in names] for record in records]


def rows_of_csv(text: str) -> list[list[float]]:
    """Below the line with the columns' names. Raises MalformedTensors."""
    rows = [row for row in csv.reader(io.StringIO(text)) if row][1:]
    try:
        return [[float(value) for value in row] for row in rows]
    except ValueError as error:
        raise MalformedTensors(f"The CSV holds something that is no number: {error}.") from error
