"""Chooses the next configuration and load to measure: a pure function of the measurements so far.

Every configuration is predicted from its variant's curve, and what has been measured corrects the
predictions of what is near it. The most promising is measured first, up and down a ladder of loads
until the most that it does within the bounds is known. The search is over when nothing that is left
could win, even if its prediction were as wrong as those before were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tsx_archiver.metadata.forms import REFERENCE
from tsx_cli.bench.model.configuration import Configuration
from tsx_cli.bench.model.disturbance import worth
from tsx_cli.bench.model.predict import predict
from tsx_cli.bench.model.results import (
    OUT_OF_TIME,
    OUTDONE,
    OfferedLoad,
    Point,
    Prediction,
    Trial,
)
from tsx_cli.bench.search.forecast import (
    Forecast,
    State,
    best_throughput,
    chosen,
    curve_of,
    distance,
    kind_of,
    offered_load,
    outlook,
    ranking,
)
from tsx_cli.bench.search.ladder import Rung, next_level

FIRST = 5  # configurations that are measured once before anything is measured twice
# of the logarithm of throughput: expectations that differ by less are no reason for a choice
ALIKE = 0.05
OTHER, HERE = (
    0.97,
    1.05,
    # times what is hoped for: of a configuration that was not begun, and of the one whose server
    # runs
)
GAIN = 1.01  # a configuration that cannot exceed the best by this factor is not measured
CLEARLY = 1.1  # times the bound: less may be noise


class Candidate(NamedTuple):
    """A configuration and a load. The server can continue while the configuration stays the
    same.
    """

    configuration: Configuration
    offered: OfferedLoad
    predicted: Prediction | None  # at that load


def baseline(configurations: Sequence[Configuration]) -> Configuration:
    """What everything else is compared with: the first, or the reference if that is a form, with
    one worker and one request at a time.
    """
    first = configurations[0]
    return replace(first, workers=1, batch_size=1, form=first.form and REFERENCE)


def next_trial(state: State) -> Candidate | None:
    """What to measure next; None when the search is over, or its time.

    1. The baseline, once: all else is compared with it.
    2. Each of the predicted best, once, before anything is measured a second time; for that no time
       is kept for the end of the run.
    3. Then what is expected to do the most, more loads of what was begun or another configuration,
       until the time that is kept begins.
    """
    if baseline(state.configurations) not in _tried(state):
        one = outlook(state, baseline(state.configurations))
        first = _candidate(state, one._replace(level=1.0) if state.mode == "closed" else one)
        return first if _fits(state, first, 0.0) else None
    best = best_throughput(state)
    if state.exhaustive:
        climbs = (
            _climb(state, trial, best)
            for trial in reversed(state.trials)
            if trial.state == "measured"
        )
        begun = next((candidate for candidate in climbs if candidate is not None), None)
        candidates = (
            [begun]
            if begun is not None
            else [_candidate(state, one) for one in _ordered(state, best)[:1]]
        )
        return next((each for each in candidates if _fits(state, each, 0.0)), None)
    ordered = [(one, _candidate(state, one)) for one in _ordered(state, best)]
    if len(_tried(state)) <= FIRST:
        fresh = next((candidate for _, candidate in ordered if _fits(state, candidate, 0.0)), None)
        if fresh is not None:
            return fresh
    steps = [(OTHER * one.expected, candidate) for one, candidate in ordered] + _climbs(state, best)
    possible = [
        (score, each) for score, each in steps if _fits(state, each, state.seconds_reserved)
    ]
    return max(
        possible,
        key=lambda step: step[0] * (HERE if step[1].configuration == state.running else 1.0),
        default=(0, None),
    )[1]


def _fits(state: State, candidate: Candidate, reserved: float) -> bool:
    """Whether the time suffices for it, and for its server to start."""
    start = 0.0 if candidate.configuration == state.running else state.seconds_to_start
    return (
        state.seconds_left is None
        or state.seconds_left - reserved >= start + state.seconds_per_point
    )


def _ordered(state: State, best: float) -> list[Forecast]:
    """What was not begun and may win, the most promising first.

    Of those that are expected to do about the same, what is like the best.
    """
    seen = _tried(state)
    left = [
        outlook(state, each)
        for each in state.configurations
        if each not in seen and ruled_out(state, each) is None
    ]
    may = [each for each in left if state.exhaustive or each.most > best * GAIN]
    order = ranking(state.trials, state.excluded)
    nearest = state.trials[order[0]].how() if order else baseline(state.configurations)
    most = max((each.expected for each in may), default=0.0)

    def promise(one: Forecast) -> tuple[float, ...]:
        how, less = one.configuration, math.log(most / one.expected) if one.expected > 0 else 1e6
        return less // ALIKE, distance(state, how, nearest), how.workers, how.batch_size

    return sorted(may, key=promise)


def _climbs(state: State, best: float) -> list[tuple[float, Candidate]]:
    """The next load of each configuration that was begun and may still win, with the throughput
    that is hoped for.
    """
    found, order = [], ranking(state.trials, state.excluded)
    for at, trial in enumerate(state.trials):
        one = outlook(state, trial.how())
        if trial.state == "measured" and (
            state.loads or at in order[:1] or one.most > best * GAIN or one.predicted is None
        ):
            candidate = _climb(state, trial, best)
            point = chosen(trial)
            if candidate is not None:
                found.append((max(one.expected, 0.0 if point is None else worth(point)), candidate))
    return found


def ruled_out(state: State, configuration: Configuration) -> str | None:
    """Why this cannot be measured or may not win, whatever it is predicted to do; None where
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
        and curve.points
        and configuration.batch_size > max(point.batch_size for point in curve.points)
    ):
        return f"a batch of that size did not run by itself: {curve.failed}"
    for trial in state.trials:
        other = trial.how()
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
    """Whether a single connection broke a bound with a worker like its: by so much that it is no
    noise, or twice, undisturbed.
    """
    trials = [
        trial
        for trial in state.trials
        if kind_of(state, trial.how()) == kind_of(state, configuration)
    ]
    points = [
        point
        for trial in trials
        for point in trial.points
        if not any(each.disturbed for each in point.counted)
    ]
    alone = [
        point
        for point in points
        if point.offered.mode == "closed" and point.offered.connections == 1
    ]
    slacks = [_rung(state, point).slack for point in alone]
    return any(slack > CLEARLY for slack in slacks) or sum(slack > 1 for slack in slacks) > 1


def passed_over(state: State) -> list[tuple[Configuration, Prediction | None, str]]:
    """Once the search is over: what was not measured, what it was predicted to do, and why that was
    enough.
    """
    seen = _tried(state)
    best = best_throughput(state)
    passed = []
    for configuration in state.configurations:
        if configuration in seen:
            continue
        one = outlook(state, configuration)
        why = ruled_out(state, configuration)
        if why is None:
            could = one.most > best * GAIN
            why = OUT_OF_TIME if could else f"{one.most:.0f} requests/s at most, {OUTDONE}"
        passed.append((configuration, one.predicted, why))
    return passed


def faster_unmeasured(state: State) -> int:
    """How many configurations the run ended before that are faster than all measured ones, unless
    their predictions err by more than is usual: with any, none is the best.

    Without a curve nothing is expected of them; then more than the baseline must have been
    measured.
    """
    seen, best = _tried(state), best_throughput(state)
    left = [
        outlook(state, each)
        for each in state.configurations
        if each not in seen and ruled_out(state, each) is None
    ]
    alone = len(seen) < 2
    return sum(one.least > best * GAIN or (alone and one.predicted is None) for one in left)


def _tried(state: State) -> set[Configuration]:
    """What was begun; not what an earlier run only predicted."""
    return {trial.how() for trial in state.trials if trial.state != "predicted"}


def _climb(state: State, trial: Trial, best: float) -> Candidate | None:
    """The next load of a configuration that is being measured; None once what it can do is known,
    or known not to win.
    """
    configuration = trial.how()
    points = [
        point for point in trial.points if point.offered.mode == state.mode
    ]  # an earlier run has confirmed its best by others
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
        return _loaded(state, configuration, offered_load(state, level))
    best_one = chosen(trial) if state.exhaustive and not state.loads else None
    return (
        None
        if best_one is None or len(best_one.counted) > 1
        else _loaded(state, configuration, best_one.offered)
    )


def _rung(state: State, point: Point) -> Rung:
    slack = 0.0 if state.slo is None else state.slo.slack(point.latency.model_dump())
    return Rung(_level(point.offered), worth(point), point.holds, slack)


def _level(offered: OfferedLoad) -> float:
    return float(offered.connections) if offered.mode == "closed" else offered.rate or 0.0


def _candidate(state: State, one: Forecast) -> Candidate:
    return _loaded(
        state, one.configuration, offered_load(state, state.loads[0] if state.loads else one.level)
    )


def _loaded(state: State, configuration: Configuration, offered: OfferedLoad) -> Candidate:
    curve = curve_of(state, configuration)
    prediction = (
        None
        if curve is None
        else predict(curve, configuration, offered, state.overhead_ms, state.cores)
    )
    return Candidate(configuration, offered, prediction)
