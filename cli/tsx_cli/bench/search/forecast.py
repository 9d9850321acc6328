"""What each configuration is expected to do: its variant's curve, corrected by what was measured
near it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.model.configuration import Configuration, Variant
from tsx_cli.bench.model.disturbance import correction, worth
from tsx_cli.bench.model.points import confirmed_best
from tsx_cli.bench.model.predict import (
    OVERHEAD_MS,
    best_connections,
    best_rate,
    latency_of,
    predict,
)
from tsx_cli.bench.model.results import Curve, OfferedLoad, Point, Prediction, Trial

UNSURE = (
    0.25,
    0.35,
)  # of the logarithm of a prediction before anything was measured: of the throughput, of the p99
WRONG = (
    -1.4,
    0.7,
    # the same, of one measurement at most: what is further off tells of a curve that was disturbed,
    # and nothing of others
)
# times the error of its p99 that a load stays below the bounds: one that breaks them tells little
# of the throughput
CAUTION = 0.5
SIGMAS = 1.6  # that a prediction may be wrong by
PRIOR = 0.5  # measurements, next to a configuration, that weigh as much as what was thought before
OTHER_KIND = 2.0  # another variant, or other threads: as far away as four times the workers
MOST_CONNECTIONS = 1024


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
    loads: Sequence[
        float
    ] = ()  # connections or rates: only these are measured, where some are given
    cores: int = 1
    threads: int | None = None  # that the archive itself gives each worker
    overhead_ms: float = OVERHEAD_MS
    excluded: Mapping[Variant, str] = field(
        default_factory=dict
    )  # variants that may not win, and why
    exhaustive: bool = False
    seconds_left: float | None = None
    seconds_reserved: float = 0.0  # of these, for the end of the run
    seconds_per_point: float = 0.0
    seconds_to_start: float = 0.0  # a server
    running: Configuration | None = None  # the one whose server runs
    most_connections: int = MOST_CONNECTIONS

    @cached_property
    def observed(self) -> list[tuple[Configuration, float, float]]:
        """Of each trial with a curve, how wrong the predictions of its throughput and its p99 were,
        as logarithms.
        """
        pairs = [(trial, curve_of(self, trial.how())) for trial in self.trials if trial.points]
        return [
            (trial.how(), *_errors(self, curve, trial))
            for trial, curve in pairs
            if curve is not None
        ]

    @cached_property
    def sound_curves(self) -> dict[tuple[Variant, int], Curve | None]:
        """By variant and threads, as far as they were looked up."""
        return {}


class Forecast(NamedTuple):
    """The expected throughput of a configuration at its best load, and its maximum."""

    configuration: Configuration
    level: float  # connections or rate
    predicted: Prediction | None  # as the curve says
    expected: float  # requests per second, as measured neighbours correct it
    least: float  # less by the standard error
    most: float


def outlook(state: State, configuration: Configuration) -> Forecast:
    curve = curve_of(state, configuration)
    if curve is None:
        return Forecast(
            configuration, _unpredicted_level(state, configuration), None, 0.0, 0.0, math.inf
        )
    (rate, rate_error), (tail, tail_error) = learned(state, configuration)
    sure = _best_load(state, curve, configuration, math.exp(tail + CAUTION * tail_error))
    hopeful = _best_load(state, curve, configuration, math.exp(tail - SIGMAS * tail_error))
    could = _holds(state, hopeful[1], tail - SIGMAS * tail_error)
    most = (
        max(hopeful[1].throughput, sure[1].throughput) * math.exp(rate + SIGMAS * rate_error)
        if could
        else 0.0
    )
    expected = (
        sure[1].throughput * math.exp(rate) * _chance(state, configuration)
        if _holds(state, sure[1], tail)
        else 0.0
    )
    return Forecast(configuration, *sure, expected, expected * math.exp(-rate_error), most)


def _holds(state: State, prediction: Prediction, tail: float) -> bool:
    return (
        state.slo is None
        or bool(state.loads)
        or state.slo.slack(latency_of(prediction, math.exp(tail))) <= 1
    )


def _chance(state: State, configuration: Configuration) -> float:
    """That it runs at all: what is near something that failed may well fail too, and is tried after
    what is further away.
    """
    chance = 1.0
    for trial in state.trials:
        if trial.state == "failed" and trial.how().variant == configuration.variant:
            chance *= 1 - 2 ** -distance(state, trial.how(), configuration)
    return chance


def learned(
    state: State, configuration: Configuration
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The error to expect of the prediction of throughput and of p99: the mean of its logarithm,
    and its standard deviation.

    What was measured near this configuration weighs most; the less there is of it, the less is
    known, and the more the error may be.
    """
    errors = [(2 ** -distance(state, how, configuration), *wrong) for how, *wrong in state.observed]
    total = sum(weight for weight, _, _ in errors)
    learned_pairs = []
    for which, unsure in enumerate(UNSURE):
        mean = sum(each[0] * each[1 + which] for each in errors) / (total + 0.2)
        scatter = sum(each[0] * (each[1 + which] - mean) ** 2 for each in errors)
        learned_pairs.append((mean, math.sqrt((scatter + PRIOR * unsure**2) / (total + PRIOR))))
    return learned_pairs[0], learned_pairs[1]


def _errors(state: State, curve: Curve, trial: Trial) -> tuple[float, float]:
    rates, tails = [], []
    for point in trial.points:
        prediction = predict(curve, trial.how(), point.offered, state.overhead_ms, state.cores)
        if (
            point.throughput.value > 0
            and point.latency.p99_ms > 0
            and math.isfinite(prediction.p99_ms)
        ):
            rates.append(_within(math.log(worth(point) / prediction.throughput), *WRONG))
            tails.append(
                _within(math.log(point.latency.p99_ms / prediction.p99_ms), -WRONG[1], -WRONG[0])
            )
    count = len(rates) or 1
    return sum(rates) / count, sum(tails) / count


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _best_load(
    state: State, curve: Curve, configuration: Configuration, tail: float
) -> tuple[float, Prediction]:
    """The load with the most throughput whose latency, so many times what is predicted, holds the
    bounds.
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
    if state.mode == "open":
        return best_rate(curve, configuration, state.slo, state.overhead_ms, state.cores, tail)
    return best_connections(
        curve,
        configuration,
        state.slo,
        state.overhead_ms,
        state.cores,
        tail,
        state.most_connections,
    )


def _unpredicted_level(state: State, configuration: Configuration) -> float:
    """Without a curve: as many connections as its workers can have in hand, or a rate that
    something else has held.
    """
    if state.mode == "open":
        return best_throughput(state) or 10.0
    return float(min(state.most_connections, configuration.workers * configuration.batch_size + 1))


def best_throughput(state: State) -> float:
    order = ranking(state.trials, state.excluded)
    point = chosen(state.trials[order[0]]) if order else None
    return 0.0 if point is None else worth(point)


def chosen(trial: Trial) -> Point | None:
    best = confirmed_best(trial.points)
    return None if best is None or trial.state != "measured" else trial.points[best]


def ranking(trials: Sequence[Trial], excluded: Mapping[Variant, str] | None = None) -> list[int]:
    """Positions of the trials that may win, the best first.

    Of two that do the same, that with fewer workers and smaller batches.
    """
    may = []
    for position, trial in enumerate(trials):
        point = chosen(trial)
        wrong = trial.accuracy is not None and not trial.accuracy.allowed and excluded is not None
        if point is not None and not wrong and trial.how().variant not in (excluded or {}):
            may.append((-worth(point), trial.how().workers, trial.how().batch_size, position))
    return [position for *_, position in sorted(may)]


def curve_of(state: State, configuration: Configuration) -> Curve | None:
    """That of a worker with as many threads as its have, or with the next number of them that was
    timed.
    """
    threads = configuration.threads_each(state.cores, state.threads)
    key = configuration.variant, threads
    if key not in state.sound_curves:
        state.sound_curves[key] = _nearest_curve(state, configuration, threads)
    return state.sound_curves[key]


def _nearest_curve(state: State, configuration: Configuration, threads: int) -> Curve | None:
    def off(curve: Curve) -> tuple[float, bool]:
        alone = (
            curve.threads or state.threads or state.cores
        )  # a worker by itself is given all cores
        return abs(math.log2(alone / threads)), curve.threads != configuration.threads

    like = [
        curve
        for curve in state.curves
        if curve.points and curve.variant.kind == configuration.variant.kind
    ]
    found = min(like, key=off, default=None)
    return None if found is None else undisturbed(found)


def by_use(configurations: Sequence[Configuration], state: State) -> list[Variant]:
    """The variants, first those whose curves tell of most configurations: there may not be the time
    for all of them.
    """
    uses = Counter(kind_of(state, each) for each in configurations)
    alone = {each.variant: kind_of(state, replace(each, workers=1)) for each in configurations}
    return sorted(alone, key=lambda variant: -uses[alone[variant]])


def undisturbed(curve: Curve) -> Curve:
    """A batch takes no longer than a larger one: where it did, something else on the machine took
    its time.

    What a curve that was disturbed all along would have been without that is calculated as it is
    for a round.
    """
    factor = correction(curve)
    least, points = math.inf, []
    for point in sorted(curve.points, key=lambda point: -point.batch_size):
        alone = point.median_ms / factor
        if (
            factor > 1 and curve.threads and point.cpu_ms is not None
        ):  # it took its time of the processor in any case
            alone = min(point.median_ms, max(alone, point.cpu_ms / curve.threads))
        least = min(least, alone)
        points.append(
            point if point.median_ms == least else point.model_copy(update={"median_ms": least})
        )
    return curve.model_copy(update={"points": points[::-1]})


def kind_of(state: State, configuration: Configuration) -> tuple[Any, ...]:
    """What its workers are: as the variant, but with the threads that they come to have."""
    return (configuration.variant.kind, configuration.threads_each(state.cores, state.threads))


def distance(state: State, one: Configuration, other: Configuration) -> float:
    steps = abs(math.log2(one.workers / other.workers)) + 0.5 * abs(
        math.log2(one.batch_size / other.batch_size)
    )
    return steps + (OTHER_KIND if kind_of(state, one) != kind_of(state, other) else 0.0)


def offered_load(state: State, level: float) -> OfferedLoad:
    if state.mode == "closed":
        return OfferedLoad(connections=max(1, round(level)))
    return OfferedLoad(mode="open", rate=level, arrivals=state.arrivals)
