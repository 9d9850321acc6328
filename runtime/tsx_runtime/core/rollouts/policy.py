"""Decides the next action of a rollout: pure functions of its plan and the counts of its step.

A step sends a share of the requests to the new version for a time (`bake`). At the end of it the
next step begins, where both versions answered enough requests and every bound holds. As soon as a
bound is broken beyond chance, all requests go back to the old version:

- more errors than `max_error_rate` allows (binomial test), or than the old version has meanwhile
  (Fisher's exact test);
- more requests slower than `max_p99` times the old version's p99, or than so many milliseconds,
  than the hundredth that a p99 stands for (binomial test).

Looking again and again finds chance differences in the end, so before the end of a step nothing
less than `EARLY` counts; at its end `FINAL` does. Where a bound is exceeded, but by no more than
chance, the step goes on until the answer is clear or `patience` is over; then the rollout goes
back.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tsx_runtime.core.rollouts.significance import above, worse
from tsx_runtime.core.telemetry.histogram import FINE_BOUNDS, quantile

Status = Literal["running", "finished", "went back", "stopped"]
EARLY, FINAL = 0.0005, 0.025  # chance of a false alarm at one look
# requests from which on a sample has an upper limit for its p99 (two standard deviations of the
# rank)
FOR_P99 = 400
MOST_STEPS = 100
SLOW_SHARE = 0.01  # of requests are slower than the p99, by its name


def _steps(steps: tuple[float, ...]) -> tuple[float, ...]:
    if len(steps) > MOST_STEPS:
        raise ValueError(f"there are {len(steps)} steps; at most {MOST_STEPS} can be")
    if not steps or any(not 0 < step <= 100 for step in steps) or list(steps) != sorted(set(steps)):
        raise ValueError(
            "steps are percentages that grow, above 0 and at most 100, as in 1,5,25,100"
        )
    return steps if steps[-1] == 100 else (*steps, 100.0)


class RolloutPlan(BaseModel):
    """The parameters of a rollout."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str = Field(description="the new version")
    steps: Annotated[tuple[float, ...], AfterValidator(_steps)] = Field(
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

    @model_validator(mode="after")
    def _one_bound_of_time(self) -> RolloutPlan:
        if self.max_p99_ratio is not None and self.max_p99_ms is not None:
            raise ValueError("give max_p99_ratio or max_p99_ms, not both")
        return self


class Action(str, enum.Enum):
    WAIT = "wait"
    ADVANCE = "advance"
    FINISH = "finish"
    BACK = "back"


@dataclass(frozen=True)
class Counts:
    """The counted answers of one version."""

    requests: int = 0
    errors: int = 0
    latencies: tuple[int, ...] = ()  # as `Durations.counts` has them

    def plus(self, other: Counts) -> Counts:
        if len(self.latencies) == len(other.latencies):
            latencies = tuple(a + b for a, b in zip(self.latencies, other.latencies, strict=True))
        else:  # one has none; or another tsx counted them, in other buckets
            latencies = other.latencies or self.latencies
        return Counts(self.requests + other.requests, self.errors + other.errors, latencies)

    def since(self, before: Counts) -> Counts:
        """The difference of two readings; where the counters were reset in between, all that the
        later one has.
        """
        if (
            self.requests < before.requests
            or self.errors < before.errors
            or len(self.latencies) != len(before.latencies)
        ):
            return self
        if any(now < then for now, then in zip(self.latencies, before.latencies, strict=True)):
            return self
        latencies = tuple(
            now - then for now, then in zip(self.latencies, before.latencies, strict=True)
        )
        return Counts(self.requests - before.requests, self.errors - before.errors, latencies)

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class StepObservation:
    """The inputs of a decision."""

    step: int  # from 0
    seconds: float  # at this step
    new: Counts
    old: Counts
    new_serves: bool = True  # a worker of it is ready
    new_failed: str = ""  # why no worker of it will ever be, if so


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str


@dataclass(frozen=True)
class _Finding:
    """One bound: how likely what was seen is where the bound holds, and whether it is exceeded at
    all.
    """

    chance: float
    exceeded: bool
    text: str


def decide(plan: RolloutPlan, seen: StepObservation) -> Decision:
    if seen.new_failed:
        return Decision(Action.BACK, f"version {plan.version} no longer serves: {seen.new_failed}")
    findings = [*_errors(plan, seen), *_slowness(plan, seen)]
    over = seen.seconds >= plan.bake
    limit = FINAL if over else EARLY
    enough = seen.new.requests >= plan.min_requests
    broken = [finding for finding in findings if finding.chance < limit]
    if broken and (enough or any(finding.chance < EARLY for finding in broken)):
        return Decision(Action.BACK, "; ".join(finding.text for finding in broken))
    late = seen.seconds >= plan.bake * plan.patience
    if not seen.new_serves:
        return _wait_or_back(late, f"no worker of version {plan.version} is ready")
    if not over:
        return Decision(Action.WAIT, f"{plan.bake - seen.seconds:.0f} s of this step are left")
    if not enough:
        return _wait_or_back(
            late,
            f"version {plan.version} answered {seen.new.requests} of the {plan.min_requests}"
            " requests that a step needs",
        )
    if not_compared := _not_compared(plan, seen):
        return _wait_or_back(late, not_compared)
    exceeded = [finding.text for finding in findings if finding.exceeded]
    if exceeded:
        return _wait_or_back(late, f"not yet statistically significant: {'; '.join(exceeded)}")
    last = seen.step == len(plan.steps) - 1
    return Decision(Action.FINISH if last else Action.ADVANCE, "all bounds were kept")


def _wait_or_back(late: bool, why: str) -> Decision:
    return (
        Decision(Action.BACK, f"the time for this step is over: {why}")
        if late
        else Decision(Action.WAIT, why)
    )


def _not_compared(plan: RolloutPlan, seen: StepObservation) -> str:
    """What keeps a bound from being tried, if anything does: a version of which nothing is known
    has kept none.
    """
    needed = 0 if plan.max_error_rate is not None else plan.min_requests
    if seen.old.requests >= (needed if plan.max_p99_ratio is None else max(needed, FOR_P99)):
        return ""
    few = f"the old version answered {seen.old.requests} requests, too few for a comparison"
    return (
        f"{few}; to roll out without a comparison, set max_error_rate, and max_p99_ms instead of a"
        " ratio"
    )


def _errors(plan: RolloutPlan, seen: StepObservation) -> list[_Finding]:
    new, old, findings = seen.new, seen.old, []
    rate = (
        f"{new.errors} of {new.requests} requests of version {plan.version} failed"
        f" ({new.error_rate:.2%})"
    )
    if plan.max_error_rate is not None:
        chance = above(new.errors, new.requests, plan.max_error_rate)
        findings.append(
            _Finding(
                chance,
                new.error_rate > plan.max_error_rate,
                f"{rate}, more than {plan.max_error_rate:.2%} (p = {chance:.2g})",
            )
        )
    if old.requests >= plan.min_requests:
        chance = worse(new.errors, new.requests, old.errors, old.requests)
        findings.append(
            _Finding(
                chance,
                False,
                f"{rate}, more than of the old version ({old.error_rate:.2%}, p = {chance:.2g})",
            )
        )
    return findings


def _slowness(plan: RolloutPlan, seen: StepObservation) -> list[_Finding]:
    if plan.max_p99_ms is not None:
        bound, named = plan.max_p99_ms / 1000, f"{plan.max_p99_ms:g} ms"
    elif plan.max_p99_ratio is not None and seen.old.requests >= plan.min_requests:
        old = _most_p99(seen.old.latencies)
        if old is None:
            return []
        bound, named = (
            old * plan.max_p99_ratio,
            f"{plan.max_p99_ratio:g} times the old version's p99 of {1000 * old:.1f} ms",
        )
    else:
        return []
    count = sum(seen.new.latencies)
    slow = slower(seen.new.latencies, bound)
    chance = above(slow, count, SLOW_SHARE)
    text = (
        f"{slow} of {count} requests of version {plan.version} took longer than {named} (p ="
        f" {chance:.2g})"
    )
    return [_Finding(chance, slow > count * SLOW_SHARE, text)]


def _most_p99(latencies: Sequence[int]) -> float | None:
    """The old version's p99 is itself seen through a sample: so high it may be."""
    count = sum(latencies)
    return (
        quantile(latencies, 0.99 + 2 * math.sqrt(0.99 * SLOW_SHARE / count))
        if count >= FOR_P99
        else None
    )


def slower(latencies: Sequence[int], seconds: float) -> int:
    """How many requests took longer, in a straight line within a bucket, rounded down, in favour of
    the version.
    """
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
    old: str  # the version that had the requests before
    default: str = ""  # the default version before
    before: dict[str, Any]  # the traffic that holds again when it goes back
    began: float  # time.time()
    changed: float  # time.time() of the last step, or of the end
    status: Status = "running"
    step: int = 0
    seconds: float = 0.0  # at this step, while the server ran
    new: Counts = Counts()  # at this step
    old_now: Counts = Counts()  # at this step
    old_last: Counts = (
        Counts()
    )  # at the step before, for the one at which the old version has no requests
    reason: str = ""  # of the last decision

    @property
    def share(self) -> float:
        """Percent."""
        return self.plan.steps[self.step]

    def weights(self, step: int) -> dict[str, float]:
        share = self.plan.steps[step]
        return {self.old: 100.0 - share, self.plan.version: share}

    @property
    def weights_after_a_restart(self) -> list[dict[str, float]]:
        """Those that are its own: a server that was killed may have kept the weights of a step, and
        not yet that it had begun.
        """
        return [
            self.weights(step) for step in (self.step, self.step + 1) if step < len(self.plan.steps)
        ]
