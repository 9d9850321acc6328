"""The measured service rate of workers, and the predictions made from it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.scheduling.service_rate import (
    MAX_RETRY_S,
    MEMORY_S,
    SHORT_S,
    ServiceRate,
    latest_start,
    retry_after,
)

seconds = st.floats(0.0001, 100)
batches = st.lists(st.tuples(st.integers(1, 64), seconds), min_size=1, max_size=30)


def test_the_service_rate_is_unknown_before_the_first_batch():
    assert (ServiceRate().rate, ServiceRate().answer_time, ServiceRate().has_short_batches) == (
        0.0,
        0.0,
        False,
    )


@given(batches)
def test_batches_below_the_time_limit_count_as_short(measurements):
    pace = ServiceRate()
    for items, busy_s in measurements:
        pace.add(items, busy_s, busy_s)
    longest_s, shortest_s = (
        max(busy_s for _, busy_s in measurements),
        min(busy_s for _, busy_s in measurements),
    )
    assert (
        pace.has_short_batches
        if longest_s < SHORT_S * 0.999
        else not pace.has_short_batches
        if shortest_s > SHORT_S * 1.001
        else True
    )


@given(batches)
def test_the_rate_is_between_the_slowest_and_fastest_batch(measurements):
    pace = ServiceRate()
    for items, busy_s in measurements:
        pace.add(items, busy_s, busy_s)
    rates = [items / busy_s for items, busy_s in measurements]
    assert min(rates) * 0.999 <= pace.rate <= max(rates) * 1.001
    assert pace.answer_time >= min(busy_s for _, busy_s in measurements) * 0.999


@given(batches, st.integers(1, 64), st.floats(0.1, 5))
def test_old_batches_are_forgotten(old_batches, items, busy_s):
    pace = ServiceRate()
    for batch in old_batches:
        pace.add(batch[0], batch[1], batch[1])
    for _ in range(math.ceil(12 * MEMORY_S / busy_s)):
        pace.add(items, busy_s, 2 * busy_s)
    assert pace.rate == pytest.approx(items / busy_s, rel=0.05)
    assert 2 * busy_s * 0.9 < pace.answer_time < 3 * busy_s


def test_varying_answer_times_are_predicted_by_the_long_ones():
    pace = ServiceRate()
    for number in range(1000):
        pace.add(1, 0.01, 0.03 if number % 10 == 0 else 0.01)
    assert pace.answer_time > 0.022


@given(st.integers(0, 10**6), st.floats(0, 10**6))
def test_retry_after_is_the_whole_seconds_until_the_queue_is_empty(waiting, rate):
    retry_after_s = retry_after(waiting, rate)
    assert isinstance(retry_after_s, int)
    assert 1 <= retry_after_s <= MAX_RETRY_S
    if rate and retry_after_s < MAX_RETRY_S:
        assert retry_after_s * rate >= waiting * 0.999
        assert retry_after_s == 1 or (retry_after_s - 1) * rate < waiting * 1.001


@given(st.integers(0, 10**6), st.floats(0, 10**6), st.floats(0, 1000))
def test_retry_after_includes_the_start_of_the_first_worker(waiting, rate, seconds_until_start):
    assert (
        seconds_until_start
        <= retry_after(waiting, rate, seconds_until_start)
        <= retry_after(waiting, rate) + math.ceil(seconds_until_start)
    )


@given(st.integers(0, 10**4), st.integers(0, 10**4), st.floats(0.01, 10**4), st.floats(0.01, 10**4))
def test_retry_after_grows_with_the_queue_and_shrinks_with_the_rate(
    first, second, slow_rate, fast_rate
):
    assert retry_after(min(first, second), fast_rate) <= retry_after(max(first, second), fast_rate)
    assert retry_after(first, max(slow_rate, fast_rate)) <= retry_after(
        first, min(slow_rate, fast_rate)
    )


@given(st.floats(0, 1000), st.floats(0.001, 1000), st.floats(0, 1000))
def test_a_request_starts_by_half_its_time_or_its_predicted_duration(
    arrived, time_limit, answer_time
):
    deadline = arrived + time_limit
    start = latest_start(arrived, deadline, answer_time)
    assert (arrived + deadline) / 2 <= start <= deadline
    assert start == deadline - answer_time or answer_time >= time_limit / 2 - 1e-9
