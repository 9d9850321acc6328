"""Tables in the bodies of requests: CSV, Parquet, and several forms of JSON."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

from tsx_runtime.worker.codecs.requests import is_json, media_type_of

if TYPE_CHECKING:
    import pandas

CSV_TYPES = ("text/csv", "application/csv")
TYPES = ("application/json", "text/csv", "application/vnd.apache.parquet")
_PARQUET_START = b"PAR1"
_JSON_ADVICE = (
    'Send an object of columns and values, a list of such objects, a list of rows, or {"columns":'
    ' [...], "data": [...]}.'
)


def read_table(
    body: bytes | bytearray, content_type: str | None, column_types: Any = None
) -> pandas.DataFrame:
    """Read a body as a table.

    Args:
        body: Parquet, which is known by its first bytes; JSON as `read_rows` takes it; or CSV whose
            first line has the names of the columns.
        content_type: The content type of the request, which decides between JSON and CSV.
        column_types: The `dtype` of `pandas.read_csv`; None if pandas chooses the types.

    Raises:
        ValueError: The body is none of these.
    """
    import pandas  # an extra, and slow to import

    if is_json_table(body, content_type):
        return pandas.DataFrame(read_rows(body, content_type)[0])
    if not body:
        raise ValueError(f"The body is empty. {_JSON_ADVICE}")
    is_parquet = body.startswith(_PARQUET_START)
    try:
        if is_parquet:
            return pandas.read_parquet(io.BytesIO(body))
        return pandas.read_csv(io.BytesIO(body), dtype=column_types)
    except ImportError as error:
        raise ValueError(
            "The server lacks pyarrow, which reads Parquet: pip install 'tsx-serve[parquet]'."
        ) from error
    except (ValueError, OSError) as error:
        kind = "Parquet" if is_parquet else "CSV"
        raise ValueError(f"The body cannot be read as {kind}: {error}") from error


def is_json_table(body: bytes | bytearray, content_type: str | None) -> bool:
    """Tell whether a body is JSON, by its content type or else by its first bytes."""
    media_type = media_type_of(content_type or "")
    if body.startswith(_PARQUET_START) or media_type in CSV_TYPES:
        return False
    return media_type == "application/json" or is_json(body)


def read_rows(
    body: bytes | bytearray, content_type: str | None, column_types: Any = None
) -> tuple[list[Any], bool]:
    """Read a body as rows, and tell whether it is a single row without a table around it.

    Each row of JSON is an object, or a list of values in the order of the columns. The arguments
    are those of `read_table`.

    Raises:
        ValueError: The body is no table.
    """
    if not is_json_table(body, content_type):
        return records_of(read_table(body, content_type, column_types)), False
    try:
        return rows_of(json.loads(str(body, "utf-8-sig")))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"The body is not valid JSON: {error}. Send CSV with the content type text/csv."
        ) from error
    except RecursionError as error:
        raise ValueError("The JSON is nested too deeply for a table.") from error


def rows_of(document: Any) -> tuple[list[Any], bool]:
    """Return the rows of a JSON document, and whether it is a single row.

    Raises:
        ValueError: The document is no table.
    """
    if isinstance(document, dict):
        columns, rows = document.get("columns"), document.get("data")
        if not (isinstance(columns, list) and isinstance(rows, list)):
            return [document], True
        for index, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != len(columns):
                raise ValueError(f"Row {index} of data is no list of {len(columns)} values.")
        return [dict(zip(map(str, columns), row, strict=True)) for row in rows], False
    if isinstance(document, list):
        kinds = {kind if kind in (dict, list) else None for kind in map(type, document)}
        if len(kinds) <= 1:
            return ([document], True) if kinds == {None} else (document, False)
    raise ValueError(f"The JSON is no table. {_JSON_ADVICE}")


def records_of(frame: pandas.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dicts of Python values; a missing value is None."""
    named = frame.rename(columns=str).astype(object)
    records: list[dict[str, Any]] = named.where(named.notna(), None).to_dict("records")
    return records
