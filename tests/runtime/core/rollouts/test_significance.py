"""Tests of proportions and their intervals, compared with scipy and textbooks."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.rollouts.significance import (
    difference_probability,
    excess_probability,
    wilson_interval,
)


@pytest.fixture(scope="module")
def stats() -> Any:
    return pytest.importorskip("scipy.stats")


@given(count=st.integers(1, 5000), share=st.floats(0, 1), rate=st.floats(0.0001, 0.5))
def test_more_than_a_rate_is_as_likely_as_scipy_says(
    stats: Any, count: int, share: float, rate: float
) -> None:
    hits = round(count * share)
    if hits <= count * rate:
        assert excess_probability(hits, count, rate) == 1.0
    else:
        assert excess_probability(hits, count, rate) == pytest.approx(
            stats.binom.sf(hits - 1, count, rate), rel=1e-6, abs=1e-250
        )


@given(
    count=st.integers(1, 3000),
    base_count=st.integers(1, 3000),
    share=st.floats(0, 1),
    base_share=st.floats(0, 1),
)
def test_a_difference_of_two_samples_is_as_likely_as_fishers_test_says(
    stats: Any, count: int, base_count: int, share: float, base_share: float
) -> None:
    hits, base_hits = round(count * share), round(base_count * base_share)
    table = [[hits, count - hits], [base_hits, base_count - base_hits]]
    if hits * base_count <= base_hits * count:
        assert difference_probability(hits, count, base_hits, base_count) == 1.0
    else:
        assert difference_probability(hits, count, base_hits, base_count) == pytest.approx(
            stats.fisher_exact(table, alternative="greater").pvalue, rel=1e-5, abs=1e-300
        )


def test_large_samples_are_compared_by_the_normal_distribution(stats: Any) -> None:
    exact = stats.hypergeom.sf(20_299, 8_040_300, 40_300, 4_000_000)
    assert difference_probability(20_300, 4_000_000, 20_000, 4_040_300) == pytest.approx(
        exact, rel=0.05
    )


def test_nothing_seen_is_no_difference() -> None:
    assert (
        difference_probability(0, 0, 0, 0)
        == difference_probability(0, 10, 0, 0)
        == difference_probability(3, 10, 0, 0)
        == 1.0
    )
    assert excess_probability(0, 0, 0.1) == 1.0
    assert excess_probability(1, 10, 0.0) == 0.0
    assert not math.isnan(difference_probability(1, 1, 0, 1 << 40))


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_rate_lies_in_its_interval_and_more_requests_make_it_narrower(
    first: int, second: int
) -> None:
    hits, count = min(first, second), max(first, second)
    low, high = wilson_interval(hits, count)
    assert 0 <= low <= (hits / count if count else 0) <= high <= 1
    more = wilson_interval(hits * 4, count * 4)
    assert more[1] - more[0] <= high - low


def test_an_interval_is_that_of_the_books() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(5, 100) == pytest.approx((0.02154, 0.11175), abs=1e-4)
    assert wilson_interval(0, 300) == pytest.approx((0.0, 0.01264), abs=1e-4)
