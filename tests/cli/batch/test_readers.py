"""Readers of every format can resume at any position between two rows."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tsx_cli.batch.readers import InputReader, RowFormat
from tsx_cli.batch.rows import Position, Row
from tsx_cli.common.failure import CliError, UsageError

Text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
Values = st.lists(st.fixed_dictionaries({"a": Text, "b": Text}), max_size=9)
property_settings = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def all_rows(reader: InputReader) -> list[Row]:
    return list(reader.rows(Position(), 0))


def check_positions(reader: InputReader) -> list[Row]:
    """Check that a reader resumes after each row, and that its progress grows to the total."""
    rows = all_rows(reader)
    for row in rows:
        assert list(reader.rows(row.next_position, row.index + 1)) == rows[row.index + 1 :]
    assert [row.index for row in rows] == list(range(len(rows)))
    progress = [row.next_position.done for row in rows]
    assert progress == sorted(progress)
    assert reader.total is None or max(progress, default=0) <= reader.total
    return rows


@property_settings
@given(Values, st.booleans())
def test_json_lines_are_read_from_any_position(
    tmp_path: Path, values: list[dict[str, str]], ascii: bool
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(f"{json.dumps(value, ensure_ascii=ascii)}\n\n" for value in values),
        encoding="utf-8",
        newline="",
    )
    rows = check_positions(InputReader([str(file)]))
    assert [json.loads(row.body) for row in rows] == values
    assert [row.id for row in rows] == [
        f"rows.jsonl:{2 * number + 1}" for number in range(len(values))
    ]
    assert [
        json.loads(row.body)
        for row in check_positions(InputReader([str(file)], rows=RowFormat(id_field="a")))
    ] == values


@property_settings
@given(Values)
def test_csv_is_read_from_any_position(tmp_path: Path, values: list[dict[str, str]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["a", "b"], quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(values)
    (tmp_path / "rows.csv").write_bytes(text.getvalue().encode("utf-8-sig"))
    rows = check_positions(InputReader([str(tmp_path / "rows.csv")]))
    assert [json.loads(row.body) for row in rows] == values
    sent = check_positions(InputReader([str(tmp_path / "rows.csv")], rows=RowFormat("b", "a")))
    assert [(row.id, row.body.decode()) for row in sent] == [(row["a"], row["b"]) for row in values]


@property_settings
@given(
    st.lists(st.tuples(st.binary(max_size=5), st.integers(0, 9) | st.none()), max_size=9),
    st.integers(1, 4),
)
def test_parquet_is_read_from_any_position(
    tmp_path: Path, values: list[tuple[bytes, int | None]], group: int
) -> None:
    schema = pa.schema([("image", pa.binary()), ("n", pa.int64())])
    table = pa.table(
        {"image": [image for image, _ in values], "n": [number for _, number in values]},
        schema=schema,
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=group)
    rows = check_positions(InputReader([str(tmp_path / "rows.parquet")]))
    assert [json.loads(row.body) for row in rows] == [
        {"image": base64.b64encode(image).decode(), "n": number} for image, number in values
    ]
    sent = all_rows(InputReader([str(tmp_path / "rows.parquet")], rows=RowFormat("image")))
    assert [(row.body, row.content_type) for row in sent] == [
        (image, "application/octet-stream") for image, _ in values
    ]


def test_inputs_of_several_formats_are_read_in_turn(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name, content in {
        "a/2.txt": "two",
        "a/1.jpg": "one",
        "a/.hidden": "",
        "rows.jsonl": '{"x": 1}\n',
        "rows.csv": "x\n2\n",
    }.items():
        (tmp_path / name).write_text(content)
    rows = check_positions(
        InputReader([str(tmp_path / name) for name in ("rows.csv", "a", "rows.jsonl")])
    )
    assert [(row.id, row.body, row.content_type) for row in rows] == [
        ("rows.csv:2", b'{"x": "2"}', "application/json"),
        ("a/1.jpg", b"one", "image/jpeg"),
        ("a/2.txt", b"two", "text/plain"),
        ("rows.jsonl:1", b'{"x": 1}', "application/json"),
    ]
    assert [row.id for row in all_rows(InputReader([str(tmp_path / "a")]))] == ["1.jpg", "2.txt"]


def test_many_files_are_read_in_order_and_from_any_position(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:02}.bin").write_bytes(bytes([number, 255]))
    reader = InputReader([str(tmp_path)])
    assert [row.body[0] for row in check_positions(reader)] == list(range(60))
    assert reader.exact
    assert reader.total == 60


@pytest.mark.parametrize(
    ("content", "name", "options", "error"),
    [
        ("no json\n", "rows.jsonl", RowFormat("x"), "Expecting value"),
        ('{"y": 1}\n', "rows.jsonl", RowFormat("x"), "it has no 'x', but y"),
        ("[1]\n", "rows.jsonl", RowFormat("x"), "list indices"),
        ("x,y\n1\n", "rows.csv", None, "it has 1 columns, and the first line names 2"),
        ("x\n\udcff\n", "rows.csv", RowFormat("x"), "'utf-8' codec can't encode"),
    ],
)
def test_an_unreadable_row_becomes_an_error_and_reading_continues(
    tmp_path: Path, content: str, name: str, options: RowFormat | None, error: str
) -> None:
    valid_line = {"rows.jsonl": '{"x": 2}\n', "rows.csv": "7,8\n" if "y" in content else "7\n"}[
        name
    ]
    (tmp_path / name).write_bytes((content + valid_line).encode("utf-8", "surrogateescape"))
    invalid_row, valid_row = check_positions(InputReader([str(tmp_path / name)], rows=options))
    assert invalid_row.error is not None
    assert invalid_row.error.startswith(f"the row cannot be read: {error}")
    assert valid_row.error is None


def test_an_id_with_a_surrogate_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "a\\ud800", "x": "b"}\n')
    [row] = all_rows(InputReader([str(tmp_path / "rows.jsonl")], rows=RowFormat("x", "id")))
    assert (row.id, row.error) == ("a?", None)


def test_a_file_above_the_row_limit_is_an_error_of_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_cli.batch.readers.MAX_ROW_BYTES", 1)
    for name in ("a", "bb", "c"):
        (tmp_path / name).write_text(name)
    rows = all_rows(InputReader([str(tmp_path)]))
    errors = [row.error for row in rows]
    assert errors[::2] == [None, None]
    assert "2 bytes, and a row has 1 at most" in str(errors[1])


@pytest.mark.parametrize(
    ("format", "head", "other_head", "ids"),
    [
        (None, b"", b"", ["stdin:1", "stdin:2", "stdin:3"]),
        ("csv", b"y\n", b"z\n", ["stdin:2", "stdin:3", "stdin:4"]),
    ],
)
def test_standard_input_resumes_only_with_the_same_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str | None,
    head: bytes,
    other_head: bytes,
    ids: list[str],
) -> None:
    def read(content: bytes, start: Position, index: int) -> list[Row]:
        (tmp_path / "pipe").write_bytes(content)
        with (tmp_path / "pipe").open("rb") as file:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
            return list(InputReader(["-"], format).rows(start, index))

    rows = read(head + b"1\n2\n3\n", Position(), 0)
    assert [row.id for row in rows] == ids
    assert read(head + b"1\n2\n3\n", rows[0].next_position, 1) == rows[1:]
    for other_content in (
        head + b"9\n2\n3\n",
        *([other_head + b"1\n2\n3\n"] if other_head else []),
    ):
        with pytest.raises(CliError, match="does not begin with the rows that the output has"):
            read(other_content, rows[0].next_position, 1)


@pytest.mark.parametrize(
    ("inputs", "format", "message"),
    [
        (["-", "a"], None, "is the only input"),
        (["-"], "parquet", "brings JSON lines or"),
        (["a", "a"], None, "named twice"),
        (["nothing"], None, "nothing' cannot be read .No such file"),
        (["."], None, "there are no files in"),
        (["rows.parquet"], None, "rows.parquet cannot be read"),
        (["rows.csv"], None, "rows.csv cannot be read .new-line character"),
    ],
)
def test_unusable_inputs_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inputs: list[str],
    format: str | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if inputs[0].startswith("rows"):
        Path(inputs[0]).write_bytes(b"no,\rparquet\n")
    with pytest.raises((CliError, UsageError), match=message):
        all_rows(InputReader(inputs, format))


def test_inputs_with_one_row_per_file_have_no_fields(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UsageError, match="each row is a whole file"):
        InputReader([str(tmp_path)], rows=RowFormat("x"))


def test_only_regular_files_of_a_directory_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.txt").write_text("a")
    assert [row.id for row in all_rows(InputReader([str(tmp_path)]))] == ["a.txt"]


def test_fingerprints_change_with_the_content_and_the_options(tmp_path: Path) -> None:
    def fingerprint(**options: Any) -> object:
        return InputReader([str(tmp_path / "a.jsonl")], **options).fingerprint

    (tmp_path / "a.jsonl").write_text("1")
    first_fingerprint = fingerprint()
    assert fingerprint() == first_fingerprint != fingerprint(rows=RowFormat("x"))
    (tmp_path / "a.jsonl").write_text("22")
    assert fingerprint() != first_fingerprint
