"""The content type that a client prefers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.shared.content_types import MAX_ACCEPTED, best_type

JSON, CSV, LINES = "application/json", "text/csv", "application/jsonlines"


@pytest.mark.parametrize(
    ("accept", "expected_type"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("text/csv, application/json", CSV),
        ("text/csv;q=0.5, application/json", JSON),
        ("text/csv; Q=0.5, application/json; q=0.4, */*;q=0.1", CSV),
        ("application/*", JSON),
        ("application/*;q=0.9, application/jsonlines", LINES),
        ("application/*, application/json;q=0.1", LINES),
        ("application/json;q=0, */*", CSV),
        ("text/*, application/*;q=0.9", CSV),
        ("text/csv;header=present", CSV),
        ("image/png", None),
        ("application/json;q=0", None),
        ("application/json;q=nan, text/csv;q=x, application/jsonlines;q=0.001", LINES),
        ("*/*;q=0, text/csv", CSV),
    ],
)
def test_the_most_specific_range_determines_a_types_weight(
    accept: str, expected_type: str | None
) -> None:
    assert best_type(accept, [JSON, CSV, LINES]) == expected_type


@given(st.text(alphabet="a*/;q=.019, ", max_size=60))
def test_any_accept_header_selects_an_offered_type_or_none(accept: str) -> None:
    assert best_type(accept, [JSON, CSV]) in (JSON, CSV, None)


def test_a_long_header_is_read_only_up_to_a_limit() -> None:
    assert best_type("image/png," * MAX_ACCEPTED + JSON, [JSON]) is None
