"""The bins of the page's histograms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.monitor.page import even_bins
from tsx_runtime.features.monitor.report import ColumnHistogram


@given(st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=64, unique=True).map(sorted))
def test_bins_of_equal_width_keep_all_shares(edges: list[float]) -> None:
    count = len(edges) + 1
    live = [0.0] * (count - 1) + [1.0]
    histogram = even_bins(ColumnHistogram(edges=edges, baseline=[1 / count] * count, live=live))
    assert sum(histogram.baseline) == pytest.approx(1)
    assert sum(histogram.live) == pytest.approx(1)
    assert histogram.baseline[0] == histogram.baseline[-1] == 1 / count
    assert histogram.live[-1] == 1.0
    assert histogram.edges is not None
    assert (histogram.edges[0], histogram.edges[-1]) == (edges[0], edges[-1])
    assert len(histogram.edges) + 1 == len(histogram.baseline) == len(histogram.live)
