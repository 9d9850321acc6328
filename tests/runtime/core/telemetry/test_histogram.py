"""Histograms of durations, whose quantiles are accurate to one bucket."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.telemetry.histogram import (
    FINE_BOUNDS,
    SHOWN_BOUNDS,
    Buckets,
    Durations,
    quantile,
)

seconds = st.floats(0, 2000)
duration_lists = st.lists(seconds, min_size=1, max_size=80)


@given(st.lists(st.floats(1e-4, 900), min_size=1, max_size=80), st.floats(0.01, 1))
def test_a_quantile_is_within_a_bucket_of_the_exact_one(durations_s: list[float], q: float) -> None:
    durations = Durations(FINE_BOUNDS)
    durations.add(durations_s)
    sorted_durations = sorted(durations_s)
    exact_quantile = next(
        value
        for rank, value in enumerate(sorted_durations, start=1)
        if rank >= q * len(sorted_durations) - 1e-9
    )
    result = durations.quantile(q)
    assert result is not None
    assert exact_quantile / 1.26 <= result <= exact_quantile * 1.26


@pytest.mark.parametrize(
    ("durations_s", "q", "expected"),
    [([0.004], 0.5, 0.00375), ([150.0], 0.99, 100.0), ([0.3, 0.3, 0.6], 0.5, 0.4375)],
)
def test_quantiles_are_interpolated_and_limited_to_the_last_bound(
    durations_s: list[float], q: float, expected: float
) -> None:
    durations = Durations(SHOWN_BOUNDS)
    durations.add(durations_s)
    assert quantile(durations.counts(), q, SHOWN_BOUNDS) == pytest.approx(expected)


def test_the_difference_of_snapshots_counts_the_durations_between_them() -> None:
    durations = Durations(FINE_BOUNDS)
    durations.add([5.0] * 100)
    old_counts = durations.counts()
    durations.add([0.02] * 10)
    between = [
        new_count - old_count
        for new_count, old_count in zip(durations.counts(), old_counts, strict=True)
    ]
    assert sum(between) == 10
    assert quantile(between, 0.99) == pytest.approx(0.02, rel=0.15)
    assert quantile([0] * len(between), 0.5) is None


@given(duration_lists, st.sampled_from([FINE_BOUNDS, SHOWN_BOUNDS]))
def test_prometheus_buckets_are_cumulative(
    durations_s: list[float], bounds: tuple[float, ...]
) -> None:
    durations = Durations(bounds)
    durations.add(durations_s)
    assert list(durations.cumulative_counts()) == [
        sum(duration <= bound for duration in durations_s) for bound in SHOWN_BOUNDS
    ]


@given(
    st.lists(st.floats(allow_nan=False), min_size=1), st.sampled_from([FINE_BOUNDS, SHOWN_BOUNDS])
)
def test_a_bucket_is_found_like_by_binary_search(
    durations_s: list[float], bounds: tuple[float, ...]
) -> None:
    neighbours = [
        step(bound, direction)
        for bound in bounds
        for step in (lambda bound, _: bound, np.nextafter)
        for direction in (0.0, 1e9)
    ]
    probes = np.array([*durations_s, *neighbours])
    assert Buckets(bounds).positions(probes).tolist() == np.searchsorted(bounds, probes).tolist()
