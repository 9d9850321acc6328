"""Decisions for a latency target, as properties over curves, queues and times."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_archiver.metadata.slo import latency_target
from tsx_runtime.core.models.latency_curve import SIZES, LatencyCurve
from tsx_runtime.features.slo.attainment import Attainment
from tsx_runtime.features.slo.control import SloControl, WorkerBatches
from tsx_runtime.features.slo.decision import (
    admission,
    aim,
    batch_size,
    expected_end,
    factor,
    fill,
    throughput,
)

TARGET = 0.05
SECONDS = st.floats(1e-4, 0.2)


@st.composite
def curves(draw: st.DrawFn) -> LatencyCurve:
    curve = LatencyCurve(0.99)
    now = 0.0
    for size, seconds, pause in draw(
        st.lists(
            st.tuples(st.integers(1, 200), SECONDS, st.sampled_from([0.01, 20.0])), max_size=40
        )
    ):
        now += pause
        curve.add(size, seconds, now)
    return curve


ARRIVALS = st.lists(st.floats(0, 1), min_size=1, max_size=30).map(sorted)


@given(curves(), ARRIVALS, st.floats(1, 2), st.integers(1, 200))
def test_no_batch_misses_the_target_if_a_smaller_one_meets_it(curve, arrivals, start, batch_aim):
    size = batch_size(curve, TARGET, arrivals, start, batch_aim)
    assert size >= 1
    time_left = arrivals[0] + TARGET - start
    if curve.known and curve.typical(1) * curve.mean <= time_left:
        assert curve.typical(size) * curve.mean <= time_left * 1.000001
        assert (
            size <= batch_aim or curve.typical(size) * factor(curve, TARGET) <= time_left * 1.000001
        )
        assert (
            size == curve.max_size
            or curve.typical(size + 1) * factor(curve, TARGET) > time_left * 0.999999
        )


@given(curves(), st.floats(0, TARGET), st.floats(0, TARGET), st.integers(1, 200))
def test_more_time_never_shrinks_the_batch(curve, first, second, batch_aim):
    smaller, larger = sorted([first, second])
    if curve.known and TARGET - larger >= curve.typical(1) * factor(curve, TARGET):
        assert batch_size(curve, TARGET, [0.0], smaller, batch_aim) >= batch_size(
            curve, TARGET, [0.0], larger, batch_aim
        )


@given(
    curves(),
    st.floats(0, 1e6),
    st.integers(1, 8),
    st.integers(0, 100),
    st.lists(st.floats(0, 1), max_size=8),
)
def test_a_refused_request_is_admitted_later_or_with_idle_workers(
    curve, rate, workers, waiting, end_times
):
    batch_aim = aim(curve, TARGET, rate, workers)
    assert 1 <= batch_aim.size <= curve.max_size
    arrivals = [0.0] * waiting
    admitted = admission(curve, TARGET, batch_aim, arrivals, end_times, 0.0)
    if admitted.waiting <= waiting and waiting == 0:
        assert admitted.opens_at > 0
        assert (
            admission(
                curve,
                TARGET,
                batch_aim,
                arrivals,
                [max(end, admitted.opens_at) for end in end_times],
                admitted.opens_at + 1e-9,
            ).waiting
            > waiting
        )
        assert (
            admission(curve, TARGET, batch_aim, arrivals, [0.0 for _ in end_times], 0.0).waiting
            > waiting
        )


@given(curves(), st.floats(0, 1e6), st.integers(0, 8), st.integers(0, 8))
def test_a_single_request_is_always_admitted(curve, rate, idle_count, busy_count):
    batch_aim = aim(curve, TARGET, rate, max(1, idle_count + busy_count))
    if idle_count or not busy_count:
        assert (
            admission(
                curve, TARGET, batch_aim, [], [0.0] * idle_count + [100.0] * busy_count, 0.0
            ).waiting
            >= 1
        )
    assert batch_size(curve, TARGET, [0.0], 100.0, batch_aim.size) >= 1


@given(curves(), st.lists(st.integers(1, 64), max_size=3), st.floats(0, 10))
def test_the_expected_end_of_a_batch_is_never_in_the_past(curve, sizes, now):
    assert expected_end(0.0, sizes, curve, now) >= now


@given(curves(), st.integers(1, 2000), st.integers(1, 2000))
def test_a_larger_batch_never_takes_less_time(curve, first, second):
    if curve.known:
        smaller, larger = sorted([first, second])
        assert curve.typical(smaller) <= curve.typical(larger) * 1.000001


@pytest.mark.parametrize(
    "measurements",
    [
        {1: 1.0, 100: 50.0},
        {1: 1.0, 11: 11.0, 100: 100.0},
        {1: 1.0, 2048: 1000.0},
        {8: 8.0, 9: 9.0, 10: 10.0},
    ],
)
def test_measured_sizes_are_predicted_exactly(measurements: dict[int, float]) -> None:
    curve = LatencyCurve(0.5, measurements.items())
    assert {size: curve.typical(size) for size in measurements} == pytest.approx(measurements)


def a_control(*points: tuple[int, float]) -> SloControl:
    """Make a control with a 50 ms target from (batch size, seconds) points."""
    return SloControl(latency_target("p99<50ms"), LatencyCurve(0.99, points))


def add_batches(curve: LatencyCurve, seconds, sizes, now=0.0) -> float:
    for size in sizes:
        now += seconds(size)
        curve.add(size, seconds(size), now)
    return now


def test_the_curve_interpolates_between_served_sizes():
    curve = LatencyCurve(0.99)
    add_batches(curve, lambda size: 0.01 + 0.001 * size, [1, 2, 4, 8, 16, 32] * 3)
    assert curve.typical(12) == pytest.approx(0.022, rel=0.02)
    assert curve.typical(20) == pytest.approx(0.030, rel=0.02)


def test_batches_grow_stepwise_up_to_the_target():
    control = a_control()
    now, tried_sizes = 0.0, []
    for _ in range(400):
        size = control.batch_size([now] * 500, now, 1024)
        tried_sizes.append(size)
        now += 0.01 + 0.0005 * size
        control.learn(size, 0.01 + 0.0005 * size, now, 1, 0)
    assert tried_sizes[0] == 1
    assert all(
        current <= max(previous + 1, 1.34 * previous) for previous, current in pairwise(tried_sizes)
    )
    assert 60 <= tried_sizes[-1] <= 84


def test_one_outlier_is_ignored_but_a_second_mode_is_learned():
    curve = LatencyCurve(0.99)
    now = add_batches(curve, lambda _: 0.01, [4] * 300)
    curve.add(4, 1.0, now)
    assert curve.typical(4) * curve.tail == pytest.approx(0.01)
    for number in range(300):
        curve.add(4, 0.03 if number % 10 == 0 else 0.01, now + number)
    assert curve.typical(4) == pytest.approx(0.01)
    assert curve.typical(4) * curve.tail == pytest.approx(0.03)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_drift_also_updates_sizes_that_are_not_served(factor):
    curve = LatencyCurve(0.99)
    now = add_batches(curve, lambda size: 0.01 + 0.001 * size, [1, 2, 4, 8, 16] * 10)
    add_batches(curve, lambda size: factor * (0.01 + 0.001 * size), [4] * 400, now + 60)
    assert curve.typical(4) == pytest.approx(factor * 0.014, rel=0.01)
    assert curve.typical(4) <= curve.typical(16) <= 4 * curve.typical(4) * 1.001
    assert curve.tail < 1.05


def test_the_curve_starts_from_a_benchmark():
    curve = LatencyCurve(0.99, [(1, 0.01), (8, 0.012), (32, 0.02)])
    assert curve.known
    assert curve.max_size == 40
    assert batch_size(curve, TARGET, [0.0] * 100, 0.0, 1) >= 32
    curve.add(8, 0.1, 1.0)
    assert curve.typical(8) == pytest.approx(0.1)


@pytest.mark.parametrize("points", [[], [(1, 0.0)]])
def test_durations_below_the_clock_resolution_count_as_short(points):
    curve = LatencyCurve(0.99, points)
    for number, seconds in enumerate([0.0, 0.0, -0.0005, 0.0]):
        curve.add(1, seconds, float(number))
    assert curve.typical(1) > 0
    rate, size = throughput(curve, TARGET, 100.0, 1)
    assert rate > 100
    assert size >= 1


def test_refusals_know_when_admission_reopens():
    control = a_control((1, 0.04), (8, 0.045))
    busy_workers = [WorkerBatches(10.0, [8])]
    assert not control.admits([], busy_workers, 10.0)
    assert 10.0 < control.opens_at < 10.1
    assert not control.admits([], busy_workers, (10.0 + control.opens_at) / 2, pytest.fail)
    assert control.admits([], busy_workers, control.opens_at + 0.001)


def test_an_unreachable_target_admits_only_requests_that_need_not_wait():
    control = a_control((1, 0.2))
    assert control.admits([], [WorkerBatches(0.0, [])], 10.0)
    control.invalidate()
    assert not control.admits([], [WorkerBatches(9.9, [1])], 10.0)


def test_attainment_covers_recent_minutes_and_the_budget_the_last_hour():
    now = 0.0
    counts = Attainment(lambda: now)
    assert counts.recent() is None
    assert counts.budget_left(0.9) == 1
    counts.add(90, 5)
    now = 30 * 60.0
    counts.add(105, 0)
    assert (counts.attained, counts.missed, counts.recent()) == (195, 5, 1.0)
    assert counts.budget_left(0.9) == pytest.approx(0.75)
    now = 80 * 60.0
    assert counts.budget_left(0.9) == 1
    assert SIZES[-1] == pytest.approx(1024)


def test_a_byte_limit_that_cuts_batches_is_learned_and_forgotten():
    control = a_control((1, 0.001), (64, 0.002))
    assert control.batch_size([0.0] * 100, 0.0, 1024) > 64
    for _ in range(10):
        control.sent(12, cut=True)
    assert control.curve.max_size == 12
    # A slightly larger batch is tried, in case the limit has changed.
    assert control.batch_size([0.0] * 100, 0.0, 1024) == 14
    control.sent(14, cut=False)
    assert control.curve.max_size == 14


def test_overload_misses_shrink_the_margin_and_timely_answers_widen_it():
    control = a_control((1, 0.01))
    old_margin = control.margin
    control.learn(1, 0.01, 1.0, 1, 1)
    new_margin = control.margin
    assert new_margin < old_margin
    # No admission could have avoided this miss.
    control.learn(1, 0.06, 2.0, 1, 1)
    assert control.margin == new_margin
    for number in range(200):
        control.learn(1, 0.01, 3.0 + number, 1, 0)
    assert old_margin < control.margin
    relaxed_quantile = control.curve.quantile
    assert relaxed_quantile < 0.99
    control.learn(1, 0.01, 300.0, 1, 1)
    assert control.curve.quantile > relaxed_quantile


@pytest.mark.parametrize("text", ["p50<50ms", "p90<50ms", "p95<50ms"])
def test_the_predicted_quantile_never_falls_below_the_median(text):
    target = latency_target(text)
    control = SloControl(target, LatencyCurve(target.quantile))
    for number in range(200):
        control.learn(1, 0.004 + 0.001 * (number % 3), number * 0.01, 1, 0)
    assert control.curve.quantile >= 0.5
    assert 1.0 <= control.curve.tail < 1.3
    assert 0.8 < control.curve.mean < 1.1


@given(
    curves(),
    st.lists(st.floats(0.1, 20), min_size=1, max_size=30),
    st.floats(0.1, 20),
    st.integers(0, 3),
    st.floats(0, TARGET),
)
def test_admission_accounts_for_weights_and_admits_single_requests(
    curve, weights, weight, busy_count, end
):
    batch_aim = aim(curve, TARGET, 100.0, busy_count + 1)
    arrivals = [0.0] * len(weights)
    admitted = admission(
        curve, TARGET, batch_aim, arrivals, [end] * (busy_count + 1), 0.0, weights, weight
    )
    assert admitted.waiting >= len(weights)
    assert admitted.waiting >= len(weights) + weight or admitted.opens_at > 0
    assert (
        admission(curve, TARGET, batch_aim, [], [end] * busy_count + [0.0], 0.0, [], weight).waiting
        >= weight
    )
    count, total_weight = fill(5.0, weights, 0, len(weights))
    assert count == 1 or total_weight <= 5.0
    assert count == len(weights) or total_weight + weights[count] > 5.0
