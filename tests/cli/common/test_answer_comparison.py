"""When two answers count as the same."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.common.answer_comparison import Reply, difference, findings

TOLERANCE = 1e-4

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def reply(value: object, status: int = 200, content_type: str = "application/json") -> Reply:
    return Reply(status, content_type, value if isinstance(value, bytes) else json.dumps(value).encode())


def told(one: object, other: object) -> str | None:
    return difference(reply(one), reply(other), TOLERANCE)


@given(values)
def test_an_answer_equals_itself(value: object) -> None:
    assert told(value, value) is None


@given(values, values)
def test_difference_does_not_depend_on_the_side(one: object, other: object) -> None:
    assert (told(one, other) is None) == (told(other, one) is None)


@given(st.binary(), st.binary())
def test_what_is_no_json_must_be_equal_to_the_byte(one: bytes, other: bytes) -> None:
    one, other = b"\xff" + one, b"\xff" + other
    assert (told(one, other) is None) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 0.5}, {"a": 0.50001}),
        ([100000.0], [100001.0]),
        ([1e-9], [-1e-9]),
        ([float("nan")], [float("nan")]),
        ([float("inf")], [float("inf")]),
    ],
)
def test_rounding_is_no_difference(one: object, other: object) -> None:
    assert told(one, other) is None


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({"a": 0.5}, {"a": 0.6}, "the answer's a is 0.5 alone and 0.6 in a batch"),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "the answer's a[1].b is 2 alone and 3 in a batch"),
        (1, 1.0, "the answer is a whole number alone and a number with a fraction in a batch"),
        ([1], {"a": 1}, "the answer is a list alone and an object in a batch"),
        (True, 1, "the answer is true or false alone and a whole number in a batch"),
        (None, "", "the answer is null alone and text in a batch"),
        ([1], [1, 2], "the answer has 1 items alone and 2 in a batch"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, 'the answer has its keys in another order in a batch: ["a", "b"], ["b", "a"]'),
        ({"a": 1}, {"b": 1}, 'the answer has the keys ["a"] alone and ["b"] in a batch'),
        (b"{}", b"\xff", "the answer is an object alone and not JSON in a batch"),
        (b"x", b"y", "the bytes differ: x alone, y in a batch"),
        ([float("nan")], [1.0], "the answer's [0] is NaN alone and 1.0 in a batch"),
    ],
)
def test_a_difference_is_told_with_its_place(one: object, other: object, text: str) -> None:
    assert told(one, other) == text


def test_status_and_content_type_count() -> None:
    assert difference(reply("x"), reply("x", status=503), TOLERANCE) == 'the status is 200 alone and 503 in a batch: "x"'
    told_type = difference(reply("x"), reply("x", content_type=""), TOLERANCE)
    assert told_type == "the content type is application/json alone and absent in a batch"


def test_answers_that_change_places_are_told_as_that() -> None:
    alone = [reply({"cat": 0.9}), reply({"dog": 0.8})]
    assert findings(["cat.jpg", "dog.jpg"], alone, alone[::-1], TOLERANCE) == [
        "cat.jpg: in a batch it got the answer to dog.jpg",
        "dog.jpg: in a batch it got the answer to cat.jpg",
    ]


def test_an_input_that_fails_alone_is_told_once() -> None:
    broken = reply({"message": "Prediction failed"}, status=503)
    assert findings(["a"], [broken], [reply(1)], TOLERANCE) == ["a: answered 503 when sent alone: Prediction failed"]


def test_nothing_is_found_where_all_is_well() -> None:
    alone = [reply(1), reply(1), reply(2)]
    assert findings(["a", "b", "c"], alone, alone, TOLERANCE) == []
