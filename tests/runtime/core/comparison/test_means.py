"""The difference of two means, whose interval may be read at any time."""

from __future__ import annotations

import math
import random

import pytest

from tsx_runtime.core.comparison.means import (
    MAX_NEEDED,
    MetricCounts,
    compare_means,
    error_scale,
    needed_answers,
    round_count,
)


def count_hits(hits: int, count: int) -> MetricCounts:
    return MetricCounts(count, hits, hits)


@pytest.mark.parametrize("old_grows", [True, False])
def test_the_interval_is_as_narrow_as_estimated_after_the_needed_answers(old_grows: bool) -> None:
    new, old = count_hits(90, 100), count_hits(9000, 10_000)
    needed = needed_answers(new, old, 0.02, old_grows=old_grows)
    # The variance of the new version's few answers differs a little from that of many.
    for factor, is_narrow in ((1.1, True), (0.9, False)):
        more = round(factor * needed)
        value, _, high = compare_means(
            count_hits(round(0.9 * (100 + more)), 100 + more),
            count_hits(9000 + round(0.9 * more), 10_000 + more) if old_grows else old,
        )
        assert (high - value <= 0.02) is is_narrow


def test_too_few_answers_of_an_old_version_never_suffice() -> None:
    new, old = count_hits(900, 1000), count_hits(50, 60)
    assert needed_answers(new, old, 0.01, old_grows=False) == MAX_NEEDED
    assert needed_answers(new, old, 0.01) < MAX_NEEDED


def test_the_scale_of_errors_follows_their_unit() -> None:
    source = random.Random(1)
    errors = [source.expovariate(1) for _ in range(1000)]
    counts = MetricCounts(1000, sum(errors), sum(error**2 for error in errors))
    assert error_scale(counts, counts) == pytest.approx(0.1, rel=0.2)
    assert error_scale(MetricCounts(), MetricCounts()) > 0


def test_constant_errors_have_no_spread() -> None:
    counts = MetricCounts(100, 50, 25)
    assert compare_means(counts, counts, scale=error_scale(counts, counts)) == (0, 0, 0)
    few = MetricCounts(29, 14.5, 7.25)
    assert compare_means(few, counts) == (0, -math.inf, math.inf)


def test_estimated_counts_are_rounded_to_two_digits() -> None:
    assert [round_count(count) for count in (7, 45, 1873, 123_456)] == [7, 45, 1900, 120_000]
