"""Tables in the bodies of requests: CSV, Parquet, and several forms of JSON."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from tsx_runtime.worker.codecs.requests import is_json, media_type_of

if TYPE_CHECKING:
    import pandas

CSV_TYPES = ("text/csv", "application/csv")
UPLOAD_TYPES = ("text/csv", "application/vnd.apache.parquet")


def read_document(
    body: bytes | bytearray, content_type: str | None, column_types: Any = None
) -> Any:
    """Read a body as a data frame (CSV or Parquet), or as a JSON document.

    Args:
        body: Parquet, which is known by its first bytes; JSON; or CSV whose first line has the
            names of the columns.
        content_type: The content type of the request, which decides between JSON and CSV.
        column_types: The `dtype` of `pandas.read_csv`; None if pandas chooses the types.

    Raises:
        ValueError: The body is none of these.
    """
    import pandas  # an extra, and slow to import

    media_type = media_type_of(content_type or "")
    try:
        if body.startswith(b"PAR1"):
            return pandas.read_parquet(io.BytesIO(body))
        if media_type == "application/json" or (media_type not in CSV_TYPES and is_json(body)):
            return from_json(body)
        return pandas.read_csv(io.BytesIO(body), dtype=column_types)
    except (ValueError, OSError, ImportError) as error:  # Parquet needs pyarrow.
        raise ValueError(
            f"The body is no JSON, CSV (content type text/csv) or Parquet: {error}."
        ) from error


def rows_of(document: Any) -> Any:
    """Return the row or the list of rows of a data frame or a JSON document.

    A row of JSON is an object, or a list of values in the order of the columns.

    Raises:
        ValueError: The document is no table.
    """
    if hasattr(document, "to_dict"):
        return records_of(document)
    if isinstance(document, dict) and {"columns", "data"} <= document.keys():
        try:
            names = list(map(str, document["columns"]))
            return [dict(zip(names, row, strict=True)) for row in document["data"]]
        except (TypeError, ValueError) as error:
            raise ValueError(f"Each row of data needs a value for each column: {error}.") from error
    if isinstance(document, dict | list):
        return document
    raise ValueError(
        "The JSON is no table. Send an object of columns and values, a list of such objects, a"
        ' list of rows, or {"columns": [...], "data": [...]}.'
    )


def is_table(rows: Any) -> bool:
    """Tell whether the result of `rows_of` is a list of rows, and not a single row."""
    return isinstance(rows, list) and {*map(type, rows)} in ({dict}, {list}, set())


def frame_of(document: Any) -> pandas.DataFrame:
    """Return a data frame, or a JSON document as one.

    Raises:
        ValueError: The document is no table.
    """
    import pandas

    if isinstance(document, pandas.DataFrame):
        return document
    rows = rows_of(document)
    return pandas.DataFrame(rows if is_table(rows) else [rows])


def records_of(frame: pandas.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dicts of Python values; a missing value is None."""
    named = frame.rename(columns=str).astype(object)
    records: list[dict[str, Any]] = named.where(named.notna(), None).to_dict("records")
    return records
