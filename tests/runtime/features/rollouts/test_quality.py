"""The metric and the guards of a rollout."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tsx_runtime.core.comparison.means import MAX_NEEDED, MetricCounts
from tsx_runtime.features.rollouts.policy import (
    Action,
    Counts,
    RolloutPlan,
    RolloutState,
    StepObservation,
    decide,
)
from tsx_runtime.features.rollouts.quality import MetricComparison, compare_metric

PLAN = RolloutPlan(version="2.0", bake=60, metric="accuracy")
GUARDED = RolloutPlan(version="2.0", bake=60, guards=("drift < 0.2",))
# A step at whose end all bounds on errors and latency are kept.
STEP = StepObservation(0, 60, Counts(1000), Counts(99_000))


def count_hits(hits: int, count: int) -> MetricCounts:
    return MetricCounts(count, hits, hits)


def compare_accuracy(
    new: MetricCounts,
    old: MetricCounts,
    *,
    margin: float | None = None,
    old_grows: bool = True,
) -> MetricComparison:
    return compare_metric("accuracy", margin, ("2.0", new), ("1.0", old), old_grows=old_grows)


def compare_errors(new: MetricCounts, old: MetricCounts) -> MetricComparison:
    return compare_metric("mean_error", None, ("2.0", new), ("1.0", old), old_grows=True)


def test_an_accuracy_within_the_margin_is_kept() -> None:
    comparison = compare_accuracy(count_hits(95_000, 100_000), count_hits(95_100, 100_000))
    assert comparison.verdict == "kept"
    assert comparison.needed is None
    assert comparison.new.low is not None
    assert comparison.new.high is not None
    assert comparison.new.low < 0.95 < comparison.new.high
    assert comparison.difference.value == pytest.approx(-0.001)
    decision = decide(PLAN, replace(STEP, metric=comparison))
    assert decision.action is Action.ADVANCE
    assert decision.reason == (
        "all bounds were kept; accuracy 95.0% of version 2.0 and 95.1% of version 1.0"
    )


def test_a_worse_version_goes_back_at_once() -> None:
    comparison = compare_accuracy(count_hits(900, 1000), count_hits(960, 1000))
    decision = decide(PLAN, replace(STEP, seconds=3, metric=comparison))
    assert decision.action is Action.BACK
    assert decision.reason.startswith("the new version is worse: accuracy 90.0% of version 2.0")


def test_an_unclear_metric_waits_and_names_the_needed_answers() -> None:
    comparison = compare_accuracy(count_hits(475, 500), count_hits(950, 1000))
    assert comparison.verdict == "unclear"
    assert comparison.needed is not None
    step = replace(STEP, metric=comparison)
    decision = decide(PLAN, step)
    assert decision.action is Action.WAIT
    assert "more answers of each version with a known truth decide" in decision.reason
    assert comparison.reason in decide(PLAN, replace(step, seconds=1)).reason
    late = decide(PLAN, replace(step, seconds=600))
    assert late.action is Action.BACK
    assert late.reason.startswith("the time for this step is over: accuracy 95.0%")
    more = 1000 + comparison.needed
    assert (
        compare_accuracy(
            count_hits(round(0.95 * more), more), count_hits(round(0.95 * more), more)
        ).verdict
        == "kept"
    )


def test_without_feedback_a_rollout_waits_for_its_patience() -> None:
    comparison = compare_accuracy(MetricCounts(), count_hits(90, 100))
    assert comparison.new.value is None
    assert comparison.needed == 30
    for step in (
        replace(STEP, metric=comparison),
        replace(STEP, metric=None),
        replace(STEP, quality_problem="model m is not monitored"),
    ):
        assert decide(PLAN, step).action is Action.WAIT
        assert decide(PLAN, replace(step, seconds=600)).action is Action.BACK
    assert "the truth is known of 0 answers of version 2.0" in comparison.reason


def test_in_the_last_step_only_the_new_version_gets_answers() -> None:
    new, old = count_hits(950, 1000), count_hits(38_000, 40_000)
    comparison = compare_accuracy(new, old, old_grows=False)
    assert comparison.needed is not None
    assert comparison.needed < MAX_NEEDED
    assert "more answers of version 2.0 with a known truth" in comparison.reason


@given(
    verdict=st.sampled_from(["kept", "worse", "unclear", None]),
    drift=st.one_of(st.none(), st.floats(0, 1)),
    problem=st.sampled_from(["", "it is not monitored"]),
    seconds=st.floats(0, 1000),
    number=st.integers(0, 3),
)
def test_a_step_ends_only_with_a_kept_metric_and_a_small_drift(
    verdict: Literal["kept", "worse", "unclear"] | None,
    drift: float | None,
    problem: str,
    seconds: float,
    number: int,
) -> None:
    comparison = verdict and compare_accuracy(MetricCounts(), MetricCounts()).model_copy(
        update={"verdict": verdict}
    )
    plan = PLAN.model_copy(update={"guards": ("drift<0.2",)})
    step = replace(
        STEP,
        step=number,
        seconds=seconds,
        metric=comparison or None,
        drift=drift,
        quality_problem=problem,
    )
    action = decide(plan, step).action
    if action in (Action.ADVANCE, Action.FINISH):
        assert (verdict, problem) == ("kept", "")
        assert drift is not None
        assert drift < 0.2
    if not problem and (verdict == "worse" or (drift is not None and drift >= 0.2)):
        assert action is Action.BACK
    elif seconds < 600:
        assert action is not Action.BACK


@given(
    new=st.tuples(st.integers(0, 3000), st.floats(0, 1)),
    old=st.tuples(st.integers(0, 3000), st.floats(0, 1)),
    margin=st.floats(0, 0.2),
    old_grows=st.booleans(),
)
def test_a_comparison_of_any_counts_is_consistent(
    new: tuple[int, float], old: tuple[int, float], margin: float, old_grows: bool
) -> None:
    comparison = compare_accuracy(
        *(count_hits(int(count * rate), count) for count, rate in (new, old)),
        margin=margin,
        old_grows=old_grows,
    )
    assert (comparison.needed is None) is (comparison.verdict != "unclear")
    low, high = comparison.difference.low, comparison.difference.high
    if comparison.verdict == "kept":
        assert low is not None
        assert low >= -margin
    if comparison.verdict == "worse":
        assert high is not None
        assert high < 0
    state = RolloutState(plan=PLAN, old="1.0", before={}, began=0, changed=0, metric=comparison)
    saved: dict[str, Any] = state.model_dump(mode="json")
    assert RolloutState.model_validate(saved).metric == comparison


def test_a_larger_mean_error_is_worse_in_any_unit() -> None:
    for unit in (1e-3, 1, 1e3):
        old = MetricCounts(5000, 5000 * unit, 10_000 * unit**2)
        new = MetricCounts(5000, 6000 * unit, 14_000 * unit**2)
        assert compare_errors(new, old).verdict == "worse"
        assert compare_errors(old, new).verdict == "kept"
        assert compare_errors(old, old).verdict == "unclear"
        assert compare_errors(old, old).margin == pytest.approx(0.05 * unit)


@pytest.mark.slow
@pytest.mark.parametrize(("accuracy", "verdict"), [(0.95, "kept"), (0.92, "worse")])
def test_nearly_all_rollouts_end_rightly_however_often_they_look(
    accuracy: float, verdict: str
) -> None:
    verdicts = []
    for seed in range(20):
        source = random.Random(seed)
        new = old = 0
        for count in range(50, 40_000, 50):
            new += sum(source.random() < accuracy for _ in range(50))
            old += sum(source.random() < 0.95 for _ in range(50))
            comparison = compare_accuracy(
                count_hits(new, count), count_hits(old, count), margin=0.02
            )
            if comparison.verdict != "unclear":
                verdicts.append(comparison.verdict)
                break
    assert sum(result == verdict for result in verdicts) >= 19


def test_a_drift_above_the_guard_goes_back() -> None:
    assert GUARDED.guards == ("drift<0.2",)
    decision = decide(GUARDED, replace(STEP, seconds=1, drift=0.34))
    assert decision.action is Action.BACK
    assert decision.reason == "the drift of version 2.0 is 0.34, not below 0.2"
    assert decide(GUARDED, replace(STEP, drift=0.19)).action is Action.ADVANCE
    assert "no window of version 2.0" in decide(GUARDED, STEP).reason


@pytest.mark.parametrize(
    "values",
    [
        {"metric": "f1"},
        {"margin": 0.01},
        {"metric": "accuracy", "margin": 1},
        {"metric": "accuracy", "steps": (100,)},
        {"guards": ("drift>0.2",)},
        {"guards": ("drift<0",)},
        {"guards": ("drift<nan",)},
        {"guards": "drift<0.2"},
    ],
)
def test_an_invalid_metric_or_guard_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RolloutPlan(version="2", **values)
