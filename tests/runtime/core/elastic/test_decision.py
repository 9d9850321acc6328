"""Decisions on the number of workers, as properties and under simulated loads."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.core.slo.simulation import Case, simulate_target
from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.elastic.decision import (
    INTERVAL_S,
    MIN_QUIET_S,
    SATURATED_UTILIZATION,
    History,
    LatencyCapacity,
    ModelLoad,
    Scaling,
    decide,
)
from tsx_runtime.core.slo.curve import LatencyCurve

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
    seen: ModelLoad, times: int = 1, history: History | None = None, pause: float = INTERVAL_S
) -> tuple[Scaling, History]:
    decision, history = decide(seen, history or History())
    for number in range(1, times):
        decision, history = decide(replace(seen, now=seen.now + number * pause), history)
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
def test_workers_come_when_the_queue_stays_and_something_allows_more(change, decision):
    assert decide_repeatedly(replace(MODEL, **change), 2)[0] == decision


def test_one_look_at_a_burst_is_not_enough_but_a_refused_request_is():
    assert decide_repeatedly(MODEL)[0] == (1, "")
    assert decide_repeatedly(replace(MODEL, refusals=3))[0] == (2, "refused")


def test_where_a_worker_loads_for_long_the_queue_must_last_longer():
    assert decide_repeatedly(replace(MODEL, load_seconds=30.0), 11)[0] == (2, "queue")


def test_an_unused_model_is_unloaded_only_where_it_says_so():
    idle = replace(MODEL, working=0, waiting=0, idle_seconds=601.0)
    assert decide_repeatedly(idle)[0] == (1, "")
    assert decide_repeatedly(replace(idle, scale_to_zero=600.0))[0] == (0, "unused")
    assert decide_repeatedly(replace(idle, scale_to_zero=602.0))[0] == (1, "")


def test_workers_go_after_a_minute_in_which_fewer_had_sufficed():
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
def test_a_decision_stays_in_the_range_at_most_doubles_and_has_a_reason(
    workers, working, waiting, refused, rate, minimum, more
):
    seen = replace(
        MODEL,
        workers=workers,
        working=min(workers, working),
        waiting=waiting,
        refusals=refused,
        rate=rate,
    )
    seen = replace(seen, minimum=minimum, maximum=minimum + more)
    decision, _ = decide_repeatedly(seen, 130)
    if decision.workers > workers:
        assert workers < decision.workers <= min(seen.maximum, 2 * workers)
    elif decision.workers < workers:
        assert decision.workers >= minimum
    assert decision.workers == workers or decision.reason


@given(st.floats(0.05, 7.5), st.floats(0.5, 500), st.floats(0.01, 3), st.integers(0, 2**16))
@settings(max_examples=15, deadline=None)
def test_under_a_constant_load_no_worker_is_started_again_once_one_was_stopped(
    load, rate, load_seconds, seed
):
    """Simulate a load of so many workers whose requests come evenly.

    Each look finds a worker busy with a probability.
    """
    dice, history, waiting, workers, changes = random.Random(seed), History(), 0.0, 1, []
    for number in range(2400):
        waiting += (load - workers) * INTERVAL_S * rate
        refused = max(0, math.ceil(waiting - 100))
        waiting = min(max(0.0, waiting), 100.0)
        share = 1.0 if waiting else load / workers
        working = sum(dice.random() < share for _ in range(workers))
        seen = replace(
            MODEL,
            now=number * INTERVAL_S,
            workers=workers,
            working=working,
            waiting=int(waiting),
            refusals=refused,
        )
        decision, history = decide(replace(seen, rate=rate, load_seconds=load_seconds), history)
        if decision.workers != workers:
            changes.append(decision.workers - workers)
            workers = decision.workers
    downs = [number for number, change in enumerate(changes) if change < 0]
    assert not downs or all(change < 0 for change in changes[downs[0] :])
    assert workers >= min(8, load)


def a_bound(first: float, step: float, seconds: float) -> LatencyCapacity:
    curve = LatencyCurve(
        0.99, [(size, first + step * (size - 1)) for size in (1, 2, 4, 8, 16, 32, 64, 128)]
    )
    return LatencyCapacity(LatencyTarget("p99<50ms", 0.99, seconds), seconds, curve)


bounds = st.builds(a_bound, st.floats(0.001, 0.03), st.floats(0.0, 0.01), st.floats(0.02, 0.2))


@given(bounds, st.floats(0.0, 1e4), st.floats(1.0, 3.0), st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_a_latency_target_needs_as_many_workers_as_its_requests_keep_busy(bound, rate, more, most):
    needed = bound.min_workers(rate, SATURATED_UTILIZATION, most)
    assert 1 <= needed <= bound.min_workers(rate * more, SATURATED_UTILIZATION, most)
    assert needed == most or rate <= SATURATED_UTILIZATION * bound.throughput(rate, needed)[0]
    assert needed == 1 or rate > SATURATED_UTILIZATION * bound.throughput(rate, needed - 1)[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_decided_number_of_workers_keeps_the_target_and_refuses_few_requests(seed):
    dice = random.Random(seed)
    first = dice.choice([0.005, 0.01, 0.02])
    step, bound = first * dice.uniform(0.02, 0.5), first * dice.uniform(5, 12)
    case = Case("linear", first, step, 1024, bound, 1, 1.0, seed)
    wanted = a_bound(first, step, 0.95 * bound)
    rate = dice.uniform(0.5, 4) * wanted.throughput(1e9, 1)[0]
    workers = wanted.min_workers(rate, SATURATED_UTILIZATION, 99)
    arrivals = draw_arrivals(lambda now: rate, 6000 / rate, rate, seed)
    done = simulate_target(case._replace(workers=workers), arrivals, 0.99, arrivals[-1] / 4)
    assert done.attainment >= 0.98
    assert done.in_time >= 0.97 * done.offered
    if workers > 1:
        less = simulate_target(case._replace(workers=workers - 1), arrivals, 0.99, arrivals[-1] / 4)
        assert less.in_time < done.in_time


BOUND = a_bound(0.01, 0.001, 0.05)


@pytest.mark.parametrize(
    ("change", "looks", "decision"),
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
        # A request that waits will be in time, or it would have been refused.
        (
            {"arrivals": 10, "waiting": 999},
            9,
            (1, ""),
        ),
        ({"arrivals": 10, "refusals": 1}, 1, (2, "slo")),
        # The target allows so many to be late.
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
def test_with_a_latency_target_the_rate_of_arrivals_decides(change, looks, decision):
    """1500 requests that arrive in half a second need 5 workers."""
    seen = replace(
        MODEL, **{"latency_capacity": BOUND, "arrivals": 1500, "working": 0, "waiting": 0, **change}
    )
    assert decide_repeatedly(seen, looks)[0] == decision


@dataclass
class Day:
    """The outcome of a simulated load."""

    worker_seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    changes: int = 0

    def misses(self, bound: float) -> int:
        return sum(wait > bound for wait in self.waits)


def simulate(
    arrivals: list[float],
    service: float,
    end: float,
    minimum: int,
    maximum: int,
    load: float = 0.02,
) -> Day:
    """Serve requests in their order, by as many workers as `decide` says."""
    day, history, queue, coming = Day(), History(), deque(), deque(arrivals)
    # The times at which the workers are next without work.
    free = [0.0] * minimum
    now = 0.0
    while now < end:
        now += INTERVAL_S
        while coming and coming[0] <= now:
            queue.append(coming.popleft())
        while queue and max(queue[0], free[0]) <= now:
            begun = max(queue[0], free[0])
            day.waits.append(begun - queue.popleft())
            heapq.heapreplace(free, begun + service)
        day.worker_seconds += INTERVAL_S * len(free)
        working = sum(end > now for end in free)
        seen = ModelLoad(
            now,
            minimum,
            maximum,
            len(free),
            0,
            0,
            working,
            len(queue),
            rate=1 / service,
            load_seconds=load,
        )
        decision, history = decide(seen, history)
        if decision.workers != len(free):
            day.changes += 1
            free = sorted(free)[-decision.workers :] if decision.workers < len(free) else free
            free += [now + load] * (decision.workers - len(free))
            heapq.heapify(free)
    return day


def draw_arrivals(rate, end: float, most: float, seed: int) -> list[float]:
    """Draw arrivals at `rate(now)` a second, which is at most `most`."""
    dice, now, arrivals = random.Random(seed), 0.0, []
    while (now := now + dice.expovariate(most)) < end:
        if dice.random() * most < rate(now):
            arrivals.append(now)
    return arrivals


def test_over_a_day_few_requests_wait_and_workers_run_only_while_they_are_needed():
    end, service = 2400.0, 0.1
    # The load is that of 0.1 to 2.7 workers.
    arrivals = draw_arrivals(
        lambda now: 14 - 13 * math.cos(2 * math.pi * now / end), end, 27.0, seed=1
    )
    single, most, elastic = (
        simulate(arrivals, service, end, *bounds) for bounds in ((1, 1), (4, 4), (1, 4))
    )
    assert most.misses(1.0) == 0
    assert single.misses(1.0) > len(arrivals) / 2
    assert elastic.misses(1.0) < len(arrivals) / 200
    assert elastic.worker_seconds < 0.75 * most.worker_seconds
    assert elastic.changes < 12


def test_a_load_of_little_more_than_a_worker_starts_the_second_one_seldom():
    arrivals = draw_arrivals(lambda now: 1.1, 14400.0, 1.1, seed=2)
    assert simulate(arrivals, 0.5, 14400.0, 1, 4).changes < 24
