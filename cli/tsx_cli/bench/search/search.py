"""The choice of the next configuration and load, a pure function of the measurements so far.

Every configuration is predicted from the curve of one worker. The five with the best predictions
are measured once. Then further loads are measured for those that can win, up and down a ladder. The
next five follow, until the time is over or no remaining prediction comes near the best.
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
from tsx_cli.bench.search.machine import comparable_throughput
from tsx_cli.bench.search.points import confirmed_best
from tsx_cli.bench.search.predict import (
    OVERHEAD_MS,
    best_connections,
    best_rate,
    latency_of,
    predict,
    undisturbed,
)

GROUP_SIZE = 5  # configurations per group; groups are measured in the order of predictions
# Predictions are equal if the logarithms of their throughputs differ by less.
EQUAL_LOG_RATIO = 0.05
PREDICTION_MARGIN = 1.35  # highest possible throughput as a multiple of the prediction
# The assumed latency for the choice of a load, as a multiple of the prediction. It is high, because
# the load should not break the bounds.
CAUTIOUS_FACTOR = 1.2
HOPEFUL_FACTOR = 0.57  # lowest possible latency as a multiple of the prediction
# Limits for the ratio of measurements to predictions; a disturbed curve causes other ratios.
MIN_CORRECTION, MAX_CORRECTION = 0.25, 2.0
MIN_GAIN = 1.01  # A configuration is measured if it can exceed the best by this factor.
CLEAR_EXCESS = 1.1  # latency as a multiple of the bound; a smaller excess may be noise
MAX_CONNECTIONS = 1024


class Forecast(NamedTuple):
    """The expected throughput of a configuration at its best load, and its maximum."""

    configuration: Configuration
    level: float  # connections or rate
    predicted: Prediction | None  # the prediction without corrections
    expected: float  # requests per second within the bounds
    most: float


@dataclass(frozen=True)
class State:
    """Everything on which the next step depends.

    `trials` are in the order of their start; their points are in any order.
    """

    configurations: Sequence[Configuration]
    curves: Sequence[Curve] = ()
    trials: Sequence[Trial] = ()
    slo: Slo | None = None
    mode: Literal["closed", "open"] = "closed"
    arrivals: Literal["constant", "poisson", "recorded"] = "poisson"  # only in an open loop
    # The connections or rates to measure; if empty, the search chooses them.
    loads: Sequence[float] = ()
    cores: int = 1
    threads: int | None = None  # the archive's setting for a worker
    overhead_ms: float = OVERHEAD_MS
    # The variants that must not win, with the reasons.
    excluded: Mapping[Variant, str] = field(default_factory=dict)
    exhaustive: bool = False
    seconds_left: float | None = None
    seconds_reserved: float = 0.0  # the part of the remaining time for the end of the run
    seconds_per_point: float = 0.0
    seconds_to_start: float = 0.0  # time of a server's start
    running: Configuration | None = None  # the configuration of the running server
    max_connections: int = MAX_CONNECTIONS

    @cached_property
    def started_configurations(self) -> set[Configuration]:
        """The configurations that were started, not those that an earlier run only predicted."""
        return {trial.as_configuration() for trial in self.trials if trial.state != "predicted"}

    @cached_property
    def best(self) -> float:
        """The highest throughput within the bounds so far."""
        order = ranking(self.trials, self.excluded)
        point = chosen(self.trials[order[0]]) if order else None
        return 0.0 if point is None else comparable_throughput(point)

    @cached_property
    def corrections(self) -> tuple[float, float]:
        """The ratio of measured to predicted throughput, as two medians.

        The first is the median of all points. The second is the median of the undisturbed points,
        which show what is possible.
        """
        ratios = [
            (
                comparable_throughput(point) / prediction.throughput,
                any(round_.disturbed for round_ in point.counted),
            )
            for trial in self.trials
            for point in trial.points
            if (prediction := predict_load(self, trial.as_configuration(), point.offered))
            is not None
            and comparable_throughput(point) > 0
        ]
        undisturbed_ratios = [ratio for ratio, disturbed in ratios if not disturbed]
        all_median, undisturbed_median = (
            min(max(median(group or [1.0]), MIN_CORRECTION), MAX_CORRECTION)
            for group in ([ratio for ratio, _ in ratios], undisturbed_ratios)
        )
        return all_median, undisturbed_median

    @cached_property
    def sound_curves(self) -> dict[tuple[Variant, int], Curve | None]:
        """A cache of curves by variant and threads, corrected for disturbances."""
        return {}


class Proposal(NamedTuple):
    """A configuration and a load to measure next.

    A server keeps running while the configuration stays the same.
    """

    configuration: Configuration
    offered: OfferedLoad
    predicted: Prediction | None  # prediction for the load


def baseline(configurations: Sequence[Configuration]) -> Configuration:
    """Return the configuration that all others are compared with.

    It is the first one, with one worker and one request at a time. If the first one has a form, the
    baseline has the reference.
    """
    first = configurations[0]
    return replace(first, workers=1, batch_size=1, form=first.form and REFERENCE)


def next_trial(state: State) -> Proposal | None:
    """Return what to measure next, or None if the search or its time is over.

    The first five configurations may use the time that is reserved for the end of the run.
    """
    reference = baseline(state.configurations)
    if reference not in state.started_configurations:
        prospect = forecast(state, reference)
        level = 1.0 if state.mode == "closed" else prospect.level
        proposal = _propose(state, reference, state.loads[0] if state.loads else level)
        return proposal if _fits(state, proposal, 0.0) else None
    ordered = [prospect for prospect in _ordered(state) if prospect.configuration != reference]
    by_throughput = sorted(state.trials, key=_highest, reverse=True)
    climbs = (climb for trial in by_throughput if (climb := _climb(state, trial)) is not None)
    higher = next((climb for climb in climbs if _fits(state, climb, state.seconds_reserved)), None)
    size = 1 if state.exhaustive else GROUP_SIZE
    for start in range(0, len(ordered) or 1, size):
        for prospect in ordered[start : start + size]:
            if prospect.configuration not in state.started_configurations and _may_win(
                state, prospect
            ):
                level = state.loads[0] if state.loads else prospect.level
                proposal = _propose(state, prospect.configuration, level)
                if _fits(state, proposal, state.seconds_reserved if start else 0.0):
                    return proposal
        if higher is not None:
            return higher
    return None


def _fits(state: State, proposal: Proposal, reserved: float) -> bool:
    """Tell whether there is time for a measurement and the start of its server."""
    start = 0.0 if proposal.configuration == state.running else state.seconds_to_start
    return (
        state.seconds_left is None
        or state.seconds_left - reserved >= start + state.seconds_per_point
    )


def _ordered(state: State) -> list[Forecast]:
    """Return the predictions, the best first.

    Of equal predictions, the fewest workers and the smallest batch come first. Configurations that
    need more than half of what a failed one needed come last.
    """
    forecasts = [forecast(state, configuration) for configuration in state.configurations]
    best_expected = max(prospect.expected for prospect in forecasts)
    failed = [trial.as_configuration() for trial in state.trials if trial.state == "failed"]
    limit = (
        min(
            (configuration.workers * configuration.batch_size for configuration in failed),
            default=math.inf,
        )
        / 2
    )

    def promise(prospect: Forecast) -> tuple[float, ...]:
        workers, batch_size = prospect.configuration.workers, prospect.configuration.batch_size
        distance = (
            math.log(best_expected / prospect.expected) // EQUAL_LOG_RATIO
            if prospect.expected > 0
            else math.inf
        )
        return workers * batch_size > limit, distance, workers, batch_size

    return sorted(forecasts, key=promise)


def _may_win(state: State, prospect: Forecast) -> bool:
    is_promising = state.exhaustive or prospect.most > state.best * MIN_GAIN
    return is_promising and exclusion_reason(state, prospect.configuration) is None


def _highest(trial: Trial) -> float:
    return max((comparable_throughput(point) for point in trial.points), default=0.0)


def forecast(state: State, configuration: Configuration) -> Forecast:
    """Predict a configuration from its curve, and correct the prediction by the measurements."""
    curve = curve_of(state, configuration)
    if curve is None:
        # The load is as many connections as the workers can take, or the best rate so far.
        max_requests = configuration.workers * configuration.batch_size + 1
        level = float(min(state.max_connections, max_requests))
        level = (state.best or 10.0) if state.mode == "open" else level
        return Forecast(configuration, level, None, 0.0, math.inf)
    level, prediction = _best_load(state, curve, configuration, CAUTIOUS_FACTOR)
    _, hopeful = _best_load(state, curve, configuration, HOPEFUL_FACTOR)
    usual_correction, max_correction = state.corrections
    expected = usual_correction * prediction.throughput if _holds(state, prediction, 1.0) else 0.0
    most = max_correction * hopeful.throughput if _holds(state, hopeful, HOPEFUL_FACTOR) else 0.0
    return Forecast(configuration, level, prediction, expected, PREDICTION_MARGIN * most)


def _holds(state: State, prediction: Prediction, factor: float) -> bool:
    """Tell whether the predicted latency times a factor keeps the bounds."""
    return (
        state.slo is None
        or bool(state.loads)
        or state.slo.latency_ratio(latency_of(prediction, factor)) <= 1
    )


def _best_load(
    state: State, curve: Curve, configuration: Configuration, factor: float
) -> tuple[float, Prediction]:
    """Return the load with the most predicted throughput within the bounds.

    The assumed latency is `factor` times the predicted latency.
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
        return max(predictions, key=lambda pair: pair[1].throughput)
    arguments = curve, configuration, state.slo, state.overhead_ms, state.cores, factor
    if state.mode == "open":
        return best_rate(*arguments)
    return best_connections(*arguments, state.max_connections)


def exclusion_reason(state: State, configuration: Configuration) -> str | None:
    """Return why a configuration cannot be measured or cannot win, or None.

    Predictions are not considered.
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
        trial_configuration = trial.as_configuration()
        is_smaller = (
            trial_configuration.workers <= configuration.workers
            and trial_configuration.batch_size <= configuration.batch_size
        )
        if (
            trial.state == "failed"
            and trial_configuration.variant == configuration.variant
            and is_smaller
        ):
            return f"{trial_configuration} failed, which asks for less: {trial.reason}"
    if _is_too_slow_alone(state, configuration):
        return (
            "one request at a time breaks a bound, and no number of workers or batch size makes"
            " that faster"
        )
    return None


def _is_too_slow_alone(state: State, configuration: Configuration) -> bool:
    """Tell whether one connection to such a worker broke a bound, clearly or twice."""
    ratios = [
        _rung(state, point).latency_ratio
        for trial in state.trials
        if kind_of(state, trial.as_configuration()) == kind_of(state, configuration)
        for point in trial.points
        if not any(round_.disturbed for round_ in point.counted)
        and (point.offered.mode, point.offered.connections) == ("closed", 1)
    ]
    return any(ratio > CLEAR_EXCESS for ratio in ratios) or sum(ratio > 1 for ratio in ratios) > 1


def unmeasured_configurations(state: State) -> list[tuple[Configuration, Prediction | None, str]]:
    """Return the unmeasured configurations with their predictions and the reasons."""
    unmeasured = []
    for configuration in state.configurations:
        if configuration in state.started_configurations:
            continue
        prospect = forecast(state, configuration)
        reason = exclusion_reason(state, configuration)
        if reason is None:
            too_slow = f"{prospect.most:.0f} requests/s at most, {OUTDONE}"
            reason = OUT_OF_TIME if prospect.most > state.best * MIN_GAIN else too_slow
        unmeasured.append((configuration, prospect.predicted, reason))
    return unmeasured


def faster_unmeasured(state: State) -> int:
    """Count the unmeasured configurations that are predicted to be faster than all measured ones.

    The usual errors of predictions are allowed for. While any are left, no winner can be named. A
    configuration without a curve has no prediction, so more than the baseline must be measured.
    """
    unmeasured = [
        forecast(state, configuration)
        for configuration in state.configurations
        if configuration not in state.started_configurations
        and exclusion_reason(state, configuration) is None
    ]
    only_baseline = len(state.started_configurations) < 2
    return sum(
        prospect.expected > PREDICTION_MARGIN * state.best
        or (only_baseline and prospect.predicted is None)
        for prospect in unmeasured
    )


def _climb(state: State, trial: Trial) -> Proposal | None:
    """Return the next load of a measured configuration.

    Return None if its maximum is known, or is known not to win.
    """
    configuration = trial.as_configuration()
    prospect = forecast(state, configuration)
    is_leader = state.exhaustive or state.loads or _highest(trial) >= state.best
    if trial.state != "measured" or not (is_leader or prospect.most > state.best * MIN_GAIN):
        return None
    # An earlier run may have confirmed its best trial by loads of the other mode.
    points = [point for point in trial.points if point.offered.mode == state.mode]
    if state.loads:
        measured = {_level(point.offered) for point in points}
        level = next((load for load in state.loads if load not in measured), None)
    else:
        rungs = [_rung(state, point) for point in points]
        level = next_level(
            rungs,
            start=1.0 if rungs else prospect.level,
            is_whole=state.mode == "closed",
            max_level=state.max_connections if state.mode == "closed" else math.inf,
            throughput_to_beat=0.0 if state.exhaustive else state.best,
        )
    if level is not None:
        return _propose(state, configuration, level)
    best = chosen(trial) if state.exhaustive and not state.loads else None
    if best is None or len(best.counted) > 1:
        return None
    return _propose(state, configuration, _level(best.offered))


def _rung(state: State, point: Point) -> Rung:
    ratio = 0.0 if state.slo is None else state.slo.latency_ratio(point.latency.model_dump())
    return Rung(_level(point.offered), comparable_throughput(point), point.holds, ratio)


def _level(offered: OfferedLoad) -> float:
    return float(offered.connections) if offered.mode == "closed" else offered.rate or 0.0


def offered_load(state: State, level: float) -> OfferedLoad:
    if state.mode == "closed":
        return OfferedLoad(connections=max(1, round(level)))
    return OfferedLoad(mode="open", rate=level, arrivals=state.arrivals)


def _propose(state: State, configuration: Configuration, level: float) -> Proposal:
    offered = offered_load(state, level)
    return Proposal(configuration, offered, predict_load(state, configuration, offered))


def predict_load(
    state: State, configuration: Configuration, offered: OfferedLoad
) -> Prediction | None:
    """Predict one load; return None if there is no curve."""
    curve = curve_of(state, configuration)
    if curve is None:
        return None
    return predict(curve, configuration, offered, state.overhead_ms, state.cores)


def chosen(trial: Trial) -> Point | None:
    best = confirmed_best(trial.points)
    return None if best is None or trial.state != "measured" else trial.points[best]


def ranking(trials: Sequence[Trial], excluded: Mapping[Variant, str] | None = None) -> list[int]:
    """Return the positions of the trials that can win, the best first.

    Of two equal trials, the one with fewer workers and smaller batches comes first.
    """
    candidates = []
    for position, trial in enumerate(trials):
        point = chosen(trial)
        is_wrong = (
            trial.accuracy is not None and not trial.accuracy.allowed and excluded is not None
        )
        if (
            point is not None
            and not is_wrong
            and trial.as_configuration().variant not in (excluded or {})
        ):
            candidates.append(
                (
                    -comparable_throughput(point),
                    trial.as_configuration().workers,
                    trial.as_configuration().batch_size,
                    position,
                )
            )
    return [position for *_, position in sorted(candidates)]


def curve_of(state: State, configuration: Configuration) -> Curve | None:
    """Return the curve of a worker with this number of threads, or with the nearest timed one."""
    threads = configuration.threads_per_worker(state.cores, state.threads)
    key = configuration.variant, threads
    if key not in state.sound_curves:

        def distance(curve: Curve) -> tuple[float, bool]:
            # By default, the single worker of a curve uses all cores.
            curve_threads = curve.threads or state.threads or state.cores
            return abs(math.log2(curve_threads / threads)), curve.threads != configuration.threads

        kind = configuration.variant.kind
        same_kind = [curve for curve in state.curves if curve.points and curve.variant.kind == kind]
        nearest = min(same_kind, key=distance, default=None)
        state.sound_curves[key] = None if nearest is None else undisturbed(nearest)
    return state.sound_curves[key]


def variants_by_use(configurations: Sequence[Configuration], state: State) -> list[Variant]:
    """Return the variants; those whose curves predict the most configurations come first.

    The time may be too short for all of them.
    """
    uses = Counter(kind_of(state, configuration) for configuration in configurations)
    kinds = {
        configuration.variant: kind_of(state, replace(configuration, workers=1))
        for configuration in configurations
    }
    return sorted(kinds, key=lambda variant: -uses[kinds[variant]])


def kind_of(state: State, configuration: Configuration) -> tuple[Any, ...]:
    """Return the variant without its threads, and the actual number of threads of its workers."""
    return (
        configuration.variant.kind,
        configuration.threads_per_worker(state.cores, state.threads),
    )
