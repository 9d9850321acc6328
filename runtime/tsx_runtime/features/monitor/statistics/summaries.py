"""Summaries of columns: quantile bins of numbers, and counts of categories."""

from __future__ import annotations

import math
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
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return {name: bin_column(values, _bins_of(values)) for name, values in columns.items()}


def bin_column(values: Sequence[float | str | None], like: ColumnSummary) -> ColumnSummary:
    """Summarize values in the bins or categories of another summary of the column.

    A text counts as missing where a number is expected.
    """
    present: list[Any]
    counts: Any
    if isinstance(like, NumberSummary):
        present = [value for value in values if isinstance(value, float | int)]
        bins = np.searchsorted(like.edges, present)
        counts = tuple(np.bincount(bins, minlength=len(like.counts)).tolist())
    else:
        names = [name for name in map(category_of, values) if name is not None]
        present = [name if name in like.counts else OTHERS for name in names]
        counts = {**dict.fromkeys(like.counts, 0), **Counter(present)}
    update = {"count": len(present), "missing": len(values) - len(present), "counts": counts}
    return like.model_copy(update=update)


def cells(summary: ColumnSummary) -> dict[Any, int]:
    """Return the counts by category, or by the lower edge of a bin."""
    if isinstance(summary, NumberSummary):
        return dict(zip((-math.inf, *summary.edges), summary.counts, strict=True))
    return summary.counts


def _bins_of(values: Sequence[float | str | None]) -> ColumnSummary:
    """Return the frequent categories, or bins by the quantiles of numbers.

    The outermost bins, which are empty, hold later values outside the range.
    """
    present: Any = [value for value in values if value is not None]
    if any(isinstance(value, str) for value in present):
        common = Counter(map(category_of, present)).most_common(MAX_CATEGORIES)
        counts = {str(name): 0 for name, count in common if count >= MIN_CATEGORY}
        return CategorySummary(count=0, counts=counts)
    if not present:
        return NumberSummary(count=0)
    quantiles = np.quantile(present, np.linspace(0, 1, MAX_BINS - 1), method="inverted_cdf")
    quantiles[0] = np.nextafter(quantiles[0], -np.inf)
    edges = tuple(np.unique(quantiles).tolist())
    mean = float(np.mean(present))
    return NumberSummary(count=0, edges=edges, counts=(0,) * (len(edges) + 1), mean=mean)
