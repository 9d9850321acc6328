"""The measured speed of workers, and the predictions that are made with it."""

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


def test_before_the_first_batch_nothing_is_known():
    assert (ServiceRate().rate, ServiceRate().answer_time, ServiceRate().has_short_batches) == (
        0.0,
        0.0,
        False,
    )


@given(batches)
def test_batches_are_short_where_the_worker_needs_less_than_the_bound_for_one(measured):
    pace = ServiceRate()
    for items, busy in measured:
        pace.add(items, busy, busy)
    longest, shortest = max(busy for _, busy in measured), min(busy for _, busy in measured)
    assert (
        pace.has_short_batches
        if longest < SHORT_S * 0.999
        else not pace.has_short_batches
        if shortest > SHORT_S * 1.001
        else True
    )


@given(batches)
def test_the_rate_lies_between_those_of_the_slowest_and_the_fastest_batch(measured):
    pace = ServiceRate()
    for items, busy in measured:
        pace.add(items, busy, busy)
    rates = [items / busy for items, busy in measured]
    assert min(rates) * 0.999 <= pace.rate <= max(rates) * 1.001
    assert pace.answer_time >= min(busy for _, busy in measured) * 0.999


@given(batches, st.integers(1, 64), st.floats(0.1, 5))
def test_old_batches_are_forgotten(before, items, busy):
    pace = ServiceRate()
    for batch in before:
        pace.add(batch[0], batch[1], batch[1])
    for _ in range(math.ceil(12 * MEMORY_S / busy)):
        pace.add(items, busy, 2 * busy)
    assert pace.rate == pytest.approx(items / busy, rel=0.05)
    assert 2 * busy * 0.9 < pace.answer_time < 3 * busy


def test_answers_that_take_now_short_now_long_are_allowed_the_long_time():
    pace = ServiceRate()
    for number in range(1000):
        pace.add(1, 0.01, 0.03 if number % 10 == 0 else 0.01)
    assert pace.answer_time > 0.022


@given(st.integers(0, 10**6), st.floats(0, 10**6))
def test_retry_after_is_whole_seconds_in_which_the_queue_empties(waiting, rate):
    after = retry_after(waiting, rate)
    assert isinstance(after, int)
    assert 1 <= after <= MAX_RETRY_S
    if rate and after < MAX_RETRY_S:
        assert after * rate >= waiting * 0.999
        assert after == 1 or (after - 1) * rate < waiting * 1.001


@given(st.integers(0, 10**6), st.floats(0, 10**6), st.floats(0, 1000))
def test_the_time_before_the_first_request_begins_counts_as_well(waiting, rate, before):
    assert (
        before
        <= retry_after(waiting, rate, before)
        <= retry_after(waiting, rate) + math.ceil(before)
    )


@given(st.integers(0, 10**4), st.integers(0, 10**4), st.floats(0.01, 10**4), st.floats(0.01, 10**4))
def test_a_longer_queue_is_never_promised_sooner_nor_a_faster_worker_later(
    first, second, slow, fast
):
    assert retry_after(min(first, second), fast) <= retry_after(max(first, second), fast)
    assert retry_after(first, max(slow, fast)) <= retry_after(first, min(slow, fast))


@given(st.floats(0, 1000), st.floats(0.001, 1000), st.floats(0, 1000))
def test_a_request_waits_for_half_of_its_time_or_leaves_time_for_an_answer(
    arrived, given_time, answer_time
):
    deadline = arrived + given_time
    start = latest_start(arrived, deadline, answer_time)
    assert (arrived + deadline) / 2 <= start <= deadline
    assert start == deadline - answer_time or answer_time >= given_time / 2 - 1e-9
