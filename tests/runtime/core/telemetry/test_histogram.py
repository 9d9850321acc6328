"""Histograms of durations, whose quantiles are right to a tenth."""

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
some = st.lists(seconds, min_size=1, max_size=80)


@given(st.lists(st.floats(1e-4, 900), min_size=1, max_size=80), st.floats(0.01, 1))
def test_a_quantile_is_within_a_bucket_of_the_exact_one(lasted: list[float], q: float) -> None:
    durations = Durations(FINE_BOUNDS)
    durations.add(lasted)
    ranked = sorted(lasted)
    exact = next(
        value for rank, value in enumerate(ranked, start=1) if rank >= q * len(ranked) - 1e-9
    )
    result = durations.quantile(q)
    assert result is not None
    assert exact / 1.26 <= result <= exact * 1.26


@pytest.mark.parametrize(
    ("lasted", "q", "expected"),
    [([0.004], 0.5, 0.00375), ([150.0], 0.99, 100.0), ([0.3, 0.3, 0.6], 0.5, 0.4375)],
)
def test_a_quantile_lies_evenly_in_its_bucket_and_is_no_longer_than_the_last_bound(
    lasted: list[float], q: float, expected: float
) -> None:
    durations = Durations(SHOWN_BOUNDS)
    durations.add(lasted)
    assert quantile(durations.counts(), q, SHOWN_BOUNDS) == pytest.approx(expected)


def test_the_difference_of_two_snapshots_is_what_happened_between_them() -> None:
    durations = Durations(FINE_BOUNDS)
    durations.add([5.0] * 100)
    before = durations.counts()
    durations.add([0.02] * 10)
    between = [now - then for now, then in zip(durations.counts(), before, strict=True)]
    assert sum(between) == 10
    assert quantile(between, 0.99) == pytest.approx(0.02, rel=0.15)
    assert quantile([0] * len(between), 0.5) is None


@given(some, st.sampled_from([FINE_BOUNDS, SHOWN_BOUNDS]))
def test_prometheus_is_shown_how_many_were_not_longer(
    lasted: list[float], bounds: tuple[float, ...]
) -> None:
    durations = Durations(bounds)
    durations.add(lasted)
    assert list(durations.cumulative_counts()) == [
        sum(duration <= bound for duration in lasted) for bound in SHOWN_BOUNDS
    ]


@given(
    st.lists(st.floats(allow_nan=False), min_size=1), st.sampled_from([FINE_BOUNDS, SHOWN_BOUNDS])
)
def test_a_bucket_is_found_as_a_search_finds_it(
    lasted: list[float], bounds: tuple[float, ...]
) -> None:
    around = [
        step(bound, towards)
        for bound in bounds
        for step in (lambda bound, _: bound, np.nextafter)
        for towards in (0.0, 1e9)
    ]
    both = np.array([*lasted, *around])
    assert Buckets(bounds).positions(both).tolist() == np.searchsorted(bounds, both).tolist()
