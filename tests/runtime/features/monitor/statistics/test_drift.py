"""The comparison of two distributions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tsx_archiver.monitor.baseline import ColumnSummary, NumberSummary
from tsx_runtime.features.monitor.statistics.drift import MONTH_S, compare, window_alpha
from tsx_runtime.features.monitor.statistics.summaries import bin_column, summarize


def summaries(baseline: list[float], live: list[float]) -> tuple[ColumnSummary, ColumnSummary]:
    first = summarize([{"x": value} for value in baseline])["x"]
    return first, bin_column(live, first)


def normal(seed: int, rows: int, mean: float = 0.0) -> list[float]:
    return np.random.default_rng(seed).normal(mean, size=rows).tolist()  # type: ignore[no-any-return]  # numpy's types


def test_equal_distributions_differ_by_nothing() -> None:
    values = normal(0, 500)
    result = compare(*summaries(values, values))
    assert (result.psi, result.js, result.p_value) == (0.0, 0.0, 1.0)


def test_the_index_is_that_of_the_distributions_in_small_samples_too() -> None:
    # The index of normal distributions whose means differ by one standard deviation is 1.
    indices = [
        compare(*summaries(normal(seed, 2000), normal(1000 + seed, 100, 0.5))).psi
        for seed in range(50)
    ]
    assert np.mean(indices) == pytest.approx(0.25, abs=0.05)
    none = [
        compare(*summaries(normal(seed, 2000), normal(1000 + seed, 100))).psi for seed in range(50)
    ]
    assert np.median(none) < 0.02


def test_the_distance_is_that_of_scipy_for_categories() -> None:
    first = summarize([{"x": name} for name in ["a"] * 50 + ["b"] * 50])["x"]
    result = compare(first, bin_column(["a"] * 20 + ["b"] * 80, first))
    expected = stats.chi2_contingency([[50, 50], [20, 80]], False, "log-likelihood")
    assert result.test == "chi2"
    assert result.statistic == pytest.approx(expected.statistic)
    assert result.p_value == pytest.approx(expected.pvalue)
    from scipy.spatial.distance import jensenshannon

    assert result.js == pytest.approx(jensenshannon([0.5, 0.5], [0.2, 0.8], 2))


def test_disjoint_distributions_have_distance_1() -> None:
    assert compare(*summaries([1.0] * 100, [2.0] * 100)).js == pytest.approx(1)
    assert compare(*summaries([1.0] * 100, [0.0] * 100)).js == pytest.approx(1)


def test_the_test_of_numbers_is_at_least_as_strict_as_that_of_scipy() -> None:
    for seed in range(20):
        first, second = normal(seed, 1000), normal(100 + seed, 400, 0.3)
        result = compare(*summaries(first, second))
        if result.test == "ks":
            exact = stats.ks_2samp(first, second)
            assert result.statistic <= exact.statistic
            assert result.p_value >= exact.pvalue


def test_p_values_of_equal_distributions_are_uniform_or_larger() -> None:
    """Count small p-values of counts that are drawn in the bins of baselines."""
    random = np.random.default_rng(0)
    p_values = []
    for seed in range(20):
        baseline, _ = summaries(normal(seed, 1000), [])
        assert isinstance(baseline, NumberSummary)
        shares = np.diff(stats.norm.cdf(baseline.edges), prepend=0, append=1)
        for counts in random.multinomial(100, shares, 50):
            update = {"count": 100, "counts": tuple(counts.tolist())}
            p_values.append(compare(baseline, baseline.model_copy(update=update)).p_value)
    for alpha in (0.1, 0.01):
        assert np.mean(np.array(p_values) <= alpha) <= 2 * alpha  # within chance


@pytest.mark.parametrize(("missing", "is_found"), [(10, True), (1, False)])
def test_missing_values_are_part_of_the_comparison(missing: int, is_found: bool) -> None:
    baseline, _ = summaries(normal(0, 1000), [])
    live = bin_column([*normal(1, 100 - missing), *[None] * missing], baseline)
    assert compare(baseline, live).is_drift(1e-6, 0.1) == is_found


def test_a_column_that_has_lost_all_values_has_drifted() -> None:
    baseline, _ = summaries(normal(0, 1000), [])
    assert compare(baseline, bin_column([None] * 100, baseline)).is_drift(1e-9, 1.0)
    empty = NumberSummary(count=0, missing=100)
    assert compare(empty, bin_column([1.0] * 100, empty)).is_drift(1e-9, 1.0)


def test_many_rare_categories_are_pooled() -> None:
    names = [f"c{index}" for index in range(1000)]
    baseline = summarize([{"x": name} for name in names])["x"]
    result = compare(baseline, bin_column(names[:100], baseline))
    assert (result.psi, result.p_value) == (0.0, 1.0)


def test_an_empty_window_does_not_differ() -> None:
    baseline, live = summaries([1.0, 2.0], [])
    assert compare(baseline, live).p_value == 1
    assert compare(live, baseline).p_value == 1


def test_the_windows_of_a_month_spend_half_of_the_rate() -> None:
    assert 720 * window_alpha(0.05, 3600) == pytest.approx(0.025)
    assert window_alpha(0.05, 2 * MONTH_S) == 0.025
    assert 0 < window_alpha(0.05, 0) < 1e-9
