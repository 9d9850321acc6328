"""The comparison of a column's live values with those of a baseline.

A column has drifted if the difference is significant and large. It is significant if its p-value is
at most the alpha of its window, divided by the number of columns. The alpha of a window is the
share of its duration in 30 days, of one half of the stated rate of false alarms; the other half is
for comparisons with the version before. By the union bound, the probability of a false alarm of a
version in 30 days is then at most the stated rate, whatever the number and length of windows. This
holds if rows are independent draws from one distribution, from which the baseline was drawn too.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tsx_archiver.monitor.baseline import CategorySummary, ColumnSummary, NumberSummary

MONTH_S = 30 * 86400
MIN_DURATION_S = 1e-3  # A shorter window gets the alpha of this duration.
GROUPS = 10  # of the bins of a number, for all but the Kolmogorov-Smirnov test
MIN_EXPECTED = 5  # Rarer categories are pooled for the chi-square test.

Counts = NDArray[np.float64]


class ColumnComparison(NamedTuple):
    """The difference of two distributions, of which one may be a baseline."""

    psi: float
    """Population stability index, without the part that chance explains in small samples."""
    js: float  # Jensen-Shannon distance to the base 2, from 0 to 1
    test: Literal["ks", "chi2"]  # the test with the smaller p-value
    statistic: float
    p_value: float  # of both tests together


def window_alpha(alarm_rate: float, seconds: float) -> float:
    """Return the probability of a false alarm that the comparisons of one window may spend.

    Args:
        alarm_rate: The probability of a false alarm in 30 days.
        seconds: The duration of the window, without that of other windows.
    """
    return alarm_rate / 2 * min(1.0, max(seconds, MIN_DURATION_S) / MONTH_S)


def compare(baseline: ColumnSummary, live: ColumnSummary) -> ColumnComparison:
    """Compare two summaries with the same bins or categories, by Bonferroni of two tests.

    The Kolmogorov-Smirnov test uses the bins of numbers, so its p-value is at least that of the
    numbers. The chi-square test is that of the likelihood ratio (G), whose small p-values are
    accurate; missing values are one of its cells.
    """
    first, second = _cells(baseline, live)
    if not first.sum() or not second.sum():
        return ColumnComparison(0.0, 0.0, "chi2", 0.0, 1.0)
    statistic, p_value = _chi_square(first, second)
    test: Literal["ks", "chi2"] = "chi2"
    if isinstance(baseline, NumberSummary) and isinstance(live, NumberSummary):
        distance, ks_p_value = _kolmogorov_smirnov(
            np.array(baseline.counts, float), np.array(live.counts, float)
        )
        if ks_p_value < p_value:
            test, statistic, p_value = "ks", distance, ks_p_value
        p_value = min(1.0, 2 * p_value)
    return ColumnComparison(_psi(first, second), _js(first, second), test, statistic, p_value)


def _cells(baseline: ColumnSummary, live: ColumnSummary) -> tuple[Counts, Counts]:
    """Return the rows of both in each cell: groups of bins, or categories, and the missing."""
    first: Counts
    second: Counts
    if isinstance(baseline, NumberSummary) and isinstance(live, NumberSummary):
        counts = np.array(baseline.counts, float)
        middles = np.cumsum(counts) - counts / 2
        groups = np.minimum(middles / max(1, baseline.count) * GROUPS, GROUPS - 1).astype(int)
        first = np.bincount(groups, counts, GROUPS).astype(float)
        second = np.bincount(groups, np.array(live.counts, float), GROUPS).astype(float)
    elif isinstance(baseline, CategorySummary) and isinstance(live, CategorySummary):
        names = [*{**baseline.counts, **live.counts}]
        first = np.array([baseline.counts.get(name, 0) for name in names], float)
        second = np.array([live.counts.get(name, 0) for name in names], float)
    else:
        raise TypeError("a number cannot be compared with a category")
    first, second = np.append(first, baseline.missing), np.append(second, live.missing)
    used = first + second > 0
    return first[used], second[used]


def _kolmogorov_smirnov(first: Counts, second: Counts) -> tuple[float, float]:
    from scipy.special import kolmogorov

    n, m = first.sum(), second.sum()
    if not n or not m:
        return 0.0, 1.0
    distance = np.abs(np.cumsum(first) / n - np.cumsum(second) / m).max()
    return float(distance), float(kolmogorov(np.sqrt(n * m / (n + m)) * distance))


def _chi_square(first: Counts, second: Counts) -> tuple[float, float]:
    from scipy.special import chdtrc, rel_entr

    table = np.stack([first, second])
    expected = table.sum(0) * min(first.sum(), second.sum()) / table.sum()
    rare = expected < MIN_EXPECTED
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(1, keepdims=True)], axis=1)
    table = table[:, table.sum(0) > 0]
    if table.shape[1] < 2:
        return 0.0, 1.0
    # An empty cell would make small p-values ten times too small.
    table += np.where((table == 0).any(0), 0.5, 0.0)
    expected_table = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    statistic = 2 * float(rel_entr(table, expected_table).sum())
    return statistic, float(chdtrc(table.shape[1] - 1, statistic))


def _psi(first: Counts, second: Counts) -> float:
    """Return the population stability index; half a row is added to each cell."""
    cells, n, m = len(first), first.sum(), second.sum()
    p, q = ((counts + 0.5) / (counts.sum() + cells / 2) for counts in (first, second))
    chance = (cells - 1) * (1 / n + 1 / m)  # the expected index of equal distributions
    return max(0.0, float(((q - p) * np.log(q / p)).sum() - chance))


def _js(first: Counts, second: Counts) -> float:
    from scipy.special import rel_entr

    p, q = first / first.sum(), second / second.sum()
    middle = (p + q) / 2
    divergence: Any = (rel_entr(p, middle).sum() + rel_entr(q, middle).sum()) / 2 / np.log(2)
    return float(np.sqrt(np.clip(divergence, 0, 1)))
