"""Requests that are split by rows, and their answers, which are joined again."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.errors import PayloadTooLarge
from tsx_runtime.features.split_rows.tensors import RowsPart, join, split
from tsx_runtime.wire import Parts
from tsx_runtime.worker.codecs import v2_binary
from tsx_runtime.worker.codecs.json_text import to_compact_json, to_json
from tsx_runtime.worker.codecs.v2_json import output_tensor, read_input

FORMS = st.sampled_from(["flat", "nested", "binary"])
arrays = st.builds(
    lambda rows, dims, dtype, seed: (
        np.random.default_rng(seed).standard_normal((rows, *dims)) * 100
    ).astype(dtype),
    st.integers(1, 12),
    st.lists(st.integers(1, 3), min_size=1, max_size=2),
    st.sampled_from(["float32", "int64", "bool"]),
    st.integers(0, 999),
)


def read_bytes(part: RowsPart) -> bytearray:
    return bytearray(b"".join(part.body.pieces) if isinstance(part.body, Parts) else part.body)


def write_tensor(array: np.ndarray[Any, Any], form: str, raw: list[bytes]) -> dict[str, Any]:
    output = output_tensor("x", array)
    if form == "binary":
        raw.append(array.tobytes())
        del output["data"]
        return {**output, "parameters": {"binary_data_size": len(raw[-1])}}
    return {**output, "data": array.tolist()} if form == "nested" else output


def read_rows(part: RowsPart, raw: bool) -> list[Any]:
    if raw:
        return [
            np.asarray(entry["data"]).reshape(entry["shape"])
            for entry in v2_binary.read(str(part.head), read_bytes(part))[0]["inputs"]
        ]
    return [
        np.asarray(read_input(entry)["data"]) for entry in json.loads(read_bytes(part))["inputs"]
    ]


@given(arrays, FORMS, FORMS, st.integers(1, 13), st.sampled_from([None, 2]))
def test_split_requests_contain_the_same_rows(array, form, second_form, max_rows, indent):
    raw: list[bytes] = []
    head = json.dumps(
        {
            "id": "é",
            "inputs": [write_tensor(array, form, raw), write_tensor(array * 1, second_form, raw)],
        },
        indent=indent,
    ).encode()
    parts = split(b"".join([head, *raw]), len(head) if raw else None, max_rows, 99)
    if len(array) <= max_rows:
        assert parts is None
        return
    assert parts is not None
    assert [part.rows for part in parts] == [
        len(array[start : start + max_rows]) for start in range(0, len(array), max_rows)
    ]
    for column in zip(*(read_rows(part, bool(raw)) for part in parts), strict=True):
        np.testing.assert_array_equal(np.concatenate(column), array)


@given(arrays, st.integers(1, 5), st.sampled_from(["compact", "indented", "binary"]))
def test_joined_answers_equal_one_answer_byte_for_byte(array, max_rows, form):
    def write_answer(rows: np.ndarray[Any, Any]) -> RowsPart:
        raw: list[bytes] = []
        outputs = [
            write_tensor(rows, "binary" if form == "binary" else "flat", raw),
            output_tensor("text", [str(row) for row in rows]),
        ]
        text = (to_json if form == "indented" else to_compact_json)(
            {"model_name": "m", "id": "ü", "outputs": outputs}
        ).encode()
        return RowsPart(len(rows), len(text) if raw else None, b"".join([text, *raw]))

    joined_answer = write_answer(array)
    head, body = join(
        [write_answer(array[start : start + max_rows]) for start in range(0, len(array), max_rows)]
    )
    assert body == joined_answer.body
    assert head == (joined_answer.head or len(body))


def test_string_tensors_are_split_and_large_bodies_not_copied():
    texts = [b"a", b"", b"long " * 20_000]
    raw = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    entry = {
        "name": "x",
        "datatype": "BYTES",
        "shape": [3],
        "parameters": {"binary_data_size": len(raw)},
    }
    head = json.dumps({"inputs": [entry]}).encode()
    parts = split(head + raw, len(head), 1, 99)
    assert parts is not None
    assert [
        v2_binary.read(str(part.head), read_bytes(part))[0]["inputs"][0]["data"] for part in parts
    ] == [[text] for text in texts]
    assert isinstance(parts[2].body, Parts)
    as_json = json.dumps(
        {"inputs": [{**entry, "parameters": {}, "data": ["a, [", "b", 'c"']}]}
    ).encode()
    parts = split(as_json, None, 2, 99)
    assert parts is not None
    assert [json.loads(read_bytes(part))["inputs"][0]["data"] for part in parts] == [
        ["a, [", "b"],
        ['c"'],
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[1, 2]",
        b'{"inputs": 1}',
        # The tensor has one row, of four values.
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 1], "data": [1, 2, 3, 4]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [4, 1], "data": [1, 2, 3]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [4, 1], "data": [[1, 2], [3, 4]]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [4, 1], "data": [1, 2, 3, 4], "parameters": {"data": [1]}}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [4, 1], "data": "\\u0000"}]}',
        b'{"inputs": [{"name": "\\u0000", "datatype": "FP32", "shape": [4, 1], "data": [1, 2, 3, 4]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [4, 1], "parameters": {"binary_data_size": 16}}]}',
    ],
)
def test_ambiguous_requests_are_not_split(body):
    assert split(body, None, 1, 99) is None


def test_an_invalid_header_length_is_left_to_the_worker():
    body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [4, 1], "data": [1, 2, 3, 4]}]}'
    assert split(body, len(body), 1, 99) is not None
    assert split(body, len(body) + 1, 1, 99) is None


def test_a_small_request_is_split_into_a_bounded_number_of_chunks():
    """Bound the number of chunks, and therefore the text that they repeat."""
    many_rows = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [100_000, 1], "data": [0] * 100_000}
            ]
        }
    ).encode()
    with pytest.raises(
        PayloadTooLarge,
        match=r"100000 rows, in 100000 parts of 1 .splitRows., and the queue holds 100",
    ):
        split(many_rows, None, 1, 100)
    wide_tensor = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [100, 1], "data": [0] * 100}],
        "parameters": {"x": "y" * 30_000},
    }
    assert split(json.dumps(wide_tensor).encode(), None, 1, 100) is None
    assert split(json.dumps(wide_tensor).encode(), None, 2, 100) is not None


@given(st.binary(max_size=200), st.none() | st.integers(0, 300), st.integers(1, 4))
def test_splitting_accepts_arbitrary_bytes(body, head, max_rows):
    assert split(body, head, max_rows, 99) is None


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (b"text", "not an answer of the Open Inference Protocol, JSONDecodeError"),
        (
            b'{"outputs": [{"name": "x", "datatype": "INT64", "shape": [3, 1], "data": [1, 2, 3]}]}',
            r"'x' has the shape \[3, 1\] for 2 rows",
        ),
        (b'{"outputs": []}', "different numbers of outputs"),
        (
            b'{"outputs": [{"name": "y", "datatype": "INT64", "shape": [2, 1], "data": [1, 2]}]}',
            "'y' has the shape",
        ),
    ],
)
def test_incompatible_answers_are_not_joined(second, reason):
    first = b'{"outputs": [{"name": "x", "datatype": "INT64", "shape": [2, 1], "data": [1, 2]}]}'
    with pytest.raises(ValueError, match=reason):
        join([RowsPart(2, None, first), RowsPart(2, None, second)])
    with pytest.raises(ValueError):  # noqa: PT011  # any of these
        join([RowsPart(2, None, second), RowsPart(2, None, first)])
