"""Statistical tests and intervals of proportions, compared with scipy and textbook values."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.comparison.significance import (
    difference_probability,
    excess_probability,
    wilson_interval,
)


@pytest.fixture(scope="module")
def stats() -> Any:
    return pytest.importorskip("scipy.stats")


@pytest.mark.nightly
@given(count=st.integers(1, 5000), proportion=st.floats(0, 1), rate=st.floats(0.0001, 0.5))
def test_the_binomial_test_agrees_with_scipy(
    stats: Any, count: int, proportion: float, rate: float
) -> None:
    hits = round(count * proportion)
    if hits <= count * rate:
        assert excess_probability(hits, count, rate) == 1.0
    else:
        assert excess_probability(hits, count, rate) == pytest.approx(
            stats.binom.sf(hits - 1, count, rate), rel=1e-6, abs=1e-250
        )


@given(
    count=st.integers(1, 3000),
    base_count=st.integers(1, 3000),
    proportion=st.floats(0, 1),
    base_proportion=st.floats(0, 1),
)
def test_the_two_sample_test_agrees_with_fishers(
    stats: Any, count: int, base_count: int, proportion: float, base_proportion: float
) -> None:
    hits, base_hits = round(count * proportion), round(base_count * base_proportion)
    table = [[hits, count - hits], [base_hits, base_count - base_hits]]
    if hits * base_count <= base_hits * count:
        assert difference_probability(hits, count, base_hits, base_count) == 1.0
    else:
        assert difference_probability(hits, count, base_hits, base_count) == pytest.approx(
            stats.fisher_exact(table, alternative="greater").pvalue, rel=1e-5, abs=1e-300
        )


def test_large_samples_use_the_normal_approximation(stats: Any) -> None:
    exact_probability = stats.hypergeom.sf(20_299, 8_040_300, 40_300, 4_000_000)
    assert difference_probability(20_300, 4_000_000, 20_000, 4_040_300) == pytest.approx(
        exact_probability, rel=0.05
    )


def test_empty_samples_do_not_differ() -> None:
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
def test_an_interval_contains_its_rate_and_shrinks_with_more_requests(
    first: int, second: int
) -> None:
    hits, count = min(first, second), max(first, second)
    lower, upper = wilson_interval(hits, count)
    assert 0 <= lower <= (hits / count if count else 0) <= upper <= 1
    narrower_interval = wilson_interval(hits * 4, count * 4)
    assert narrower_interval[1] - narrower_interval[0] <= upper - lower


def test_intervals_match_textbook_values() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(5, 100) == pytest.approx((0.02154, 0.11175), abs=1e-4)
    assert wilson_interval(0, 300) == pytest.approx((0.0, 0.01264), abs=1e-4)
