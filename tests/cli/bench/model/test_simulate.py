"""Simulated time against what queueing theory says, and against the batching function that is asked each time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsx_cli.bench.model import simulate as simulation
from tsx_cli.bench.model.configuration import Configuration
from tsx_cli.bench.model.predict import predict
from tsx_cli.bench.model.results import Curve, CurvePoint, OfferedLoad
from tsx_cli.bench.model.simulate import constant, poisson, recorded, simulate
from tsx_runtime.core.scheduling.queue import BatchLimits

pytestmark = pytest.mark.slow


FEW = settings(max_examples=10)


@pytest.mark.parametrize(("use", "spread"), [(0.3, 0.0), (0.5, 0.0), (0.7, 0.0), (0.5, 0.5), (0.5, 1.0)])
def test_one_worker_without_batches_waits_as_pollaczek_and_khinchine_say(use: float, spread: float) -> None:
    middle = 10 / math.sqrt(1 + spread**2)  # the median, where the mean is 10
    reported = simulate([middle], poisson(100 * use, 40_000, seed=3), spread=spread, seed=3)
    wait = use * 10 * (1 + spread**2) / (2 * (1 - use))
    assert reported.mean_ms == pytest.approx(10 + wait, rel=0.08)
    assert reported.utilisation == pytest.approx(use, rel=0.03)


def test_several_workers_without_batches_wait_as_erlang_says() -> None:
    """M/D/2 at 70 %: half of what M/M/2 waits, within a few percent."""
    use = 0.7
    reported = simulate([10.0], poisson(200 * use, 40_000, seed=5), workers=2)
    wait = 10 * use**2 / (1 - use**2)
    assert reported.mean_ms - 10 == pytest.approx(wait / 2, rel=0.1)


def test_a_slow_rate_finds_idle_workers_and_batches_of_one() -> None:
    reported = simulate([5.0, 6.0, 7.0], constant(50, 500), workers=2, overhead_ms=1)
    assert reported.batch_sizes == {1: 500}
    assert [reported.p50_ms, reported.max_ms] == pytest.approx([6, 6])
    assert reported.utilisation == pytest.approx(0.125, rel=0.02)


def test_overload_fills_batches_and_the_queue_refuses_the_rest() -> None:
    reported = simulate([10.0] * 8, poisson(2000, 20_000, seed=1), queue_size=100)
    assert reported.throughput == pytest.approx(800, rel=0.01)
    assert max(reported.batch_sizes) == 8
    assert reported.batch_sizes[8] > 0.99 * sum(reported.batch_sizes.values())
    assert reported.refused + reported.answered == 20_000
    assert reported.p99_ms <= 10 * (100 / 8 + 3)


def test_who_waits_for_company_waits_no_longer_than_notified() -> None:
    reported = simulate([1.0] * 4, constant(10, 100), limits=BatchLimits(max_items=4, wait=0.02))
    assert reported.batch_sizes == {1: 100}
    assert reported.p50_ms == pytest.approx(21)
    assert simulate([1.0] * 4, constant(1000, 400), limits=BatchLimits(max_items=4, wait=0.02)).batch_sizes == {4: 100}


@FEW
@given(
    st.lists(st.floats(0.1, 50), min_size=1, max_size=6),
    st.integers(1, 5),
    st.floats(1, 3000),
    st.none() | st.integers(1, 30),
    st.none() | st.floats(0, 0.05),
    st.floats(0, 0.5),
    st.integers(0, 2**32),
)
def test_every_request_is_answered_or_refused_and_no_worker_does_two_things(
    times: list[float], workers: int, rate: float, queue: int | None, wait: float | None, spread: float, seed: int
) -> None:
    limits = BatchLimits(max_items=len(times), wait=wait)
    reported = simulate(times, poisson(rate, 300, seed), workers=workers, spread=spread, queue_size=queue, limits=limits, seed=seed)
    assert reported.answered + reported.refused == 300
    assert sum(size * count for size, count in reported.batch_sizes.items()) == reported.answered
    assert max(reported.batch_sizes, default=1) <= len(times)
    assert reported.utilisation <= 1 + 1e-9
    assert reported.p50_ms <= reported.p90_ms <= reported.p95_ms <= reported.p99_ms <= reported.p999_ms <= reported.max_ms
    if not spread:
        assert reported.p50_ms >= min(times) - 1e-6


@FEW
@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=6), st.integers(1, 5), st.floats(1, 3000), st.integers(0, 2**32))
def test_not_asking_where_nothing_can_leave_changes_nothing(times: list[float], workers: int, rate: float, seed: int) -> None:
    arrivals = poisson(rate, 200, seed)
    quick = simulate(times, arrivals, workers=workers)
    run = simulation._Run(times, workers, (), [1.0], (0.0, 0.0), BatchLimits(max_items=len(times)), None)
    for arrival in arrivals:
        while run.running and run.running[0][0] <= arrival:
            run.step()
        run.now = arrival
        run.queue.put(simulation._Request(arrival), 0)  # type: ignore[arg-type]
        run.flush()
    while run.running:
        run.step()
    assert run.result(0.0) == quick


@FEW
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 8), st.floats(0, 5))
def test_a_closed_loop_keeps_littles_law(connections: int, workers: int, batch: int, think: float) -> None:
    times = [2.0 + size for size in range(batch)]
    reported = simulate(times, range(2000), workers=workers, connections=connections, overhead_ms=think)
    assert reported.answered == 2000
    assert reported.throughput * reported.mean_ms / 1000 == pytest.approx(connections, rel=0.12)


def test_the_same_seed_gives_the_same_and_another_another() -> None:
    once, again, other = (simulate([5.0], poisson(100, 500, seed), spread=0.2, seed=seed) for seed in (1, 1, 2))
    assert once == again != other


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50), st.floats(0.1, 1e4))
def test_recorded_moments_begin_at_nought_and_come_at_the_rate(moments: list[float], rate: float) -> None:
    reported = recorded(moments, rate)
    assert reported[0] == 0
    assert reported == sorted(reported)
    if max(moments) - min(moments) > 1e-3:
        assert (len(reported) - 1) / reported[-1] == pytest.approx(rate)


def test_a_recording_without_requests_has_no_moments() -> None:
    assert recorded([]) == []


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("cores", [2, 8])
def test_closed_loops_are_predicted_as_they_are_simulated(workers: int, batch_size: int, cores: int) -> None:
    def batch_ms(size: int) -> float:
        return 5 + 2 * size

    points = [CurvePoint(batch_size=each, median_ms=batch_ms(each), low_ms=0, high_ms=0, samples=1) for each in (1, 2, 4, 8)]
    slow = [max(1.0, active / cores) for active in range(workers + 1)]
    times = [batch_ms(size) for size in range(1, batch_size + 1)]
    for connections in {1, workers, 2 * workers, workers * batch_size, 3 * workers * batch_size}:
        configuration = Configuration(workers=workers, batch_size=batch_size)
        reported = predict(Curve(points=points), configuration, OfferedLoad(connections=connections), 0.3, cores)
        found = simulate(times, range(1500), workers=workers, connections=connections, slow=slow, overhead_ms=0.3)
        assert reported.throughput == pytest.approx(found.throughput, rel=0.25)
        assert reported.p99_ms == pytest.approx(found.p99_ms, rel=0.5)


def test_noise_has_the_median_one_and_the_spread_asked_for() -> None:
    noises = sorted(simulation._noises(0.3, 1))
    mean = sum(noises) / len(noises)
    assert noises[len(noises) // 2] == pytest.approx(1, abs=0.02)
    assert sum((each / mean - 1) ** 2 for each in noises) / len(noises) == pytest.approx(0.09, rel=0.15)


def test_what_holds_up_a_batch_comes_on_top_of_its_median() -> None:
    reported = simulate([10.0], constant(10, 4000), extra_ms=(-1.0, 0.0, 0.0, 0.0, 10.0), seed=2)
    assert [reported.p50_ms, reported.p90_ms, reported.max_ms] == pytest.approx([10, 20, 20])
    assert reported.batch_ms == pytest.approx(11.8, rel=0.03)
    assert reported.mean_ms == pytest.approx(reported.batch_ms, rel=0.03)


def test_a_machine_that_is_now_quicker_and_now_slower_has_a_longer_tail_and_the_same_mean() -> None:
    steady, drifting = (simulate([10.0], poisson(70, 20_000, seed=6), drift=drift, seed=6) for drift in (0.0, 0.1))
    assert drifting.batch_ms == pytest.approx(10, rel=0.03)
    assert drifting.p99_ms > 1.1 * steady.p99_ms


def test_only_a_worker_that_was_idle_takes_longer() -> None:
    idle = simulate([10.0], constant(10, 100), cold_ms=3)
    assert [idle.p50_ms, idle.max_ms] == pytest.approx([13, 13], abs=0.1)
    assert idle.batch_ms == pytest.approx(13, abs=0.1)
    late = simulate([10.0], constant(10, 100), wake_ms=3)
    assert [late.p50_ms, late.batch_ms] == pytest.approx([13, 10], abs=0.1), "on the way, which keeps no worker"
    assert simulate([10.0], constant(96, 100), cold_ms=3, wake_ms=3).max_ms < 11.5, "it hardly idled"
    busy = simulate([10.0], range(1000), connections=2, cold_ms=3)
    assert busy.throughput == pytest.approx(100, rel=0.01)
