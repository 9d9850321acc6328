"""The next action of a rollout, as pure functions of its plan and the counts of its step.

A step sends a fraction of the requests to the new version for a time (`bake`). Then the next step
begins, if both versions have answered enough requests and every bound holds. All requests return to
the old version as soon as a bound is exceeded significantly:

- The new version has more errors than `max_error_rate` (binomial test), or than the old version in
  the same time (Fisher's exact test).
- More than a hundredth of its requests are slower than `max_p99_ms`, or than `max_p99_ratio` times
  the old version's p99 (binomial test).
- Its `metric` is worse (`quality.py`), or a guard is broken, since the rollout began.

A test that is repeated often enough finds a difference by chance. The significance level is
therefore `EARLY_ALPHA` during a step, and `FINAL_ALPHA` only at its end. If a bound is exceeded,
but not significantly, the step continues until the result is clear. After `patience` the rollout
is rolled back.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tsx_runtime.core.comparison.quality import Metric
from tsx_runtime.core.comparison.significance import difference_probability, excess_probability
from tsx_runtime.core.telemetry.histogram import FINE_BOUNDS, quantile
from tsx_runtime.features.rollouts.quality import MetricComparison

Status = Literal["running", "finished", "went back", "stopped"]
EARLY_ALPHA, FINAL_ALPHA = 0.0005, 0.025  # probability that one test gives a false alarm
# With fewer requests, the p99 has no upper limit: two standard deviations of its rank exceed them.
MIN_P99_REQUESTS = 400
MAX_STEPS = 100
SLOW_FRACTION = 0.01  # fraction of requests above the p99


def _check_steps(steps: tuple[float, ...]) -> tuple[float, ...]:
    if len(steps) > MAX_STEPS:
        raise ValueError(f"there are {len(steps)} steps; at most {MAX_STEPS} can be")
    if not steps or any(not 0 < step <= 100 for step in steps) or list(steps) != sorted(set(steps)):
        raise ValueError(
            "steps are percentages that grow, above 0 and at most 100, as in 1,5,25,100"
        )
    return steps if steps[-1] == 100 else (*steps, 100.0)


def _check_guard(guard: str) -> str:
    match = re.fullmatch(r"\s*drift\s*<\s*(\d{1,3}(?:\.\d{1,6})?)\s*", guard, re.ASCII)
    if match is None or not float(match[1]):
        raise ValueError(f"{guard!r} is not a guard such as drift<0.2")
    return f"drift<{match[1]}"


class RolloutPlan(BaseModel):
    """The parameters of a rollout."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str = Field(description="the new version")
    steps: Annotated[tuple[float, ...], AfterValidator(_check_steps)] = Field(
        (1.0, 5.0, 25.0, 100.0), description="its share, in percent"
    )
    bake: float = Field(600.0, gt=0, le=30 * 86400, description="seconds of each step")
    max_error_rate: float | None = Field(
        None, ge=0, lt=1, description="share of its requests that may fail, from 0 to 1"
    )
    max_p99_ratio: float | None = Field(
        None,
        ge=1,
        allow_inf_nan=False,
        description="maximum p99 as a multiple of the old version's p99",
    )
    max_p99_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="maximum p99, in milliseconds"
    )
    min_requests: int = Field(
        100, ge=1, description="minimum number of requests of the new version in a step"
    )
    patience: float = Field(
        10.0,
        ge=1,
        allow_inf_nan=False,
        description=(
            "maximum time of a step, as a multiple of `bake`, before the rollout is rolled back"
        ),
    )

    metric: Metric | None = Field(
        None, description="quality by reported truth in which the new version may not be worse"
    )
    margin: float | None = Field(
        None,
        ge=0,
        lt=1,
        description=(
            "how much worse its metric may be: for accuracy, a share of the answers (0.01 without"
            " it); for mean_error, a part of the old version's (0.05 without it)"
        ),
    )
    guards: tuple[Annotated[str, AfterValidator(_check_guard)], ...] = Field(
        (),
        max_length=10,
        description=(
            "further bounds, such as drift<0.2 for the largest population stability index of a"
            " field in its last window"
        ),
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> RolloutPlan:
        if self.max_p99_ratio is not None and self.max_p99_ms is not None:
            raise ValueError("give max_p99_ratio or max_p99_ms, not both")
        if self.margin is not None and self.metric is None:
            raise ValueError("margin belongs to a metric: accuracy or mean_error")
        if self.metric is not None and self.steps[0] == 100:
            raise ValueError(
                "a metric needs a first step below 100, in which the old version answers too"
            )
        return self

    @property
    def max_drift(self) -> float | None:
        return min((float(guard.partition("<")[2]) for guard in self.guards), default=None)


class Action(str, enum.Enum):
    WAIT = "wait"
    ADVANCE = "advance"
    FINISH = "finish"
    BACK = "back"


@dataclass(frozen=True)
class Counts:
    """The counts of one version's answers."""

    requests: int = 0
    errors: int = 0
    latencies: tuple[int, ...] = ()  # buckets of `Durations.counts`

    def plus(self, increase: Counts) -> Counts:
        if len(self.latencies) == len(increase.latencies):
            latencies = tuple(
                a + b for a, b in zip(self.latencies, increase.latencies, strict=True)
            )
        else:  # One is empty, or another release of tsx has counted in other buckets.
            latencies = increase.latencies or self.latencies
        return Counts(self.requests + increase.requests, self.errors + increase.errors, latencies)

    def since(self, earlier: Counts) -> Counts:
        """Return the counts since an earlier reading, or all of them if the counters were reset."""
        if (
            self.requests < earlier.requests
            or self.errors < earlier.errors
            or len(self.latencies) != len(earlier.latencies)
        ):
            return self
        if any(
            count < earlier_count
            for count, earlier_count in zip(self.latencies, earlier.latencies, strict=True)
        ):
            return self
        latencies = tuple(
            count - earlier_count
            for count, earlier_count in zip(self.latencies, earlier.latencies, strict=True)
        )
        return Counts(self.requests - earlier.requests, self.errors - earlier.errors, latencies)

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class StepObservation:
    """The inputs of a decision."""

    step: int  # number of the step, from 0
    seconds: float  # duration of the step so far
    new: Counts
    old: Counts
    new_is_ready: bool = True  # whether a worker of the new version is ready
    new_failure: str = ""  # why no worker of the new version will be ready again
    quality_problem: str = ""  # why the quality of the versions is not known
    metric: MetricComparison | None = None
    drift: float | None = None  # drift of the new version in its last window since the start


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str


@dataclass(frozen=True)
class _BoundTest:
    """The test of one bound; `chance` is the probability of the counts if the bound holds."""

    chance: float
    exceeded: bool
    text: str


def decide(plan: RolloutPlan, step: StepObservation) -> Decision:
    if step.new_failure:
        return Decision(Action.BACK, f"version {plan.version} no longer serves: {step.new_failure}")
    tests = [*_test_errors(plan, step), *_test_latency(plan, step)]
    is_over = step.seconds >= plan.bake
    violation, missing_quality = _test_quality(plan, step)
    if violation:
        return Decision(Action.BACK, violation)
    significance_level = FINAL_ALPHA if is_over else EARLY_ALPHA
    has_enough = step.new.requests >= plan.min_requests
    violations = [test for test in tests if test.chance < significance_level]
    if violations and (has_enough or any(test.chance < EARLY_ALPHA for test in violations)):
        return Decision(Action.BACK, "; ".join(test.text for test in violations))
    is_late = step.seconds >= plan.bake * plan.patience
    if not step.new_is_ready:
        return _wait_or_roll_back(is_late, f"no worker of version {plan.version} is ready")
    if not is_over:
        reason = f"{plan.bake - step.seconds:.0f} s of this step are left"
        return Decision(Action.WAIT, "; ".join(filter(None, (reason, missing_quality))))
    if not has_enough:
        return _wait_or_roll_back(
            is_late,
            f"version {plan.version} answered {step.new.requests} of the {plan.min_requests}"
            " requests that a step needs",
        )
    if missing_comparison := _missing_comparison(plan, step):
        return _wait_or_roll_back(is_late, missing_comparison)
    exceeded = [test.text for test in tests if test.exceeded]
    if exceeded:
        return _wait_or_roll_back(
            is_late, f"not yet statistically significant: {'; '.join(exceeded)}"
        )
    if missing_quality:
        return _wait_or_roll_back(is_late, missing_quality)
    is_last_step = step.step == len(plan.steps) - 1
    reason = (
        f"all bounds were kept; {step.metric.reason}" if step.metric else "all bounds were kept"
    )
    return Decision(Action.FINISH if is_last_step else Action.ADVANCE, reason)


def _test_quality(plan: RolloutPlan, step: StepObservation) -> tuple[str, str]:
    """Return which bound of the quality is broken, and what is not known yet, or empty texts."""
    if step.quality_problem:
        return "", step.quality_problem
    violations, missing = [], []
    if plan.metric is not None:
        if step.metric is None:
            missing.append("the truth of the answers has not been read yet")
        elif step.metric.verdict == "worse":
            violations.append(f"the new version is worse: {step.metric.reason}")
        elif step.metric.verdict == "unclear":
            missing.append(step.metric.reason)
    if plan.max_drift is not None:
        if step.drift is None:
            missing.append(f"no window of version {plan.version} has been compared yet")
        elif step.drift >= plan.max_drift:
            violations.append(
                f"the drift of version {plan.version} is {step.drift:.3g}, not below"
                f" {plan.max_drift:g}"
            )
    return "; ".join(violations), "; ".join(missing)


def _wait_or_roll_back(is_late: bool, reason: str) -> Decision:
    return (
        Decision(Action.BACK, f"the time for this step is over: {reason}")
        if is_late
        else Decision(Action.WAIT, reason)
    )


def _missing_comparison(plan: RolloutPlan, step: StepObservation) -> str:
    """Return why a bound cannot be tested yet, or an empty string."""
    min_requests = 0 if plan.max_error_rate is not None else plan.min_requests
    if step.old.requests >= (
        min_requests if plan.max_p99_ratio is None else max(min_requests, MIN_P99_REQUESTS)
    ):
        return ""
    problem = f"the old version answered {step.old.requests} requests, too few for a comparison"
    return (
        f"{problem}; to roll out without a comparison, set max_error_rate, and max_p99_ms instead"
        " of a ratio"
    )


def _test_errors(plan: RolloutPlan, step: StepObservation) -> list[_BoundTest]:
    new, old, tests = step.new, step.old, []
    rate = (
        f"{new.errors} of {new.requests} requests of version {plan.version} failed"
        f" ({new.error_rate:.2%})"
    )
    if plan.max_error_rate is not None:
        chance = excess_probability(new.errors, new.requests, plan.max_error_rate)
        tests.append(
            _BoundTest(
                chance,
                new.error_rate > plan.max_error_rate,
                f"{rate}, more than {plan.max_error_rate:.2%} (p = {chance:.2g})",
            )
        )
    if old.requests >= plan.min_requests:
        chance = difference_probability(new.errors, new.requests, old.errors, old.requests)
        tests.append(
            _BoundTest(
                chance,
                False,
                f"{rate}, more than of the old version ({old.error_rate:.2%}, p = {chance:.2g})",
            )
        )
    return tests


def _test_latency(plan: RolloutPlan, step: StepObservation) -> list[_BoundTest]:
    if plan.max_p99_ms is not None:
        bound, bound_text = plan.max_p99_ms / 1000, f"{plan.max_p99_ms:g} ms"
    elif plan.max_p99_ratio is not None and step.old.requests >= plan.min_requests:
        old_p99 = _upper_p99(step.old.latencies)
        if old_p99 is None:
            return []
        bound, bound_text = (
            old_p99 * plan.max_p99_ratio,
            f"{plan.max_p99_ratio:g} times the old version's p99 of {1000 * old_p99:.1f} ms",
        )
    else:
        return []
    count = sum(step.new.latencies)
    slow_count = count_slower(step.new.latencies, bound)
    chance = excess_probability(slow_count, count, SLOW_FRACTION)
    text = (
        f"{slow_count} of {count} requests of version {plan.version} took longer than {bound_text}"
        f" (p = {chance:.2g})"
    )
    return [_BoundTest(chance, slow_count > count * SLOW_FRACTION, text)]


def _upper_p99(latencies: Sequence[int]) -> float | None:
    """Return an upper limit of the p99, which a sample only estimates; None if it is small."""
    count = sum(latencies)
    return (
        quantile(latencies, 0.99 + 2 * math.sqrt(0.99 * SLOW_FRACTION / count))
        if count >= MIN_P99_REQUESTS
        else None
    )


def count_slower(latencies: Sequence[int], seconds: float) -> int:
    """Return how many requests took longer, interpolated within a bucket and rounded down."""
    total, lower = 0.0, 0.0
    for number, upper in zip(latencies, FINE_BOUNDS, strict=False):
        if seconds <= lower:
            total += number
        elif seconds < upper:
            total += number * (upper - seconds) / (upper - lower)
        lower = upper
    return int(total + sum(latencies[len(FINE_BOUNDS) :]))


class RolloutState(BaseModel):
    model_config = ConfigDict(extra="forbid")

    plan: RolloutPlan
    old: str  # the version whose requests go to the new one
    default: str = ""  # the default version before the rollout
    before: dict[str, Any]  # the traffic before the rollout, for a rollback
    began: float  # time.time() of the start
    changed: float  # time.time() of the last step, or of the end
    status: Status = "running"
    step: int = 0
    seconds: float = 0.0  # duration of this step while the server ran
    new: Counts = Counts()  # the new version's counts in this step
    old_now: Counts = Counts()  # the old version's counts in this step
    # The old version's counts in the last step in which it had requests.
    old_last: Counts = Counts()
    reason: str = ""  # reason of the last decision
    quality_since: float | None = None  # time at which the new version was replaced
    metric: MetricComparison | None = None  # the comparison of the last decision

    @property
    def share(self) -> float:
        """The new version's percentage of the requests in this step."""
        return self.plan.steps[self.step]

    def weights(self, step: int) -> dict[str, float]:
        share = self.plan.steps[step]
        return {self.old: 100.0 - share, self.plan.version: share}

    @property
    def weights_after_a_restart(self) -> list[dict[str, float]]:
        """The weights that a restarted server may find.

        A killed server may have saved the weights of a step, but not yet the start of that step.
        """
        return [
            self.weights(step) for step in (self.step, self.step + 1) if step < len(self.plan.steps)
        ]
