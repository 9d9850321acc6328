"""Durations, sizes, fractions and percentages as text."""

from __future__ import annotations

import pytest

from tsx_archiver.quantities import (
    for_text,
    parse_bytes,
    parse_percent,
    parse_seconds,
    parse_share,
)


def test_a_duration_without_a_unit_is_in_seconds() -> None:
    texts = ("250us", "500ms", "90", " 90 s ", "10m", "10min", "1.5h", "7D")
    assert [parse_seconds(text) for text in texts] == [
        0.00025,
        0.5,
        90,
        90,
        600,
        600,
        5400,
        604_800,
    ]


def test_kilo_is_1000_or_the_given_factor() -> None:
    assert [parse_bytes(text) for text in ("10", "10B", "1.5 kB", "100MB", "2gb", "1T")] == [
        10,
        10,
        1500,
        10**8,
        2 * 10**9,
        10**12,
    ]
    assert parse_bytes("10M", kilo=1024) == 10 << 20
    assert [parse_bytes(text) for text in ("64MiB", "1 GiB")] == [64 << 20, 1 << 30]


def test_a_fraction_is_of_one_and_a_percentage_of_a_hundred() -> None:
    assert [parse_share(text) for text in ("20%", "0.2", " 5 %")] == [0.2, 0.2, 0.05]
    assert [parse_percent(text) for text in ("20%", "20", "0.5%", "-1")] == [20, 20, 0.5, -1]


@pytest.mark.parametrize("parse", [parse_seconds, parse_bytes, parse_percent, parse_share])
@pytest.mark.parametrize(
    "text", ["", "soon", "1e999", "nan", "10 parsecs", "1 0", "%", "9" * 400 + "m"]
)
def test_invalid_text_is_refused_with_an_example(parse, text) -> None:
    with pytest.raises(ValueError, match=r"^it must be a .* such as "):
        parse(text)


def test_a_value_that_is_not_text_is_unchanged() -> None:
    assert [for_text(parse_share)(value) for value in (20, None, "20%")] == [20, None, 0.2]
