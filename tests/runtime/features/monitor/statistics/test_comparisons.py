"""The comparison of two versions, which may be read at any time."""

from __future__ import annotations

import random

import pytest

from tsx_runtime.core.comparison.means import MetricCounts
from tsx_runtime.features.monitor.report import VersionComparison
from tsx_runtime.features.monitor.statistics.comparisons import compare_versions


def count_hits(hits: int, count: int) -> MetricCounts:
    return MetricCounts(count, hits, hits)


def compare_accuracy(new: MetricCounts, old: MetricCounts) -> VersionComparison:
    return compare_versions("1.0", "2.0", "accuracy", old, new)


def first_decision(seed: int, new: float, old: float, limit: int) -> str | None:
    """Compare two versions after every 50 answers; return the version that is better first."""
    source = random.Random(seed)
    new_hits = old_hits = 0
    for count in range(50, limit + 1, 50):
        new_hits += sum(source.random() < new for _ in range(50))
        old_hits += sum(source.random() < old for _ in range(50))
        result = compare_accuracy(count_hits(new_hits, count), count_hits(old_hits, count))
        if result.better:
            return result.better
    return None


@pytest.mark.slow
def test_the_better_version_wins_and_equal_ones_draw_in_19_of_20_seeds() -> None:
    better = [first_decision(seed, 0.96, 0.94, 20_000) for seed in range(20)]
    assert better.count("2.0") >= 19
    worse = [first_decision(seed, 0.94, 0.96, 20_000) for seed in range(20)]
    assert worse.count("1.0") >= 19
    equal = [first_decision(seed, 0.95, 0.95, 10_000) for seed in range(20)]
    assert equal.count(None) >= 19


def test_a_decision_names_the_better_version_its_lead_and_the_interval() -> None:
    result = compare_accuracy(count_hits(4805, 5000), count_hits(4700, 5000))
    assert result.better == "2.0"
    assert result.needed is None
    assert result.sentence == (
        "Version 2.0 is better: its accuracy is 2.1 points higher (96.1 % against 94.0 %; 95 %"
        " interval 0.8 to 3.4, valid at any time)."
    )
    reverse = compare_accuracy(count_hits(4700, 5000), count_hits(4805, 5000))
    assert reverse.better == "1.0"
    assert reverse.sentence == result.sentence.replace("2.0 is", "1.0 is")
    assert reverse.difference.value == pytest.approx(-0.021)


def test_without_a_decision_the_needed_answers_are_estimated() -> None:
    result = compare_accuracy(count_hits(960, 1000), count_hits(945, 1000))
    assert result.better is None
    assert result.needed is not None
    assert result.sentence.startswith(
        "No decision yet: the accuracy of version 2.0 is 96.0 %, that of version 1.0 94.5 %. About "
    )
    # The estimate is right if the means stay the same.
    total = 1000 + result.needed
    assert compare_accuracy(
        count_hits(round(0.96 * total), total), count_hits(round(0.945 * total), total)
    ).better
    assert not compare_accuracy(
        count_hits(round(0.96 * 0.98 * total), round(0.98 * total)),
        count_hits(round(0.945 * 0.98 * total), round(0.98 * total)),
    ).better


def test_equal_versions_end_without_a_decision() -> None:
    result = compare_accuracy(count_hits(95_010, 100_000), count_hits(95_000, 100_000))
    assert (result.better, result.needed) == (None, None)
    assert result.sentence == "No decision: the versions differ by at most 0.4 points."


@pytest.mark.parametrize("count", [0, 12])
def test_few_answers_are_not_compared(count: int) -> None:
    result = compare_accuracy(count_hits(count, count), count_hits(90, 100))
    assert (result.better, result.needed) == (None, 30 - count)
    assert f"version 2.0, {count} answers have a known truth" in result.sentence
    assert result.difference.low is None


def test_the_version_with_the_smaller_mean_error_is_better() -> None:
    new, old = MetricCounts(2000, 2040, 4200), MetricCounts(2000, 2460, 6000)
    result = compare_versions("1.0", "2.0", "mean_error", old, new)
    assert result.better == "2.0"
    assert result.sentence.startswith(
        "Version 2.0 is better: its mean error is 0.21 lower (1.02 against 1.23; 95 % interval 0."
    )
    scaled = [MetricCounts(c.count, 1000 * c.total, 1e6 * c.squares) for c in (old, new)]
    in_grams = compare_versions("1.0", "2.0", "mean_error", *scaled)
    assert in_grams.difference.low == pytest.approx(1000 * (result.difference.low or 0))


def test_constant_errors_are_compared() -> None:
    old, new = MetricCounts(100, 50, 25), MetricCounts(100, 60, 36)
    assert compare_versions("1.0", "2.0", "mean_error", old, new).better == "1.0"
    assert compare_versions("1.0", "2.0", "mean_error", old, old).better is None
