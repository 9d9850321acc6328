"""Chooses the next configuration and load to measure: a pure function of the measurements so far.

Every configuration is predicted from its variant's curve, and what has been measured corrects the predictions of what is near it. The most
promising is measured first, up and down a ladder of loads until the most that it does within the bounds is known. The search is over when
nothing that is left could win, even if its prediction were as wrong as those before were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tsx_cli.bench.model.configuration import Configuration, Variant
from tsx_cli.bench.model.disturbance import worth
from tsx_cli.bench.model.points import confirmed_best
from tsx_cli.bench.model.predict import OVERHEAD_MS, best_connections, best_rate, latency_of, predict
from tsx_cli.bench.model.results import OUT_OF_TIME, Curve, OfferedLoad, Point, Prediction, Trial
from tsx_cli.bench.model.slo import Slo
from tsx_cli.bench.search.ladder import Rung, next_level

FIRST = 5  # configurations that are measured once before anything is measured twice
ALIKE = 0.05  # of the logarithm of throughput: expectations that differ by less are no reason for a choice
OTHER, HERE = 0.97, 1.05  # times what is hoped for: of a configuration that was not begun, and of the one whose server runs
FASTER = 1.05  # times the best: a prediction of less does not say that something is faster
GAIN = 1.01  # a configuration that cannot exceed the best by this factor is not measured
UNSURE = (0.25, 0.35)  # of the logarithm of a prediction before anything was measured: of the throughput, of the p99
WRONG = (-1.4, 0.7)  # the same, of one measurement at most: what is further off tells of a curve that was disturbed, and nothing of others
SIGMAS = 1.6  # that a prediction may be wrong by
PRIOR = 0.5  # measurements, next to a configuration, that weigh as much as what was thought before
CLEARLY = 1.1  # times the bound: less may be noise
OTHER_KIND = 2.0  # another variant, or other threads: as far away as four times the workers
MOST_CONNECTIONS = 1024


class Candidate(NamedTuple):
    """A configuration and a load. The server can continue while the configuration stays the same."""

    configuration: Configuration
    offered: OfferedLoad
    predicted: Prediction | None  # at that load


@dataclass(frozen=True)
class State:
    """Everything that the next step depends on. `trials` are in the order of their start; their points in any order."""

    configurations: Sequence[Configuration]
    curves: Sequence[Curve] = ()
    trials: Sequence[Trial] = ()
    slo: Slo | None = None
    mode: Literal["closed", "open"] = "closed"
    arrivals: Literal["constant", "poisson", "recorded"] = "poisson"  # of an open loop
    loads: Sequence[float] = ()  # connections or rates: only these are measured, where some are given
    cores: int = 1
    threads: int | None = None  # that the archive itself gives each worker
    overhead_ms: float = OVERHEAD_MS
    excluded: Mapping[Variant, str] = field(default_factory=dict)  # variants that may not win, and why
    exhaustive: bool = False
    seconds_left: float | None = None
    seconds_reserved: float = 0.0  # of these, for the end of the run
    seconds_per_point: float = 0.0
    seconds_to_start: float = 0.0  # a server
    running: Configuration | None = None  # the one whose server runs
    most_connections: int = MOST_CONNECTIONS


class Forecast(NamedTuple):
    """The expected throughput of a configuration at its best load, and its maximum."""

    configuration: Configuration
    level: float  # connections or rate
    predicted: Prediction | None  # as the curve says
    expected: float  # requests per second, as measured neighbours correct it
    most: float


def baseline(configurations: Sequence[Configuration]) -> Configuration:
    """What everything else is compared with: one worker, one request at a time, otherwise as the first is."""
    device, precision, compiled, threads = configurations[0].variant
    return Configuration(device=device, precision=precision, compiled=compiled, threads=threads)


def next_trial(state: State) -> Candidate | None:
    """What to measure next; None when the search is over, or its time.

    1. The baseline, once: all else is compared with it.
    2. Each of the predicted best, once, before anything is measured a second time; for that no time is kept for the end of the run.
    3. Then what is expected to do the most, more loads of what was begun or another configuration, until the time that is kept begins.
    """
    if baseline(state.configurations) not in _tried(state):
        one = outlook(state, baseline(state.configurations))
        first = _candidate(state, one._replace(level=1.0) if state.mode == "closed" else one)
        return first if _fits(state, first, 0.0) else None
    best = _best_throughput(state)
    if state.exhaustive:
        climbs = (_climb(state, trial, best) for trial in reversed(state.trials) if trial.state == "measured")
        begun = next((candidate for candidate in climbs if candidate is not None), None)
        candidates = [begun] if begun is not None else [_candidate(state, one) for one in _ordered(state, best)[:1]]
        return next((each for each in candidates if _fits(state, each, 0.0)), None)
    ordered = [(one, _candidate(state, one)) for one in _ordered(state, best)]
    if len(_tried(state)) <= FIRST:
        fresh = next((candidate for _, candidate in ordered if _fits(state, candidate, 0.0)), None)
        if fresh is not None:
            return fresh
    steps = [(OTHER * one.expected, candidate) for one, candidate in ordered] + _climbs(state, best)
    possible = [(score, each) for score, each in steps if _fits(state, each, state.seconds_reserved)]
    return max(possible, key=lambda step: step[0] * (HERE if step[1].configuration == state.running else 1.0), default=(0, None))[1]


def _fits(state: State, candidate: Candidate, reserved: float) -> bool:
    """Whether the time suffices for it, and for its server to start."""
    start = 0.0 if candidate.configuration == state.running else state.seconds_to_start
    return state.seconds_left is None or state.seconds_left - reserved >= start + state.seconds_per_point


def _ordered(state: State, best: float) -> list[Forecast]:
    """What was not begun and may win, the most promising first. Of those that are expected to do about the same, what is like the best."""
    seen = _tried(state)
    left = [outlook(state, each) for each in state.configurations if each not in seen and ruled_out(state, each) is None]
    may = [each for each in left if state.exhaustive or each.most > best * GAIN]
    order = ranking(state.trials, state.excluded)
    nearest = state.trials[order[0]].how() if order else baseline(state.configurations)
    most = max((each.expected for each in may), default=0.0)

    def promise(one: Forecast) -> tuple[float, ...]:
        how, less = one.configuration, math.log(most / one.expected) if one.expected > 0 else 1e6
        return less // ALIKE, _distance(state, how, nearest), how.workers, how.batch_size

    return sorted(may, key=promise)


def _climbs(state: State, best: float) -> list[tuple[float, Candidate]]:
    """The next load of each configuration that was begun and may still win, with the throughput that is hoped for."""
    found, order = [], ranking(state.trials, state.excluded)
    for at, trial in enumerate(state.trials):
        one = outlook(state, trial.how())
        if trial.state == "measured" and (state.loads or at in order[:1] or one.most > best * GAIN or one.predicted is None):
            candidate = _climb(state, trial, best)
            point = _chosen(trial)
            if candidate is not None:
                found.append((max(one.expected, 0.0 if point is None else worth(point)), candidate))
    return found


def ruled_out(state: State, configuration: Configuration) -> str | None:
    """Why this cannot be measured or may not win, whatever it is predicted to do; None where nothing speaks against it."""
    if configuration.variant in state.excluded:
        return state.excluded[configuration.variant]
    if state.exhaustive:
        return None
    curve = _curve(state, configuration)
    if curve is not None and curve.failed and curve.points and configuration.batch_size > max(point.batch_size for point in curve.points):
        return f"a batch of that size did not run by itself: {curve.failed}"
    for trial in state.trials:
        other = trial.how()
        smaller = other.workers <= configuration.workers and other.batch_size <= configuration.batch_size
        if trial.state == "failed" and other.variant == configuration.variant and smaller:
            return f"{other} failed, which asks for less: {trial.reason}"
    if _too_slow_alone(state, configuration):
        return "one request at a time breaks a bound, and no number of workers or batch size makes that faster"
    return None


def _too_slow_alone(state: State, configuration: Configuration) -> bool:
    """Whether a single connection broke a bound with a worker like its: by so much that it is no noise, or twice, undisturbed."""
    trials = [trial for trial in state.trials if _kind(state, trial.how()) == _kind(state, configuration)]
    points = [point for trial in trials for point in trial.points if not any(each.disturbed for each in point.counted)]
    alone = [point for point in points if point.offered.mode == "closed" and point.offered.connections == 1]
    slacks = [_rung(state, point).slack for point in alone]
    return any(slack > CLEARLY for slack in slacks) or sum(slack > 1 for slack in slacks) > 1


def passed_over(state: State) -> list[tuple[Configuration, Prediction | None, str]]:
    """Once the search is over: what was not measured, what it was predicted to do, and why that was enough."""
    seen = _tried(state)
    best = _best_throughput(state)
    passed = []
    for configuration in state.configurations:
        if configuration in seen:
            continue
        one = outlook(state, configuration)
        why = ruled_out(state, configuration)
        if why is None:
            could = one.most > best * GAIN
            why = OUT_OF_TIME if could else f"{one.most:.0f} requests/s at most, and {best:.0f} were measured with another"
        passed.append((configuration, one.predicted, why))
    return passed


def faster_unmeasured(state: State) -> int:
    """How many configurations the run ended before that are expected to be faster than all measured ones: with any, none is the best.

    Without a curve nothing is expected of them; then more than the baseline must have been measured.
    """
    seen, best = _tried(state), _best_throughput(state)
    left = [outlook(state, each) for each in state.configurations if each not in seen and ruled_out(state, each) is None]
    alone = len(seen) < 2
    return sum(one.expected > best * FASTER or (alone and one.predicted is None) for one in left)


def _tried(state: State) -> set[Configuration]:
    """What was begun; not what an earlier run only predicted."""
    return {trial.how() for trial in state.trials if trial.state != "predicted"}


def ranking(trials: Sequence[Trial], excluded: Mapping[Variant, str] | None = None) -> list[int]:
    """Positions of the trials that may win, the best first. Of two that do the same, that with fewer workers and smaller batches."""
    may = []
    for position, trial in enumerate(trials):
        point = _chosen(trial)
        wrong = trial.accuracy is not None and not trial.accuracy.same and excluded is not None
        if point is not None and not wrong and trial.how().variant not in (excluded or {}):
            may.append((-worth(point), trial.how().workers, trial.how().batch_size, position))
    return [position for *_, position in sorted(may)]


def outlook(state: State, configuration: Configuration) -> Forecast:
    curve = _curve(state, configuration)
    if curve is None:
        return Forecast(configuration, _unpredicted_level(state, configuration), None, 0.0, math.inf)
    (rate, rate_error), (tail, tail_error) = learned(state, configuration)
    sure = _best_load(state, curve, configuration, math.exp(tail))
    hopeful = _best_load(state, curve, configuration, math.exp(tail - SIGMAS * tail_error))
    could = _holds(state, hopeful[1], tail - SIGMAS * tail_error)
    most = max(hopeful[1].throughput, sure[1].throughput) * math.exp(rate + SIGMAS * rate_error) if could else 0.0
    expected = sure[1].throughput * math.exp(rate) * _chance(state, configuration) if _holds(state, sure[1], tail) else 0.0
    return Forecast(configuration, *sure, expected, most)


def _holds(state: State, prediction: Prediction, tail: float) -> bool:
    return state.slo is None or bool(state.loads) or state.slo.slack(latency_of(prediction, math.exp(tail))) <= 1


def _chance(state: State, configuration: Configuration) -> float:
    """That it runs at all: what is near something that failed may well fail too, and is tried after what is further away."""
    chance = 1.0
    for trial in state.trials:
        if trial.state == "failed" and trial.how().variant == configuration.variant:
            chance *= 1 - 2 ** -_distance(state, trial.how(), configuration)
    return chance


def learned(state: State, configuration: Configuration) -> tuple[tuple[float, float], tuple[float, float]]:
    """The error to expect of the prediction of throughput and of p99: the mean of its logarithm, and its standard deviation.

    What was measured near this configuration weighs most; the less there is of it, the less is known, and the more the error may be.
    """
    errors = []
    for trial in state.trials:
        curve = _curve(state, trial.how())
        if trial.points and curve is not None:
            weight = 2 ** -_distance(state, trial.how(), configuration)
            errors.append((weight, *_errors(state, curve, trial)))
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
        if point.throughput.value > 0 and point.latency.p99_ms > 0 and math.isfinite(prediction.p99_ms):
            rates.append(_within(math.log(worth(point) / prediction.throughput), *WRONG))
            tails.append(_within(math.log(point.latency.p99_ms / prediction.p99_ms), -WRONG[1], -WRONG[0]))
    count = len(rates) or 1
    return sum(rates) / count, sum(tails) / count


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _climb(state: State, trial: Trial, best: float) -> Candidate | None:
    """The next load of a configuration that is being measured; None once what it can do is known, or known not to win."""
    configuration = trial.how()
    points = [point for point in trial.points if point.offered.mode == state.mode]  # an earlier run has confirmed its best by others
    if state.loads:
        measured = {_level(point.offered) for point in points}
        level = next((load for load in state.loads if load not in measured), None)
    else:
        rungs = [_rung(state, point) for point in points]
        least = 0.0 if state.exhaustive else best
        start = outlook(state, configuration).level if not rungs else 1.0
        most = state.most_connections if state.mode == "closed" else math.inf
        level = next_level(rungs, start=start, whole=state.mode == "closed", most=most, beat=least)
    if level is not None:
        return _loaded(state, configuration, _offered(state, level))
    best_one = _chosen(trial) if state.exhaustive and not state.loads else None
    return None if best_one is None or len(best_one.counted) > 1 else _loaded(state, configuration, best_one.offered)


def _rung(state: State, point: Point) -> Rung:
    slack = 0.0 if state.slo is None else state.slo.slack(point.latency.model_dump())
    return Rung(_level(point.offered), worth(point), point.holds, slack)


def _level(offered: OfferedLoad) -> float:
    return float(offered.connections) if offered.mode == "closed" else offered.rate or 0.0


def _offered(state: State, level: float) -> OfferedLoad:
    if state.mode == "closed":
        return OfferedLoad(connections=max(1, round(level)))
    return OfferedLoad(mode="open", rate=level, arrivals=state.arrivals)


def _candidate(state: State, one: Forecast) -> Candidate:
    return _loaded(state, one.configuration, _offered(state, state.loads[0] if state.loads else one.level))


def _loaded(state: State, configuration: Configuration, offered: OfferedLoad) -> Candidate:
    curve = _curve(state, configuration)
    prediction = None if curve is None else predict(curve, configuration, offered, state.overhead_ms, state.cores)
    return Candidate(configuration, offered, prediction)


def _best_load(state: State, curve: Curve, configuration: Configuration, tail: float) -> tuple[float, Prediction]:
    """The load with the most throughput whose latency, so many times what is predicted, holds the bounds."""
    if state.loads:
        predictions = [(load, predict(curve, configuration, _offered(state, load), state.overhead_ms, state.cores)) for load in state.loads]
        return max(predictions, key=lambda each: each[1].throughput)
    if state.mode == "open":
        return best_rate(curve, configuration, state.slo, state.overhead_ms, state.cores, tail)
    return best_connections(curve, configuration, state.slo, state.overhead_ms, state.cores, tail, state.most_connections)


def _unpredicted_level(state: State, configuration: Configuration) -> float:
    """Without a curve: as many connections as its workers can have in hand, or a rate that something else has held."""
    if state.mode == "open":
        return _best_throughput(state) or 10.0
    return float(min(state.most_connections, configuration.workers * configuration.batch_size + 1))


def _best_throughput(state: State) -> float:
    order = ranking(state.trials, state.excluded)
    point = _chosen(state.trials[order[0]]) if order else None
    return 0.0 if point is None else worth(point)


def _chosen(trial: Trial) -> Point | None:
    best = confirmed_best(trial.points)
    return None if best is None or trial.state != "measured" else trial.points[best]


def _curve(state: State, configuration: Configuration) -> Curve | None:
    """That of a worker with as many threads as its have, or with the next number of them that was timed."""
    threads = configuration.threads_each(state.cores, state.threads)

    def off(curve: Curve) -> tuple[float, bool]:
        alone = curve.threads or state.threads or state.cores  # a worker by itself is given all cores
        return abs(math.log2(alone / threads)), curve.threads != configuration.threads

    like = [
        curve for curve in state.curves if curve.points and (curve.device, curve.precision, curve.compiled) == configuration.variant[:3]
    ]
    found = min(like, key=off, default=None)
    return None if found is None else undisturbed(found)


def undisturbed(curve: Curve) -> Curve:
    """A batch takes no longer than a larger one: where it did, something else on the machine took its time.

    Of a curve that was disturbed all along, the lower quartile tells more of the model than the median."""
    least, points = math.inf, []
    for point in sorted(curve.points, key=lambda point: -point.batch_size):
        least = min(least, point.low_ms if curve.disturbed and point.low_ms else point.median_ms)
        points.append(point if point.median_ms == least else point.model_copy(update={"median_ms": least}))
    return curve.model_copy(update={"points": points[::-1]})


def _kind(state: State, configuration: Configuration) -> tuple[Any, ...]:
    """What its workers are: as the variant, but with the threads that they come to have."""
    return (*configuration.variant[:3], configuration.threads_each(state.cores, state.threads))


def _distance(state: State, one: Configuration, other: Configuration) -> float:
    steps = abs(math.log2(one.workers / other.workers)) + 0.5 * abs(math.log2(one.batch_size / other.batch_size))
    return steps + (OTHER_KIND if _kind(state, one) != _kind(state, other) else 0.0)
