"""Decisions on the number of workers, as properties and under simulated loads."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.features.slo.simulation import Case, simulate_target
from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.models.latency_curve import LatencyCurve
from tsx_runtime.core.scheduling.service_rate import LatencyCapacity
from tsx_runtime.features.elastic.decision import (
    INTERVAL_S,
    MIN_QUIET_S,
    SATURATED_UTILIZATION,
    History,
    ModelLoad,
    Scaling,
    decide,
)
from tsx_runtime.features.slo.decision import throughput

MODEL = ModelLoad(
    now=1000.0,
    minimum=1,
    maximum=8,
    workers=1,
    starting=0,
    failing=0,
    working=1,
    waiting=40,
    rate=20.0,
    load_seconds=0.02,
    cores=8.0,
)


def decide_repeatedly(
    load_sample: ModelLoad,
    repetitions: int = 1,
    history: History | None = None,
    pause: float = INTERVAL_S,
) -> tuple[Scaling, History]:
    decision, history = decide(load_sample, history or History())
    for number in range(1, repetitions):
        decision, history = decide(
            replace(load_sample, now=load_sample.now + number * pause), history
        )
    return decision, history


@pytest.mark.parametrize(
    ("change", "decision"),
    [
        ({}, (2, "queue")),
        # The number of workers at most doubles.
        ({"workers": 2, "working": 2, "waiting": 60}, (4, "queue")),
        # Seven workers empty the queue in a second.
        ({"workers": 4, "working": 4, "waiting": 45}, (7, "queue")),
        ({"workers": 4, "working": 4, "waiting": 45, "maximum": 5}, (5, "queue")),
        ({"workers": 8, "working": 8, "waiting": 90}, (8, "")),
        ({"working": 0, "waiting": 0}, (1, "")),
        # The next batch takes the whole queue.
        ({"waiting": 40, "batch_size": 64}, (1, "")),
        ({"starting": 1, "workers": 2}, (2, "")),
        ({"failing": 1, "workers": 2}, (2, "")),
        ({"load_seconds": 30.0}, (1, "")),
        ({"worker_memory": 100, "free_memory": 99}, (1, "memory")),
        (
            {"cores": 2.0, "cores_per_worker": 0.9, "workers": 2, "working": 2, "waiting": 60},
            (2, "cores"),
        ),
        (
            {"cores": 2.0, "cores_per_worker": 0.5, "workers": 2, "working": 2, "waiting": 60},
            (4, "queue"),
        ),
    ],
)
def test_workers_are_added_for_a_lasting_queue_within_the_limits(change, decision):
    assert decide_repeatedly(replace(MODEL, **change), 2)[0] == decision


def test_a_refused_request_adds_workers_at_once_but_a_short_burst_does_not():
    assert decide_repeatedly(MODEL)[0] == (1, "")
    assert decide_repeatedly(replace(MODEL, refusals=3))[0] == (2, "refused")


def test_slow_loading_workers_are_added_only_for_a_longer_queue():
    assert decide_repeatedly(replace(MODEL, load_seconds=30.0), 11)[0] == (2, "queue")


def test_an_unused_model_is_unloaded_only_with_scale_to_zero():
    idle = replace(MODEL, working=0, waiting=0, idle_seconds=601.0)
    assert decide_repeatedly(idle)[0] == (1, "")
    assert decide_repeatedly(replace(idle, scale_to_zero=600.0))[0] == (0, "unused")
    assert decide_repeatedly(replace(idle, scale_to_zero=602.0))[0] == (1, "")


def test_workers_are_removed_after_a_minute_in_which_fewer_sufficed():
    idle = replace(MODEL, workers=4, working=0, waiting=0)
    assert decide_repeatedly(idle, round(MIN_QUIET_S / INTERVAL_S))[0] == (4, "")
    assert decide_repeatedly(idle, round(MIN_QUIET_S / INTERVAL_S) + 1)[0] == (1, "quiet")
    assert decide_repeatedly(replace(idle, minimum=2), round(MIN_QUIET_S / INTERVAL_S) + 1)[0] == (
        2,
        "quiet",
    )
    assert decide_repeatedly(replace(idle, working=2), round(MIN_QUIET_S / INTERVAL_S) + 1)[0] == (
        4,
        "",
    )


@given(
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(0, 500),
    st.integers(0, 50),
    st.floats(0, 1e4),
    st.integers(1, 4),
    st.integers(0, 20),
)
@settings(max_examples=60, deadline=None)
def test_a_decision_is_in_range_at_most_doubles_and_has_a_reason(
    workers, working, waiting, refused, rate, minimum, extra
):
    load_sample = replace(
        MODEL,
        workers=workers,
        working=min(workers, working),
        waiting=waiting,
        refusals=refused,
        rate=rate,
    )
    load_sample = replace(load_sample, minimum=minimum, maximum=minimum + extra)
    decision, _ = decide_repeatedly(load_sample, 130)
    if decision.workers > workers:
        assert workers < decision.workers <= min(load_sample.maximum, 2 * workers)
    elif decision.workers < workers:
        assert decision.workers >= minimum
    assert decision.workers == workers or decision.reason


@pytest.mark.nightly
@given(st.floats(0.05, 7.5), st.floats(0.5, 500), st.floats(0.01, 3), st.integers(0, 2**16))
@settings(max_examples=15, deadline=None)
def test_a_constant_load_never_restarts_a_stopped_worker(load, rate, load_seconds, seed):
    """Simulate evenly spaced requests that keep `load` workers busy.

    Each check finds a worker busy with a certain probability.
    """
    dice, history, waiting, workers, changes = random.Random(seed), History(), 0.0, 1, []
    for number in range(2400):
        waiting += (load - workers) * INTERVAL_S * rate
        refused = max(0, math.ceil(waiting - 100))
        waiting = min(max(0.0, waiting), 100.0)
        busy_probability = 1.0 if waiting else load / workers
        working = sum(dice.random() < busy_probability for _ in range(workers))
        load_sample = replace(
            MODEL,
            now=number * INTERVAL_S,
            workers=workers,
            working=working,
            waiting=int(waiting),
            refusals=refused,
        )
        decision, history = decide(
            replace(load_sample, rate=rate, load_seconds=load_seconds), history
        )
        if decision.workers != workers:
            changes.append(decision.workers - workers)
            workers = decision.workers
    decreases = [number for number, change in enumerate(changes) if change < 0]
    assert not decreases or all(change < 0 for change in changes[decreases[0] :])
    assert workers >= min(8, load)


def make_bound(first: float, step: float, seconds: float) -> LatencyCapacity:
    curve = LatencyCurve(
        0.99, [(size, first + step * (size - 1)) for size in (1, 2, 4, 8, 16, 32, 64, 128)]
    )
    target = LatencyTarget("p99<50ms", 0.99, seconds)
    return LatencyCapacity(target, partial(throughput, curve, seconds))


bounds = st.builds(make_bound, st.floats(0.001, 0.03), st.floats(0.0, 0.01), st.floats(0.02, 0.2))


@given(bounds, st.floats(0.0, 1e4), st.floats(1.0, 3.0), st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_the_workers_for_a_latency_target_are_sufficient_and_minimal(
    bound, rate, factor, max_workers
):
    workers = bound.min_workers(rate, SATURATED_UTILIZATION, max_workers)
    assert 1 <= workers <= bound.min_workers(rate * factor, SATURATED_UTILIZATION, max_workers)
    assert (
        workers == max_workers or rate <= SATURATED_UTILIZATION * bound.throughput(rate, workers)[0]
    )
    assert workers == 1 or rate > SATURATED_UTILIZATION * bound.throughput(rate, workers - 1)[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_chosen_workers_keep_the_target_with_few_refusals(seed):
    dice = random.Random(seed)
    first = dice.choice([0.005, 0.01, 0.02])
    step, bound = first * dice.uniform(0.02, 0.5), first * dice.uniform(5, 12)
    case = Case("linear", first, step, 1024, bound, 1, 1.0, seed)
    latency_bound = make_bound(first, step, 0.95 * bound)
    rate = dice.uniform(0.5, 4) * latency_bound.throughput(1e9, 1)[0]
    workers = latency_bound.min_workers(rate, SATURATED_UTILIZATION, 99)
    arrivals = draw_arrivals(lambda now: rate, 6000 / rate, rate, seed)
    outcome = simulate_target(case._replace(workers=workers), arrivals, 0.99, arrivals[-1] / 4)
    assert outcome.attainment >= 0.98
    assert outcome.in_time >= 0.97 * outcome.offered
    if workers > 1:
        smaller_outcome = simulate_target(
            case._replace(workers=workers - 1), arrivals, 0.99, arrivals[-1] / 4
        )
        assert smaller_outcome.in_time < outcome.in_time


BOUND = make_bound(0.01, 0.001, 0.05)


@pytest.mark.parametrize(
    ("change", "checks", "decision"),
    [
        ({}, 2, (1, "")),
        ({}, 3, (2, "slo")),
        # The number of workers at most doubles.
        ({"workers": 2, "arrivals": 2500}, 3, (4, "slo")),
        ({"workers": 4, "arrivals": 2500}, 4, (6, "slo")),
        ({"workers": 2, "maximum": 3, "arrivals": 2500}, 3, (3, "slo")),
        (
            {"workers": 2, "arrivals": 2500, "worker_memory": 100, "free_memory": 99},
            3,
            (2, "memory"),
        ),
        ({"workers": 5}, 9, (5, "")),
        # A waiting request will be in time; otherwise it would have been refused.
        (
            {"arrivals": 10, "waiting": 999},
            9,
            (1, ""),
        ),
        ({"arrivals": 10, "refusals": 1}, 1, (2, "slo")),
        # The target allows this many late requests.
        ({"arrivals": 200, "refusals": 1}, 2, (1, "")),
        ({"arrivals": 10, "refusals": 9, "starting": 1}, 3, (1, "")),
        ({"arrivals": 10, "workers": 4, "working": 4}, 120, (4, "")),
        # All workers are busy, but with small batches.
        (
            {"arrivals": 10, "workers": 4, "working": 4},
            121,
            (1, "quiet"),
        ),
        ({"arrivals": 900, "workers": 4, "working": 0}, 122, (4, "")),
    ],
)
def test_with_a_latency_target_the_arrival_rate_decides(change, checks, decision):
    """Start from 1500 requests in half a second, which need 5 workers."""
    load_sample = replace(
        MODEL, **{"latency_capacity": BOUND, "arrivals": 1500, "working": 0, "waiting": 0, **change}
    )
    assert decide_repeatedly(load_sample, checks)[0] == decision


@dataclass
class Day:
    """The outcome of a simulated load."""

    worker_seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    changes: int = 0

    def count_late(self, max_wait_s: float) -> int:
        return sum(wait > max_wait_s for wait in self.waits)


def simulate(
    arrivals: list[float],
    service: float,
    end: float,
    minimum: int,
    maximum: int,
    load: float = 0.02,
) -> Day:
    """Serve requests in order of arrival with as many workers as `decide` chooses."""
    result, history, queue, upcoming = Day(), History(), deque(), deque(arrivals)
    # The times at which each worker becomes idle.
    free_times = [0.0] * minimum
    now = 0.0
    while now < end:
        now += INTERVAL_S
        while upcoming and upcoming[0] <= now:
            queue.append(upcoming.popleft())
        while queue and max(queue[0], free_times[0]) <= now:
            start_s = max(queue[0], free_times[0])
            result.waits.append(start_s - queue.popleft())
            heapq.heapreplace(free_times, start_s + service)
        result.worker_seconds += INTERVAL_S * len(free_times)
        working = sum(end > now for end in free_times)
        load_sample = ModelLoad(
            now,
            minimum,
            maximum,
            len(free_times),
            0,
            0,
            working,
            len(queue),
            rate=1 / service,
            load_seconds=load,
        )
        decision, history = decide(load_sample, history)
        if decision.workers != len(free_times):
            result.changes += 1
            free_times = (
                sorted(free_times)[-decision.workers :]
                if decision.workers < len(free_times)
                else free_times
            )
            free_times += [now + load] * (decision.workers - len(free_times))
            heapq.heapify(free_times)
    return result


def draw_arrivals(rate, end: float, max_rate: float, seed: int) -> list[float]:
    """Draw arrival times with the rate `rate(now)` per second, which never exceeds `max_rate`."""
    dice, now, arrivals = random.Random(seed), 0.0, []
    while (now := now + dice.expovariate(max_rate)) < end:
        if dice.random() * max_rate < rate(now):
            arrivals.append(now)
    return arrivals


def test_few_requests_wait_and_few_workers_idle_over_a_simulated_day():
    end, service = 2400.0, 0.1
    # The load keeps 0.1 to 2.7 workers busy.
    arrivals = draw_arrivals(
        lambda now: 14 - 13 * math.cos(2 * math.pi * now / end), end, 27.0, seed=1
    )
    one_worker, four_workers, elastic = (
        simulate(arrivals, service, end, *bounds) for bounds in ((1, 1), (4, 4), (1, 4))
    )
    assert four_workers.count_late(1.0) == 0
    assert one_worker.count_late(1.0) > len(arrivals) / 2
    assert elastic.count_late(1.0) < len(arrivals) / 200
    assert elastic.worker_seconds < 0.75 * four_workers.worker_seconds
    assert elastic.changes < 12


def test_a_load_slightly_above_one_worker_rarely_starts_a_second():
    arrivals = draw_arrivals(lambda now: 1.1, 14400.0, 1.1, seed=2)
    assert simulate(arrivals, 0.5, 14400.0, 1, 4).changes < 24
