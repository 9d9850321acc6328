"""Chooses the next configuration and load to measure: a pure function of the measurements so far.

Every configuration is predicted from the curve of one worker. The five with the best predictions
are measured once, then more loads of those that may win, up and down a ladder. Then come the next
five, until the time is over or no prediction that is left comes near the best.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, Literal, NamedTuple

from tsx_archiver.metadata.forms import REFERENCE
from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load.configuration import Configuration, Variant
from tsx_cli.bench.load.results import (
    OUT_OF_TIME,
    OUTDONE,
    Curve,
    OfferedLoad,
    Point,
    Prediction,
    Trial,
)
from tsx_cli.bench.search.ladder import Rung, next_level
from tsx_cli.bench.search.machine import worth
from tsx_cli.bench.search.points import confirmed_best
from tsx_cli.bench.search.predict import (
    OVERHEAD_MS,
    best_connections,
    best_rate,
    latency_of,
    predict,
    undisturbed,
)

FIRST = 5  # configurations that are measured together, the best predictions first
# of the logarithm of throughput: predictions that differ by less count as equal
ALIKE = 0.05
MARGIN = 1.35  # times a prediction: the most that a configuration is thought to do
# times a predicted latency, to choose a load by: one that breaks the bounds tells little
CAUTION = 1.2
HOPE = 0.57  # times a predicted latency: the least that is thought possible
# of predictions: measurements that are further off tell of a curve that was disturbed
LEAST_CORRECTION, MOST_CORRECTION = 0.25, 2.0
GAIN = 1.01  # a configuration that cannot exceed the best by this factor is not measured
CLEARLY = 1.1  # times the bound: less may be noise
MAX_CONNECTIONS = 1024


class Forecast(NamedTuple):
    """The expected throughput of a configuration at its best load, and its maximum."""

    configuration: Configuration
    level: float  # connections or rate
    predicted: Prediction | None  # as the curve says
    expected: float  # requests per second within the bounds
    most: float


@dataclass(frozen=True)
class State:
    """Everything that the next step depends on.

    `trials` are in the order of their start; their points in any order.
    """

    configurations: Sequence[Configuration]
    curves: Sequence[Curve] = ()
    trials: Sequence[Trial] = ()
    slo: Slo | None = None
    mode: Literal["closed", "open"] = "closed"
    arrivals: Literal["constant", "poisson", "recorded"] = "poisson"  # of an open loop
    # connections or rates: only these are measured, where some are given
    loads: Sequence[float] = ()
    cores: int = 1
    threads: int | None = None  # that the archive itself gives each worker
    overhead_ms: float = OVERHEAD_MS
    # variants that may not win, and why
    excluded: Mapping[Variant, str] = field(default_factory=dict)
    exhaustive: bool = False
    seconds_left: float | None = None
    seconds_reserved: float = 0.0  # of these, for the end of the run
    seconds_per_point: float = 0.0
    seconds_to_start: float = 0.0  # a server
    running: Configuration | None = None  # the one whose server runs
    max_connections: int = MAX_CONNECTIONS

    @cached_property
    def tried(self) -> set[Configuration]:
        """The configurations that were begun; not those that an earlier run only predicted."""
        return {trial.as_configuration() for trial in self.trials if trial.state != "predicted"}

    @cached_property
    def best(self) -> float:
        """The highest throughput within the bounds so far."""
        order = ranking(self.trials, self.excluded)
        point = chosen(self.trials[order[0]]) if order else None
        return 0.0 if point is None else worth(point)

    @cached_property
    def corrections(self) -> tuple[float, float]:
        """Measured throughput divided by predicted throughput: the median of all points, and of the
        undisturbed ones, as others tell little of what is possible.
        """
        ratios = [
            (
                worth(point) / prediction.throughput,
                any(each.disturbed for each in point.counted),
            )
            for trial in self.trials
            for point in trial.points
            if (prediction := predict_load(self, trial.as_configuration(), point.offered))
            is not None
            and worth(point) > 0
        ]
        sound = [ratio for ratio, disturbed in ratios if not disturbed]
        middle, undisturbed_middle = (
            min(max(median(each or [1.0]), LEAST_CORRECTION), MOST_CORRECTION)
            for each in ([ratio for ratio, _ in ratios], sound)
        )
        return middle, undisturbed_middle

    @cached_property
    def sound_curves(self) -> dict[tuple[Variant, int], Curve | None]:
        """Curves that were looked up, by variant and threads."""
        return {}


class Candidate(NamedTuple):
    """A configuration and a load. The server can continue while the configuration stays the
    same.
    """

    configuration: Configuration
    offered: OfferedLoad
    predicted: Prediction | None  # at that load


def baseline(configurations: Sequence[Configuration]) -> Configuration:
    """Return what all else is compared with: the first, or the reference if that is a form, with
    one worker and one request at a time.
    """
    first = configurations[0]
    return replace(first, workers=1, batch_size=1, form=first.form and REFERENCE)


def next_trial(state: State) -> Candidate | None:
    """Return what to measure next; None when the search is over, or its time.

    No time is kept for the end of the run until the first five were measured once.
    """
    first = baseline(state.configurations)
    if first not in state.tried:
        one = forecast(state, first)
        level = 1.0 if state.mode == "closed" else one.level
        candidate = _candidate(state, first, state.loads[0] if state.loads else level)
        return candidate if _fits(state, candidate, 0.0) else None
    ordered = [one for one in _ordered(state) if one.configuration != first]
    by_throughput = sorted(state.trials, key=_highest, reverse=True)
    climbs = (climb for trial in by_throughput if (climb := _climb(state, trial)) is not None)
    higher = next((each for each in climbs if _fits(state, each, state.seconds_reserved)), None)
    size = 1 if state.exhaustive else FIRST
    for start in range(0, len(ordered) or 1, size):
        for one in ordered[start : start + size]:
            if one.configuration not in state.tried and _may_win(state, one):
                level = state.loads[0] if state.loads else one.level
                candidate = _candidate(state, one.configuration, level)
                if _fits(state, candidate, state.seconds_reserved if start else 0.0):
                    return candidate
        if higher is not None:
            return higher
    return None


def _fits(state: State, candidate: Candidate, reserved: float) -> bool:
    """Check that the time suffices for it, and for its server to start."""
    start = 0.0 if candidate.configuration == state.running else state.seconds_to_start
    return (
        state.seconds_left is None
        or state.seconds_left - reserved >= start + state.seconds_per_point
    )


def _ordered(state: State) -> list[Forecast]:
    """Return the predictions, the best first; of equal ones the fewest workers and the smallest
    batch. What asks for more than half of what failed comes last.
    """
    forecasts = [forecast(state, each) for each in state.configurations]
    most = max(each.expected for each in forecasts)
    failed = [trial.as_configuration() for trial in state.trials if trial.state == "failed"]
    limit = min((each.workers * each.batch_size for each in failed), default=math.inf) / 2

    def promise(one: Forecast) -> tuple[float, ...]:
        workers, batch_size = one.configuration.workers, one.configuration.batch_size
        less = math.log(most / one.expected) // ALIKE if one.expected > 0 else math.inf
        return workers * batch_size > limit, less, workers, batch_size

    return sorted(forecasts, key=promise)


def _may_win(state: State, one: Forecast) -> bool:
    could = state.exhaustive or one.most > state.best * GAIN
    return could and ruled_out(state, one.configuration) is None


def _highest(trial: Trial) -> float:
    return max((worth(point) for point in trial.points), default=0.0)


def forecast(state: State, configuration: Configuration) -> Forecast:
    """Predict what the curve of its worker says, and correct the maximum by what was measured."""
    curve = curve_of(state, configuration)
    if curve is None:
        # as many connections as its workers can have in hand, or a rate that something else held
        hands = configuration.workers * configuration.batch_size + 1
        level = float(min(state.max_connections, hands))
        level = (state.best or 10.0) if state.mode == "open" else level
        return Forecast(configuration, level, None, 0.0, math.inf)
    level, prediction = _best_load(state, curve, configuration, CAUTION)
    _, hopeful = _best_load(state, curve, configuration, HOPE)
    usual, possible = state.corrections
    expected = usual * prediction.throughput if _holds(state, prediction, 1.0) else 0.0
    most = possible * hopeful.throughput if _holds(state, hopeful, HOPE) else 0.0
    return Forecast(configuration, level, prediction, expected, MARGIN * most)


def _holds(state: State, prediction: Prediction, times: float) -> bool:
    """Check the bounds for so many times the predicted latency."""
    return (
        state.slo is None
        or bool(state.loads)
        or state.slo.slack(latency_of(prediction, times)) <= 1
    )


def _best_load(
    state: State, curve: Curve, configuration: Configuration, times: float
) -> tuple[float, Prediction]:
    """Return the load with the most predicted throughput whose latency, `times` the predicted one,
    holds the bounds.
    """
    if state.loads:
        predictions = [
            (
                load,
                predict(
                    curve, configuration, offered_load(state, load), state.overhead_ms, state.cores
                ),
            )
            for load in state.loads
        ]
        return max(predictions, key=lambda each: each[1].throughput)
    given = curve, configuration, state.slo, state.overhead_ms, state.cores, times
    if state.mode == "open":
        return best_rate(*given)
    return best_connections(*given, state.max_connections)


def ruled_out(state: State, configuration: Configuration) -> str | None:
    """Return why this cannot be measured or may not win, whatever it is predicted to do; None if
    nothing speaks against it.
    """
    if configuration.variant in state.excluded:
        return state.excluded[configuration.variant]
    if state.exhaustive:
        return None
    curve = curve_of(state, configuration)
    if (
        curve is not None
        and curve.failed
        and configuration.batch_size > max(point.batch_size for point in curve.points)
    ):
        return f"a batch of that size did not run by itself: {curve.failed}"
    for trial in state.trials:
        other = trial.as_configuration()
        smaller = (
            other.workers <= configuration.workers and other.batch_size <= configuration.batch_size
        )
        if trial.state == "failed" and other.variant == configuration.variant and smaller:
            return f"{other} failed, which asks for less: {trial.reason}"
    if _too_slow_alone(state, configuration):
        return (
            "one request at a time breaks a bound, and no number of workers or batch size makes"
            " that faster"
        )
    return None


def _too_slow_alone(state: State, configuration: Configuration) -> bool:
    """Check whether a single connection broke a bound with a worker like its: clearly, or twice,
    undisturbed.
    """
    slacks = [
        _rung(state, point).slack
        for trial in state.trials
        if kind_of(state, trial.as_configuration()) == kind_of(state, configuration)
        for point in trial.points
        if not any(each.disturbed for each in point.counted)
        and (point.offered.mode, point.offered.connections) == ("closed", 1)
    ]
    return any(slack > CLEARLY for slack in slacks) or sum(slack > 1 for slack in slacks) > 1


def passed_over(state: State) -> list[tuple[Configuration, Prediction | None, str]]:
    """Return what was not measured once the search is over, what it was predicted to do, and why
    that was enough.
    """
    passed = []
    for configuration in state.configurations:
        if configuration in state.tried:
            continue
        one = forecast(state, configuration)
        why = ruled_out(state, configuration)
        if why is None:
            less = f"{one.most:.0f} requests/s at most, {OUTDONE}"
            why = OUT_OF_TIME if one.most > state.best * GAIN else less
        passed.append((configuration, one.predicted, why))
    return passed


def faster_unmeasured(state: State) -> int:
    """Count the unmeasured configurations that are faster than all measured ones, unless their
    predictions err by more than is usual: with any, none is the best.

    Without a curve nothing is expected of them; then more than the baseline must have been
    measured.
    """
    left = [
        forecast(state, each)
        for each in state.configurations
        if each not in state.tried and ruled_out(state, each) is None
    ]
    alone = len(state.tried) < 2
    return sum(
        one.expected > MARGIN * state.best or (alone and one.predicted is None) for one in left
    )


def _climb(state: State, trial: Trial) -> Candidate | None:
    """Return the next load of a configuration that is being measured; None once what it can do is
    known, or known not to win.
    """
    configuration = trial.as_configuration()
    one = forecast(state, configuration)
    leads = state.exhaustive or state.loads or _highest(trial) >= state.best
    if trial.state != "measured" or not (leads or one.most > state.best * GAIN):
        return None
    # an earlier run has confirmed its best by loads of the other mode
    points = [point for point in trial.points if point.offered.mode == state.mode]
    if state.loads:
        measured = {_level(point.offered) for point in points}
        level = next((load for load in state.loads if load not in measured), None)
    else:
        rungs = [_rung(state, point) for point in points]
        level = next_level(
            rungs,
            start=1.0 if rungs else one.level,
            whole=state.mode == "closed",
            most=state.max_connections if state.mode == "closed" else math.inf,
            beat=0.0 if state.exhaustive else state.best,
        )
    if level is not None:
        return _candidate(state, configuration, level)
    best = chosen(trial) if state.exhaustive and not state.loads else None
    if best is None or len(best.counted) > 1:
        return None
    return _candidate(state, configuration, _level(best.offered))


def _rung(state: State, point: Point) -> Rung:
    slack = 0.0 if state.slo is None else state.slo.slack(point.latency.model_dump())
    return Rung(_level(point.offered), worth(point), point.holds, slack)


def _level(offered: OfferedLoad) -> float:
    return float(offered.connections) if offered.mode == "closed" else offered.rate or 0.0


def offered_load(state: State, level: float) -> OfferedLoad:
    if state.mode == "closed":
        return OfferedLoad(connections=max(1, round(level)))
    return OfferedLoad(mode="open", rate=level, arrivals=state.arrivals)


def _candidate(state: State, configuration: Configuration, level: float) -> Candidate:
    offered = offered_load(state, level)
    return Candidate(configuration, offered, predict_load(state, configuration, offered))


def predict_load(
    state: State, configuration: Configuration, offered: OfferedLoad
) -> Prediction | None:
    """Predict one load; None without a curve."""
    curve = curve_of(state, configuration)
    if curve is None:
        return None
    return predict(curve, configuration, offered, state.overhead_ms, state.cores)


def chosen(trial: Trial) -> Point | None:
    best = confirmed_best(trial.points)
    return None if best is None or trial.state != "measured" else trial.points[best]


def ranking(trials: Sequence[Trial], excluded: Mapping[Variant, str] | None = None) -> list[int]:
    """Return the positions of the trials that may win, the best first.

    Of two that do the same, that with fewer workers and smaller batches.
    """
    may = []
    for position, trial in enumerate(trials):
        point = chosen(trial)
        wrong = trial.accuracy is not None and not trial.accuracy.allowed and excluded is not None
        if (
            point is not None
            and not wrong
            and trial.as_configuration().variant not in (excluded or {})
        ):
            may.append(
                (
                    -worth(point),
                    trial.as_configuration().workers,
                    trial.as_configuration().batch_size,
                    position,
                )
            )
    return [position for *_, position in sorted(may)]


def curve_of(state: State, configuration: Configuration) -> Curve | None:
    """Return the curve of a worker with as many threads as its have, or with the next number of
    them that was timed.
    """
    threads = configuration.threads_per_worker(state.cores, state.threads)
    key = configuration.variant, threads
    if key not in state.sound_curves:

        def off(curve: Curve) -> tuple[float, bool]:
            # a worker by itself is given all cores
            alone = curve.threads or state.threads or state.cores
            return abs(math.log2(alone / threads)), curve.threads != configuration.threads

        kind = configuration.variant.kind
        like = [curve for curve in state.curves if curve.points and curve.variant.kind == kind]
        found = min(like, key=off, default=None)
        state.sound_curves[key] = None if found is None else undisturbed(found)
    return state.sound_curves[key]


def by_use(configurations: Sequence[Configuration], state: State) -> list[Variant]:
    """Return the variants, first those whose curves tell of most configurations: there may not be
    the time for all of them.
    """
    uses = Counter(kind_of(state, each) for each in configurations)
    alone = {each.variant: kind_of(state, replace(each, workers=1)) for each in configurations}
    return sorted(alone, key=lambda variant: -uses[alone[variant]])


def kind_of(state: State, configuration: Configuration) -> tuple[Any, ...]:
    """Return what its workers are: the variant, but with the threads that they come to have."""
    return (
        configuration.variant.kind,
        configuration.threads_per_worker(state.cores, state.threads),
    )
