"""Summaries of columns: quantile bins of numbers, and counts of categories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tsx_archiver.monitor.baseline import OTHERS, CategorySummary, ColumnSummary, NumberSummary
from tsx_runtime.features.monitor.statistics.facts import category_of

Value = float | str | None
MAX_BINS = 64
MAX_CATEGORIES = 100
MIN_CATEGORY = 5  # rows; a rarer category may tell of a person, and goes to the others


def summarize(rows: Sequence[Mapping[str, Value]]) -> dict[str, ColumnSummary]:
    """Summarize rows by column; an absent value is a missing one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _summarize([row.get(name) for row in rows]) for name in names}


def _summarize(values: Sequence[Value]) -> ColumnSummary:
    if any(isinstance(value, str) for value in values):
        counter = Counter(name for name in map(category_of, values) if name is not None)
        common = [item for item in counter.most_common(MAX_CATEGORIES) if item[1] >= MIN_CATEGORY]
        return bin_column(values, CategorySummary(count=0, counts=dict(common)))
    numbers = [value for value in values if isinstance(value, float | int)]
    edges: tuple[float, ...] = ()
    if numbers:
        # The outermost bins, which are empty, hold later values outside the range.
        quantiles = np.quantile(numbers, np.linspace(0, 1, MAX_BINS - 1), method="inverted_cdf")
        quantiles[0] = np.nextafter(quantiles[0], -np.inf)
        edges = tuple(np.unique(quantiles).tolist())
    mean = float(np.mean(numbers or [0.0]))
    like = NumberSummary(count=0, edges=edges, counts=(0,) * (len(edges) + 1), mean=mean)
    return bin_column(values, like)


def bin_column(values: Sequence[Value], like: ColumnSummary) -> ColumnSummary:
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


def add_counts(first: ColumnSummary, second: ColumnSummary) -> ColumnSummary:
    """Return the summary of all values of two summaries with the same bins."""
    counts: Any
    if isinstance(first, NumberSummary):
        counts = tuple(map(sum, zip(first.counts, second.counts, strict=True)))
    else:
        counts = {**Counter(first.counts) + Counter(second.counts)}
    update = {"count": first.count + second.count, "missing": first.missing + second.missing}
    return first.model_copy(update={**update, "counts": counts})


def bin_shares(summary: ColumnSummary, bins: ColumnSummary) -> list[float]:
    """Return the share of a summary's rows in each bin or category of another one.

    Numbers in other bins are taken as evenly distributed in each.
    """
    rows = max(1, summary.count + summary.missing)
    if isinstance(summary, NumberSummary) and isinstance(bins, NumberSummary):
        below = np.cumsum(summary.counts) / rows
        if summary.edges != bins.edges:
            below = np.append(np.interp(bins.edges, summary.edges, below[:-1], left=0), below[-1])
        return [round(share, 5) for share in np.diff(below, prepend=0).tolist()]
    if isinstance(summary, CategorySummary) and isinstance(bins, CategorySummary):
        return [round(summary.counts.get(name, 0) / rows, 5) for name in bins.counts]
    return []
