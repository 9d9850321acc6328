"""The end of a run: the best, the next best and the baseline measured again in turn, so that what disturbs one disturbs all."""

from __future__ import annotations

from typing import Protocol

from tsx_cli.bench.asked import Asked
from tsx_cli.bench.points import confirmed_best
from tsx_cli.bench.results import Offered, Paired, Round, Trial
from tsx_cli.bench.statistics import enough, real_difference

ATTEMPTS = 3  # one that no longer holds its bounds makes room for another
MOST_ROUNDS = 20
CALM = 0.8  # of its most: the rate of requests that come at random, which it should stand


class Measuring(Protocol):
    """What of the run this needs."""

    asked: Asked

    @property
    def round_seconds(self) -> float: ...

    def order(self) -> list[int]: ...

    def first(self) -> int | None: ...

    def trial(self, at: int) -> Trial: ...

    def attempt(self, at: int, offered: Offered) -> bool: ...

    def seconds_left(self) -> float: ...


def confirm(run: Measuring) -> list[Paired]:
    """The comparisons of the winner with the others. Its points have more rounds afterwards, and one of requests that come at random."""
    pairs: list[Paired] = []
    for _ in range(ATTEMPTS):
        order = run.order()
        if not order:
            return []
        group = list(dict.fromkeys([order[0], *order[1:2], *([first] if (first := run.first()) is not None else [])]))
        loads = {at: _best(run, at) for at in group}
        figures = _in_turn(run, {at: load for at, load in loads.items() if load is not None})
        if run.order()[:1] == group[:1] and _holds(run, group[0], loads[group[0]]):
            pairs = _compare(group, figures)
            break
    order = run.order()
    if order:
        _at_random(run, order[0])
    return pairs


def _in_turn(run: Measuring, loads: dict[int, Offered]) -> dict[int, list[float]]:
    """The throughput of each round, by trial, all at the same times."""
    figures: dict[int, list[float]] = {at: [] for at in loads}
    winner = next(iter(loads))
    for number in range(MOST_ROUNDS):
        sure = number >= run.asked.rounds and enough(_rounds(run, winner, loads[winner]), run.asked.width)
        late = run.seconds_left() < len(loads) * run.round_seconds
        if (number >= run.asked.rounds and (sure or late)) or (number > 0 and run.seconds_left() < 0):
            break
        for at in list(loads):
            if run.attempt(at, loads[at]):
                figures[at].append(_rounds(run, at, loads[at])[-1].throughput)
            else:
                del loads[at], figures[at]
        if winner not in loads:
            break
    return figures


def _compare(group: list[int], figures: dict[int, list[float]]) -> list[Paired]:
    pairs = []
    for other in group[1:]:
        one, two = figures.get(other, []), figures.get(group[0], [])
        if min(len(one), len(two)) > 1 and min(*one, *two) > 0:  # one round each tells nothing, nor does none; and no file holds infinity
            told = real_difference(one, two)
            pairs.append(Paired(first=group[0], second=other, ratio=told.ratio, low=told.low, high=told.high, real=told.real))
    return pairs


def _at_random(run: Measuring, at: int) -> None:
    """One open loop: a closed one spaces its requests by itself, clients do not."""
    best = _best(run, at)
    if best is None or best.mode == "open" or run.seconds_left() < -run.round_seconds:
        return
    point = next(point for point in run.trial(at).points if point.offered == best)
    run.attempt(at, Offered(mode="open", rate=float(f"{CALM * point.throughput.value:.3g}"), arrivals="poisson"))


def _holds(run: Measuring, at: int, offered: Offered | None) -> bool:
    return any(point.holds for point in run.trial(at).points if point.offered == offered)


def _best(run: Measuring, at: int) -> Offered | None:
    """Its load with the most within the bounds; where nothing holds them, the one with the least latency."""
    points = run.trial(at).points
    position = confirmed_best(points)
    if position is None:
        position = min(range(len(points)), key=lambda each: points[each].latency.p99_ms, default=None)
    return None if position is None else points[position].offered


def _rounds(run: Measuring, at: int, offered: Offered) -> list[Round]:
    return next((point.rounds for point in run.trial(at).points if point.offered == offered), [])
