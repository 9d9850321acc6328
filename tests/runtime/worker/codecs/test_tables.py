"""Tables in the bodies of requests, as pandas reads them."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest

from tsx_runtime.worker.codecs.tables import read_rows, read_table, records_of

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
    frame = read_table(bytearray(body), kind)
    assert records_of(frame) == ROWS
    assert [type(value) for value in records_of(frame)[0].values()] == [float, str]
    assert read_rows(body, kind) == (ROWS, False)


def test_a_single_row_is_told_from_a_table() -> None:
    assert read_rows(b'{"age": 39}', None) == ([{"age": 39}], True)
    assert read_rows(b"[1, 2]", JSON) == ([[1, 2]], True)
    assert read_rows(b"[[1, 2]]", JSON) == ([[1, 2]], False)
    assert read_rows(b"[]", JSON) == ([], False)
    assert read_table(b"[[1, 2]]", JSON).to_numpy().tolist() == [[1, 2]]


def test_columns_of_csv_may_stay_text() -> None:
    body = b"zip,age\n01,39\n"
    assert records_of(read_table(body, CSV, {"zip": str})) == [{"zip": "01", "age": 39}]


@pytest.mark.parametrize(
    ("body", "kind", "error"),
    [
        (b"", CSV, "The body is empty. Send an object"),
        (b"\n", CSV, "cannot be read as CSV: No columns"),
        (b"a\n1,2\n1,2,3\n", CSV, "cannot be read as CSV"),
        (b"PAR1 and no more", None, "cannot be read as Parquet"),
        (b'"a",1', None, "not valid JSON.*text/csv"),
        (b"[" * 100_000, JSON, "nested too deeply"),
        (b"3", JSON, "no table. Send an object"),
        (b"[1, {}]", JSON, "no table"),
        (b'{"columns": ["a"], "data": [[1], [1, 2]]}', JSON, "Row 1 of data is no list of 1 val"),
    ],
)
def test_a_body_that_is_no_table_is_refused(body: bytes, kind: str | None, error: str) -> None:
    if body.startswith(b"PAR1"):
        pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=re.compile(error, re.DOTALL)):
        read_table(body, kind)
