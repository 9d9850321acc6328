"""The comparison of a column's live values with those of a baseline.

A column has drifted if the difference is significant and large. It is significant if its p-value is
at most the alpha of its window, divided by the number of columns. The alpha of a window is the
share of its duration in 30 days, of one half of the stated rate of false alarms; the other half is
for comparisons with the version before. By the union bound, the probability of a false alarm of a
version in 30 days is then at most the stated rate, whatever the number and length of windows. This
holds if rows are independent draws from one distribution, from which the baseline was drawn too.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tsx_archiver.monitor.baseline import ColumnSummary, NumberSummary
from tsx_runtime.features.monitor.statistics.summaries import cells

MONTH_S = 30 * 86400
GROUPS = 10  # groups of bins, for all but the Kolmogorov-Smirnov test
MIN_EXPECTED = 5  # Rarer categories are pooled for the chi-square test.

Table = NDArray[np.float64]  # the rows of the baseline, and the live ones, in each cell


class ColumnComparison(NamedTuple):
    """The difference of two distributions, of which one may be a baseline."""

    psi: float
    """Population stability index, without the part that chance explains in small samples."""
    js: float  # Jensen-Shannon distance to the base 2, from 0 to 1
    test: Literal["ks", "chi2"]  # the test with the smaller p-value
    statistic: float
    p_value: float  # the p-value of both tests together

    def is_drift(self, alpha: float, min_psi: float) -> bool:
        """Tell whether the difference is significant and large."""
        return self.p_value <= alpha and self.psi >= min_psi


def window_alpha(alarm_rate: float, seconds: float) -> float:
    """Return the probability of a false alarm that the comparisons of one window may spend.

    Args:
        alarm_rate: The probability of a false alarm in 30 days.
        seconds: The duration of the window, without that of other windows.
    """
    return alarm_rate / 2 * min(1.0, max(seconds, 1e-3) / MONTH_S)


def compare(baseline: ColumnSummary, live: ColumnSummary) -> ColumnComparison:
    """Compare two summaries with the same bins or categories, by Bonferroni of two tests.

    The Kolmogorov-Smirnov test uses the bins of numbers, so its p-value is at least that of the
    numbers. The chi-square test is that of the likelihood ratio (G), whose small p-values are
    accurate; missing values are one of its cells.
    """
    from scipy.special import chdtrc, kolmogorov, rel_entr

    first, second = cells(baseline), cells(live)
    keys = {**first, **second}
    bins = np.array([[counts.get(key, 0) for key in keys] for counts in (first, second)], float)
    groups = bins
    is_number = isinstance(baseline, NumberSummary)
    if is_number:
        middles = (bins[0].cumsum() - bins[0] / 2) / max(1, baseline.count)
        numbers = np.minimum(middles * GROUPS, GROUPS - 1).astype(int)
        groups = np.stack([np.bincount(numbers, counts) for counts in bins])
    table = np.hstack([groups, [[baseline.missing], [live.missing]]])
    table = table[:, table.any(axis=0)]
    rows = table.sum(axis=1, keepdims=True)
    if not rows.all():
        return ColumnComparison(0.0, 0.0, "chi2", 0.0, 1.0)
    shares = table / rows
    divergence = rel_entr(shares, shares.mean(axis=0)).sum() / 2 / math.log(2)
    tested = _pool_rare(table)
    expected = tested.sum(axis=1, keepdims=True) * tested.sum(axis=0) / tested.sum()
    statistic = 2 * rel_entr(tested, expected).sum()
    test: Literal["ks", "chi2"] = "chi2"
    p_value = chdtrc(tested.shape[1] - 1, statistic) if tested.shape[1] > 1 else 1.0
    n, m = bins.sum(axis=1)
    if is_number and n and m:
        distance = np.abs(bins[0].cumsum() / n - bins[1].cumsum() / m).max()
        ks_p_value = kolmogorov(np.sqrt(n * m / (n + m)) * distance)
        if ks_p_value < p_value:
            test, statistic, p_value = "ks", distance, ks_p_value
        p_value = min(1.0, 2 * p_value)
    js = math.sqrt(max(0.0, divergence))
    return ColumnComparison(_psi(table), js, test, float(statistic), float(p_value))


def _pool_rare(table: Table) -> Table:
    """Return a table whose cells with few expected rows are one, for the chi-square test."""
    rare = table.sum(axis=0) * table.sum(axis=1).min() < MIN_EXPECTED * table.sum()
    pooled: Table = np.hstack([table[:, ~rare], table[:, rare].sum(axis=1, keepdims=True)])
    pooled = pooled[:, pooled.any(axis=0)]
    pooled += (pooled == 0).any(axis=0) / 2  # Empty cells would give too small p-values.
    return pooled


def _psi(table: Table) -> float:
    """Return the population stability index; half a row is added to each cell."""
    chance = (table.shape[1] - 1) * (1 / table.sum(axis=1)).sum()  # expected without a difference
    p, q = (table + 0.5) / (table + 0.5).sum(axis=1, keepdims=True)
    return max(0.0, float(((q - p) * np.log(q / p)).sum() - chance))
