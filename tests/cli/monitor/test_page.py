"""The bins of the page's histograms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.monitor.page import even_bins


@given(st.lists(st.integers(-(10**6), 10**6), min_size=2, max_size=64, unique=True).map(sorted))
def test_bins_of_equal_width_keep_all_shares(edges: list[int]) -> None:
    count = len(edges) + 1
    histogram = {
        "edges": edges,
        "baseline": [1 / count] * count,
        "live": [0.0] * (count - 1) + [1.0],
    }
    bins = even_bins(histogram)
    assert sum(item["baseline"] for item in bins) == pytest.approx(1)
    assert sum(item["live"] for item in bins) == pytest.approx(1)
    assert bins[0]["baseline"] == bins[-1]["baseline"] == 1 / count
    assert (bins[0]["low"], bins[-1]["high"]) == (None, None)
    assert bins[-1]["live"] == 1.0
