"""The comparison of two responses: when they are equal, and how a difference is reported."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.archive.check import difference, findings
from tsx_runtime.core.comparison.difference import Difference
from tsx_runtime.plugins import ComparedAnswer

TOLERANCE = 1e-4

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def reply(
    value: object, status: int = 200, content_type: str = "application/json"
) -> ComparedAnswer:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return ComparedAnswer(status, {"content-type": content_type} if content_type else {}, body)


def difference_text(first: object, second: object) -> str | None:
    return sentence(difference(reply(first), reply(second), TOLERANCE))


def sentence(difference: Difference | None) -> str | None:
    return None if difference is None else difference.between("alone", "in a batch")


@given(values)
def test_a_response_equals_itself(value: object) -> None:
    assert difference_text(value, value) is None


@given(values, values)
def test_the_comparison_is_symmetric(first: object, second: object) -> None:
    assert (difference_text(first, second) is None) == (difference_text(second, first) is None)


@given(st.binary(), st.binary())
def test_responses_other_than_json_must_have_equal_bytes(first: bytes, second: bytes) -> None:
    first, second = b"\xff" + first, b"\xff" + second
    assert (difference_text(first, second) is None) == (first == second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 0.5}, {"a": 0.50001}),
        ([100000.0], [100001.0]),
        ([1e-9], [-1e-9]),
        ([float("nan")], [float("nan")]),
        ([float("inf")], [float("inf")]),
    ],
)
def test_rounding_is_not_a_difference(first: object, second: object) -> None:
    assert difference_text(first, second) is None


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"a": 0.5}, {"a": 0.6}, "a: 0.5 (alone), 0.6 (in a batch)"),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "a.1.b: 2 (alone), 3 (in a batch)"),
        (1, 1.0, "the answer: 1 (alone), 1.0 (in a batch)"),
        ([1], {"a": 1}, "the answer: a list (alone), an object (in a batch)"),
        (True, 1, "the answer: true (alone), 1 (in a batch)"),
        (None, "", 'the answer: null (alone), "" (in a batch)'),
        ([1], [1, 2], "the answer: 1 item (alone), 2 items (in a batch)"),
        (
            {"a": 1, "b": 2},
            {"b": 2, "a": 1},
            "the answer: a, b (alone), b, a (in a batch); the keys are in another order",
        ),
        ({"a": 1}, {"b": 1}, "a: present (alone), absent (in a batch)"),
        (b"{}", b"\xff", "the answer: JSON (alone), not JSON (in a batch)"),
        (b"x", b"y", "body: x (alone), y (in a batch); they differ from byte 0 on"),
        ([float("nan")], [1.0], "0: NaN (alone), 1.0 (in a batch)"),
    ],
)
def test_a_difference_is_reported_with_its_path(first: object, second: object, text: str) -> None:
    assert difference_text(first, second) == text


def test_another_status_or_content_type_is_a_difference() -> None:
    status = difference(reply("x"), reply("x", status=503), TOLERANCE)
    assert sentence(status) == 'status: 200 (alone), 503 (in a batch); "x"'
    content_type = difference(reply("x"), reply("x", content_type=""), TOLERANCE)
    assert sentence(content_type) == "content type: application/json (alone), absent (in a batch)"


def test_swapped_responses_are_reported_as_swapped() -> None:
    single_replies = [reply({"cat": 0.9}), reply({"dog": 0.8})]
    assert findings(["cat.jpg", "dog.jpg"], single_replies, single_replies[::-1], TOLERANCE) == [
        "cat.jpg: in a batch, its answer was the answer to dog.jpg",
        "dog.jpg: in a batch, its answer was the answer to cat.jpg",
    ]


def test_an_input_that_also_fails_unbatched_is_reported_once() -> None:
    failed_reply = reply({"message": "Prediction failed"}, status=503)
    assert findings(["a"], [failed_reply], [reply(1)], TOLERANCE) == [
        "a: answered 503 when sent alone: Prediction failed"
    ]


def test_equal_responses_have_no_findings() -> None:
    single_replies = [reply(1), reply(1), reply(2)]
    assert findings(["a", "b", "c"], single_replies, single_replies, TOLERANCE) == []
