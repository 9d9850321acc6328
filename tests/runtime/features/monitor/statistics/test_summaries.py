"""Summaries of columns, and other values in the same bins."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_archiver.errors import CannotPack
from tsx_archiver.monitor.baseline import (
    OTHERS,
    CategorySummary,
    MonitorBaseline,
    NumberSummary,
    parse_baseline,
)
from tsx_runtime.features.monitor.statistics.summaries import bin_column, summarize


def numbers_of(*values: float | None) -> NumberSummary:
    summary = summarize([{"x": value} for value in values])["x"]
    assert isinstance(summary, NumberSummary)
    return summary


def test_numbers_are_counted_in_bins_of_their_quantiles() -> None:
    summary = numbers_of(*map(float, range(1000)), None)
    assert (summary.count, summary.missing, summary.mean) == (1000, 1, 499.5)
    assert sum(summary.counts) == 1000
    assert len(summary.counts) <= 64
    assert max(summary.counts) <= 18
    assert (summary.counts[0], summary.counts[-1]) == (0, 0)  # outside the range


def test_values_outside_the_range_of_a_constant_are_seen() -> None:
    constant = numbers_of(*[3.0] * 10)
    assert bin_column([2.0, 3.0, 3.0, 4.0, None, "x"], constant) == constant.model_copy(
        update={"count": 4, "missing": 2, "counts": (1, 2, 1)}
    )


@given(st.lists(st.floats(-1e100, 1e100), min_size=1))
def test_each_value_is_in_the_bin_between_its_edges(values: list[float]) -> None:
    summary = numbers_of(*values)
    edges = [-np.inf, *summary.edges, np.inf]
    for index, count in enumerate(summary.counts):
        assert count == sum(edges[index] < value <= edges[index + 1] for value in values)
    assert NumberSummary.model_validate_json(summary.model_dump_json()) == summary


def test_rare_categories_are_pooled_since_they_may_name_a_person() -> None:
    rows = [{"x": "de"}] * 10 + [{"x": "fr"}] * 5 + [{"x": f"person {i}"} for i in range(4)] + [{}]
    summary = summarize(rows)["x"]
    assert isinstance(summary, CategorySummary)
    assert summary.counts == {"de": 10, "fr": 5, OTHERS: 4}
    assert (summary.count, summary.missing) == (19, 1)
    live = bin_column(["de", "new", None], summary)
    assert live.counts == {"de": 1, "fr": 0, OTHERS: 1}
    assert live.missing == 1


def test_a_summary_of_many_wide_columns_fits_into_an_archive() -> None:
    random = np.random.default_rng(0)
    rows = [
        {f"n{column}": value for column, value in enumerate(values)}
        | {f"c{column}": f"category {int(10 * value)}" for column, value in enumerate(values)}
        for values in random.random((500, 100)).tolist()
    ]
    baseline = MonitorBaseline(rows=500, created=0.0, columns=summarize(rows))
    assert len(baseline.model_dump_json()) < 500_000


def test_columns_without_values_can_be_compared_later() -> None:
    summary = numbers_of(None, None)
    assert (summary.count, summary.missing) == (0, 2)
    assert bin_column([1.0, None], summary).counts == (1,)


@pytest.mark.parametrize(
    "columns",
    [
        {"x": {"kind": "number", "count": 10**400, "edges": [1.0], "counts": [1, 1]}},
        {"x": {"kind": "number", "count": 2, "edges": [float("nan")], "counts": [1, 1]}},
        {"x": {"kind": "category", "count": 1, "counts": {"a": 10**400}}},
        {str(number): {"kind": "category", "count": 0} for number in range(1001)},
    ],
)
def test_a_baseline_that_was_edited_badly_is_refused(columns: object) -> None:
    text = json.dumps({"rows": 1, "created": 1.0, "columns": columns}).encode()
    with pytest.raises(CannotPack, match="tsx monitor baseline"):
        parse_baseline(text, "it")
