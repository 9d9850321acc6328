"""The newest and the slowest requests, which can be found by their ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.jobs import FakeJob
from tests.support.batches import batch_of, count
from tsx_runtime.core.telemetry.batch_times import times_of
from tsx_runtime.core.telemetry.recent_requests import (
    MAX_NEWEST,
    MAX_SLOWEST,
    PERIOD_S,
    RecentRequests,
    RequestRecord,
)
from tsx_runtime.core.telemetry.version_stats import Stats


def add_batch(
    recent: RecentRequests,
    number: int,
    durations: list[float],
    now: float,
    statuses: list[int] | None = None,
) -> None:
    """Add a batch in the same way as `Stats`."""
    jobs = [
        FakeJob(b"%d-%d" % (number, position), arrived=now - duration)
        for position, duration in enumerate(durations)
    ]
    if now >= recent.due or max(durations) > recent.threshold:
        recent.add(
            batch_of((now, now, now), jobs, statuses=statuses),
            b"\n".join([job.request_id for job in jobs]),
        )


@given(st.lists(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), min_size=1, max_size=20))
def test_the_slowest_requests_are_found(batches: list[list[int]]) -> None:
    recent = RecentRequests()
    for number, durations in enumerate(batches):
        add_batch(recent, number, [float(duration) for duration in durations], 2.0**21)
    longest_durations = sorted(
        (duration for durations in batches for duration in durations), reverse=True
    )[:MAX_SLOWEST]
    assert [round(record.took) for record in recent.slowest()] == longest_durations


def test_the_newest_requests_are_kept_with_their_status() -> None:
    recent = RecentRequests()
    for number in range(MAX_NEWEST):
        add_batch(recent, number, [0.001, 0.002], 1000.0 + number, [200, 400 + number % 3])
    newest_records = list(recent.newest())
    assert len(newest_records) == MAX_NEWEST
    record = recent.find(b"%d-1" % (MAX_NEWEST - 1))
    assert record is not None
    assert (record.status, round(record.took, 6)) == (400 + (MAX_NEWEST - 1) % 3, 0.002)
    assert recent.find(b"0-0") is None


def test_a_batch_larger_than_the_ring_is_kept_until_the_next_one() -> None:
    recent = RecentRequests()
    add_batch(recent, 1, [0.1] * (MAX_NEWEST + 10), 10.0)
    assert recent.find(b"1-2005") is not None
    add_batch(recent, 2, [0.1], 20.0)
    assert [record.request_id for record in recent.newest()] == [b"2-0"]


@pytest.mark.slow
def test_at_high_rates_a_sample_and_the_slowest_requests_are_kept() -> None:
    recent = RecentRequests()
    for number in range(12000):
        add_batch(
            recent, number, [0.001] * 50 + [5.0 if number == 777 else 0.002], 1000.0 + number * 1e-3
        )
    numbers = {record.request_id.split(b"-")[0] for record in recent.newest()}
    assert len(numbers) == MAX_NEWEST // 51
    first = min(map(int, numbers))
    # Without sampling, the requests of the last 40 ms would fill the ring.
    assert (11999 - first) * 1e-3 > 7.5
    assert recent.slowest()[0].took == 5.0
    assert recent.find(b"777-50") is not None


def test_a_request_that_asked_for_timing_is_always_kept() -> None:
    stats = Stats()
    count(stats, (10.0, 10.0, 10.5), [FakeJob(b"asked", arrived=10.0)], statuses=[418])
    assert stats.newest is not None
    stats.remember(b"asked", 10.0, 418, times_of(stats.newest))
    for number in range(MAX_NEWEST + 1):
        add_batch(stats.recent, number, [1.0], 1000.0 + number)
    record = stats.recent.find(b"asked")
    assert record is not None
    assert (record.status, record.took) == (418, 0.5)


@pytest.mark.parametrize(
    "urgent_job",
    [
        FakeJob(b"urgent", arrived=99.9, priority=1),
        FakeJob(b"urgent", arrived=99.9, deadline=101.0),
    ],
)
def test_a_request_delayed_by_urgent_ones_is_among_the_slowest(urgent_job: FakeJob) -> None:
    stats = Stats()
    count(stats, (99.0, 99.0, 99.5), [FakeJob(arrived=98.0)] * MAX_NEWEST)
    assert stats.recent.due > 100.0
    count(stats, (100.0, 100.0, 100.0), [urgent_job, FakeJob(b"patient", arrived=50.0)])
    slowest = stats.recent.slowest()[0]
    assert (slowest.request_id, slowest.took) == (b"patient", 50.0)


def test_slow_first_requests_are_forgotten_after_two_periods() -> None:
    recent = RecentRequests()
    add_batch(recent, 0, [60.0] * MAX_SLOWEST, 1000.0)
    add_batch(recent, 1, [1.0], 1000.0 + PERIOD_S)
    assert recent.slowest()[0].took == 60.0
    add_batch(recent, 2, [2.0], 1000.0 + 2 * PERIOD_S)
    assert [record.took for record in recent.slowest()] == [2.0, 1.0]
    assert recent.find(b"1-0") is not None


def test_refusals_are_recorded() -> None:
    recent = RecentRequests()
    recent.add_refusal(RequestRecord(b"late", 100.0, 503, 30.0, None, "DeadlinePassed"))
    record = recent.find(b"late")
    assert record is not None
    assert record.error == "DeadlinePassed"
    assert recent.slowest() == [record]
