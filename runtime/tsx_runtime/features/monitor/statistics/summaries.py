"""Summaries of columns: quantile bins of numbers, and counts of categories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tsx_archiver.monitor.baseline import OTHERS, CategorySummary, ColumnSummary, NumberSummary
from tsx_runtime.features.monitor.statistics.facts import category_of

Row = Mapping[str, float | str | None]
MAX_BINS = 64
MAX_CATEGORIES = 100
MIN_CATEGORY = 5  # rows; a rarer category may tell of a person, and goes to the others


def summarize(rows: Sequence[Row]) -> dict[str, ColumnSummary]:
    """Summarize rows by column; an absent value is a missing one."""
    summaries: dict[str, ColumnSummary] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        if any(isinstance(value, str) for value in values):
            common = Counter(map(category_of, values)).most_common(MAX_CATEGORIES)
            counts = {str(name): 0 for name, count in common if count >= MIN_CATEGORY}
            summaries[name] = CategorySummary(count=0, counts=counts)
        else:
            summaries[name] = _empty_bins([value for value in values if isinstance(value, float)])
    return bin_rows(rows, summaries)


def bin_rows(rows: Sequence[Row], like: Mapping[str, ColumnSummary]) -> dict[str, ColumnSummary]:
    """Summarize rows in the bins and categories of other summaries of the columns."""
    return {name: bin_column([row.get(name) for row in rows], like[name]) for name in like}


def bin_column(values: Sequence[float | str | None], like: ColumnSummary) -> ColumnSummary:
    """Summarize values in the bins or categories of another summary of the column.

    A text counts as missing where a number is expected.
    """
    counts: Any
    if isinstance(like, NumberSummary):
        numbers = [value for value in values if isinstance(value, float | int)]
        bins = np.searchsorted(like.edges, numbers)
        count, counts = len(numbers), tuple(np.bincount(bins, minlength=len(like.counts)).tolist())
    else:
        counts = dict.fromkeys(like.counts, 0)
        names = [name for name in map(category_of, values) if name is not None]
        for name, number in Counter(names).items():
            name = name if name in like.counts else OTHERS
            counts[name] = counts.get(name, 0) + number
        count = len(names)
    update = {"count": count, "missing": len(values) - count, "counts": counts}
    return like.model_copy(update=update)


def bin_shares(summary: ColumnSummary, bins: ColumnSummary) -> list[float] | None:
    """Return the share of rows in each bin or category of `bins`; None if the bins differ."""
    counts: Any = summary.counts
    if isinstance(bins, NumberSummary):
        if getattr(summary, "edges", None) != bins.edges:
            return None
    else:
        counts = [counts.get(name, 0) for name in bins.counts]
    rows = max(1, summary.count + summary.missing)
    return [round(count / rows, 5) for count in counts]


def missing_share(summary: ColumnSummary) -> float:
    return summary.missing / max(1, summary.count + summary.missing)


def _empty_bins(numbers: list[float]) -> NumberSummary:
    """Return bins by the quantiles of numbers.

    The outermost bins, which are empty, hold later values outside the range.
    """
    if not numbers:
        return NumberSummary(count=0)
    quantiles = np.quantile(numbers, np.linspace(0, 1, MAX_BINS - 1), method="inverted_cdf")
    quantiles[0] = np.nextafter(quantiles[0], -np.inf)
    edges = tuple(np.unique(quantiles).tolist())
    counts = (0,) * (len(edges) + 1)
    return NumberSummary(count=0, edges=edges, counts=counts, mean=float(np.mean(numbers)))
