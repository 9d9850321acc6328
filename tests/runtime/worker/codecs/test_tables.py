"""Tables in the bodies of requests, as pandas reads them."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest

from tsx_runtime.worker.codecs.tables import frame_of, is_table, read_document, records_of, rows_of

pd = pytest.importorskip("pandas")

JSON, CSV = "application/json", "text/csv; charset=utf-8"
ROWS = [{"age": 39, "city": "Bern"}, {"age": None, "city": "Ulm"}]


def parquet() -> bytes:
    pytest.importorskip("pyarrow")
    file = io.BytesIO()
    pd.DataFrame(ROWS).to_parquet(file)
    return file.getvalue()


TABLES = {
    "records": (ROWS, JSON),
    "split": ({"columns": ["age", "city"], "data": [[39, "Bern"], [None, "Ulm"]]}, JSON),
    "csv": (b"age,city\n39,Bern\n,Ulm\n", CSV),
    "csv without its type": (b"age,city\n39,Bern\n,Ulm\n", None),
    "quoted csv": (b'"age","city"\n39,"Bern"\n,"Ulm"\n', CSV),
    "parquet": (parquet, "application/octet-stream"),
}


@pytest.mark.parametrize("name", TABLES)
def test_each_form_of_a_table_has_the_same_rows(name: str) -> None:
    value, kind = TABLES[name]
    content: Any = value() if callable(value) else value
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    frame = frame_of(read_document(bytearray(body), kind))
    assert records_of(frame) == ROWS
    assert [type(value) for value in records_of(frame)[0].values()] == [float, str]
    assert rows_of(read_document(body, kind)) == ROWS


def test_a_single_row_is_told_from_a_table() -> None:
    assert not is_table(rows_of({"age": 39}))
    assert not is_table(rows_of([1, 2]))
    assert is_table(rows_of([[1, 2]]))
    assert is_table(rows_of([]))
    assert frame_of([1, 2]).to_numpy().tolist() == frame_of([[1, 2]]).to_numpy().tolist()


def test_columns_of_csv_may_stay_text() -> None:
    body = b"zip,age\n01,39\n"
    assert records_of(read_document(body, CSV, {"zip": str})) == [{"zip": "01", "age": 39}]


@pytest.mark.parametrize(
    ("body", "kind", "error"),
    [
        (b"", CSV, "Parquet: No columns"),
        (b"\n", CSV, "Parquet: No columns"),
        (b"a\n1,2\n1,2,3\n", CSV, "or Parquet"),
        (b"PAR1 and no more", None, "or Parquet"),
        (b'"a",1', None, "no JSON, CSV .content type text/csv"),
        (b"[" * 100_000, JSON, "recursion limit"),
        (b"3", JSON, "no table. Send an object"),
        (b'{"columns": ["a"], "data": [[1], [1, 2]]}', JSON, "a value for each column"),
    ],
)
def test_a_body_that_is_no_table_is_refused(body: bytes, kind: str | None, error: str) -> None:
    if body.startswith(b"PAR1"):
        pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=re.compile(error, re.DOTALL)):
        frame_of(read_document(body, kind))
