"""Decisions on the next step of a rollout."""

from __future__ import annotations

import random
from bisect import bisect_left
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.telemetry.histogram import FINE_BOUNDS, quantile
from tsx_runtime.features.rollouts.controller import _failure
from tsx_runtime.features.rollouts.policy import (
    Action,
    Counts,
    RolloutPlan,
    StepObservation,
    count_slower,
    decide,
)

pytestmark = pytest.mark.slow


PLAN = RolloutPlan(version="2", bake=60, max_error_rate=0.005, max_p99_ratio=1.2)


def count_requests(seconds: list[float], errors: int = 0) -> Counts:
    latencies = [0] * (len(FINE_BOUNDS) + 1)
    for duration in seconds:
        latencies[bisect_left(FINE_BOUNDS, duration)] += 1
    return Counts(len(seconds), errors, tuple(latencies))


def draw_counts(count: int, rate: float, seed: int, scale: float = 0.01) -> Counts:
    source = random.Random(seed)
    return count_requests(
        [source.lognormvariate(0, 0.4) * scale for _ in range(count)],
        sum(source.random() < rate for _ in range(count)),
    )


def observe(new: Counts, old: Counts, seconds: float = 60, step: int = 0) -> StepObservation:
    return StepObservation(step, seconds, new, old)


def act(new: Counts, old: Counts, plan: RolloutPlan = PLAN, **observation: float) -> Action:
    return decide(plan, observe(new, old, **observation)).action


def test_an_equally_good_version_advances_and_finishes() -> None:
    new, old = draw_counts(1000, 0.001, 1), draw_counts(99_000, 0.001, 2)
    assert act(new, old) is Action.ADVANCE
    assert act(new, old, step=3) is Action.FINISH


def test_a_step_lasts_for_its_whole_bake_time() -> None:
    new, old = draw_counts(1000, 0.001, 1), draw_counts(99_000, 0.001, 2)
    decision = decide(PLAN, observe(new, old, seconds=59))
    assert decision.action is Action.WAIT
    assert "1 s" in decision.reason


def test_many_errors_roll_back_at_once() -> None:
    decision = decide(PLAN, observe(Counts(12, 12), Counts(1000, 0), seconds=2))
    assert decision.action is Action.BACK
    assert "12 of 12 requests of version 2 failed" in decision.reason


@pytest.mark.parametrize(
    ("new", "old", "action"), [(0.03, 0.01, Action.BACK), (0.05, 0.05, Action.ADVANCE)]
)
def test_without_a_limit_only_more_errors_than_before_roll_back(
    new: float, old: float, action: Action
) -> None:
    plan = RolloutPlan(version="2", bake=60)
    assert act(draw_counts(2000, new, 1), draw_counts(50_000, old, 2), plan=plan) is action


def test_a_slower_version_is_rolled_back() -> None:
    decision = decide(
        PLAN, observe(draw_counts(2000, 0, 1, 0.03), draw_counts(50_000, 0, 2), seconds=5)
    )
    assert decision.action is Action.BACK
    assert "1.2 times the old version's p99" in decision.reason


def test_the_p99_limit_may_be_in_milliseconds() -> None:
    plan = RolloutPlan(version="2", bake=60, max_p99_ms=500, max_error_rate=0.5)
    assert act(draw_counts(1000, 0, 1), Counts(), plan=plan) is Action.ADVANCE
    assert act(count_requests([0.6] * 300), Counts(), plan=plan) is Action.BACK


def test_without_enough_old_requests_the_rollout_waits_then_rolls_back() -> None:
    plan = RolloutPlan(version="2", bake=60)
    decision = decide(plan, observe(Counts(1000, 1000), Counts(5)))
    assert decision.action is Action.WAIT
    assert "too few for a comparison" in decision.reason
    assert act(Counts(1000, 1000), Counts(5), seconds=600, plan=plan) is Action.BACK


def test_the_uncertain_p99_of_few_requests_rarely_rolls_back() -> None:
    plan = RolloutPlan(version="2", bake=60, max_p99_ratio=1.0, max_error_rate=0.5)
    rollbacks = sum(
        act(draw_counts(5000, 0, seed), draw_counts(500, 0, seed + 99), plan=plan) is Action.BACK
        for seed in range(40)
    )
    assert rollbacks <= 6
    assert (
        "too few for a comparison"
        in decide(plan, observe(draw_counts(5000, 0, 1), draw_counts(399, 0, 2))).reason
    )


def test_counts_with_other_buckets_replace_the_latencies() -> None:
    assert Counts(3, 1, (1, 2)).plus(Counts()) == Counts(3, 1, (1, 2))
    assert Counts(3, 1, (1, 2)).plus(Counts(1, 0, (1, 0, 0))) == Counts(4, 1, (1, 0, 0))


def test_an_uncertain_violation_is_observed_for_longer() -> None:
    # The error rate is 0.67 %.
    new, old = Counts(150, 1), Counts(10_000, 5)
    assert act(new, old) is Action.WAIT
    assert act(new, old, seconds=600) is Action.BACK


@given(requests=st.integers(0, 99), seconds=st.floats(0, 599))
def test_too_few_requests_do_not_advance_the_rollout(requests: int, seconds: float) -> None:
    assert act(Counts(requests), Counts(10_000), seconds=seconds) is Action.WAIT


def test_a_step_with_too_few_requests_rolls_back_after_its_patience() -> None:
    decision = decide(PLAN, observe(Counts(3), Counts(10_000), seconds=600))
    assert decision.action is Action.BACK
    assert "3 of the 100 requests" in decision.reason


def test_a_version_that_stopped_serving_is_rolled_back_at_once() -> None:
    decision = decide(
        PLAN,
        StepObservation(
            0, 1, Counts(), Counts(), new_is_ready=False, new_failure="it was unregistered"
        ),
    )
    assert decision == (
        decision.__class__(Action.BACK, "version 2 no longer serves: it was unregistered")
    )


@pytest.mark.nightly
def test_a_good_version_is_rarely_rolled_back_by_chance() -> None:
    rollbacks = 0
    for seed in range(100):
        source = random.Random(seed)
        new = old = Counts()
        for second in range(1, 61):
            new = new.plus(draw_counts(20, 0.004, source.getrandbits(32)))
            old = old.plus(draw_counts(60, 0.004, source.getrandbits(32)))
            decision = decide(PLAN, observe(new, old, second))
            if decision.action is not Action.WAIT:
                rollbacks += decision.action is Action.BACK
                break
    assert rollbacks <= 10


@given(
    counts=st.lists(
        st.integers(0, 1000), min_size=len(FINE_BOUNDS) + 1, max_size=len(FINE_BOUNDS) + 1
    ).map(tuple),
    seconds=st.floats(0.0001, 100.0),
)
def test_the_count_of_slower_requests_matches_the_quantile(
    counts: tuple[int, ...], seconds: float
) -> None:
    assert 0 <= count_slower(counts, seconds) <= sum(counts)
    median = quantile(counts, 0.5)
    if median is not None:
        assert count_slower(counts, median) == pytest.approx(sum(counts) / 2, abs=1.5)


@given(first_count=st.integers(0, 100), second_count=st.integers(0, 100))
def test_restarted_counters_count_everything_since_their_restart(
    first_count: int, second_count: int
) -> None:
    first_counts, second_counts = (
        Counts(first_count, 0, (first_count, 0)),
        Counts(second_count, 0, (second_count, 0)),
    )
    assert second_counts.since(first_counts).requests == (
        second_count - first_count if second_count >= first_count else second_count
    )


@pytest.mark.parametrize(
    "values",
    [
        {"steps": (5, 1)},
        {"steps": ()},
        {"steps": (0, 5)},
        {"steps": (101,)},
        {"steps": (float("nan"),)},
        {"bake": 0},
        {"max_p99_ms": 1, "max_p99_ratio": 2},
        {"max_p99_ms": float("inf")},
        {"max_p99_ratio": float("inf")},
        {"patience": float("inf")},
    ],
)
def test_an_invalid_plan_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RolloutPlan(version="2", **values)


def test_the_last_step_gets_all_requests() -> None:
    assert RolloutPlan(version="2", steps=(1, 10)).steps == (1, 10, 100)


@pytest.mark.parametrize(("is_asleep", "failure"), [(True, ""), (False, "it has no workers")])
def test_an_unloaded_version_has_not_failed(is_asleep: bool, failure: str) -> None:
    assert _failure(cast(ModelVersion, SimpleNamespace(workers=[], asleep=is_asleep))) == failure
