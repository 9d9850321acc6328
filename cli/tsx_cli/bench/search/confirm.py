"""The end of a run: the best, the second-best and the baseline are measured again in turn, so that
disturbances affect all of them; then the rate of random arrivals that the best sustains.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tsx_cli.bench.load.plan import MAX_AUTO_WARM_UP_S
from tsx_cli.bench.load.results import OfferedLoad, PairedComparison, Point, Trial
from tsx_cli.bench.load.statistics import is_precise, real_difference
from tsx_cli.bench.search.ladder import AIM, bisected, three_digits
from tsx_cli.bench.search.machine import correction
from tsx_cli.bench.search.options import BenchOptions
from tsx_cli.bench.search.points import choose, confirmed_best, knee_of, winner_of

FULL, SHORT = 3.0, 1.0  # seconds of a round where there is time for it, and where there is not
ANSWERS = 300  # that a round of the search sees, if `FULL` suffices: fewer tell no p99
# seconds of a round in which nothing is measured: the generator starts, and the server tells its
# metrics
BESIDE = 0.6
COMPARED = 3  # the best, the next best and the baseline
FEWEST = 4  # rounds of a comparison: two of each of two
AT_RANDOM = 3  # rounds of requests that come at random
OF_THE_LEFT = 0.025  # of the time that is left, for a round
# of it, for the curves with the loading of their models: one that would go beyond is not begun
FOR_LOADING = 0.3
FOR_CURVES = 0.15  # of the time that is left, for all curves together
FOR_THE_END = 0.35  # of the whole time, at most
CURVE = 20.0  # seconds that a curve may take at most


def round_cost(seconds: float) -> float:
    """What a round takes whose figures are of so many seconds; its warm-up counts as well where it
    turns out to be none.
    """
    return seconds + min(MAX_AUTO_WARM_UP_S, seconds) + BESIDE


def seconds_in_search(
    requested: float | None, throughput: float | None, left: float = math.inf
) -> float:
    """Seconds of a round, where so many answers a second are expected: no more than it takes to see
    enough of them.

    Little time that is left is for more configurations, not for longer rounds.
    """
    if requested is not None:
        return requested
    needed = FULL if not throughput else ANSWERS / 2 / throughput
    return min(max(min(needed, left * OF_THE_LEFT), SHORT), FULL)


def seconds_at_end(requested: float | None, rounds: int, left: float, starting: float) -> float:
    """Seconds of a round, so that all rounds of the comparison come into the time that is left;
    servers start for so long.
    """
    if requested is not None:
        return requested
    each = (left - starting) / (COMPARED * rounds + AT_RANDOM)
    return min(max((each - BESIDE) / 2, SHORT), FULL)


def reserved_for_end(requested: float | None, rounds: int, whole: float, start: float) -> float:
    """Seconds that the search leaves over, of so many in all, where a server takes `start` seconds
    to start.
    """
    needed = COMPARED * start + (COMPARED * rounds + AT_RANDOM) * round_cost(
        FULL if requested is None else requested
    )
    return min(needed, FOR_THE_END * whole)


def reserved_for_another(rounds: int, start: float) -> float:
    """Seconds that it takes to compare the winner with one that was found after the comparison."""
    return 2 * start + (2 * rounds + 1) * round_cost(SHORT)


def of_a_curve(left: float, curves: int) -> float:
    """Seconds for each of so many curves."""
    return CURVE if math.isinf(left) else min(CURVE, FOR_CURVES * max(0.0, left) / curves)


ATTEMPTS = 5  # one that no longer holds its bounds makes room for another
MOST_ROUNDS = 20
CALM = 0.8  # of its most: the rate of requests that come at random, which it should stand
LEAST_STEP, MOST_STEP = (
    0.6,
    0.9,
)  # times a load that no longer holds the bounds: the next that is tried
NEAR = 0.21  # of its most: rates that are closer are not parted any more


class Measurer(Protocol):
    """The part of a run that the confirmation uses."""

    options: BenchOptions

    @property
    def round_seconds(self) -> float:
        """That a round takes."""

    def order(self) -> list[int]: ...

    def first(self) -> int | None: ...

    def trial(self, at: int) -> Trial: ...

    def attempt(self, at: int, offered: OfferedLoad) -> bool: ...

    def seconds_left(self) -> float: ...


def confirm(run: Measurer) -> list[PairedComparison]:
    """The comparisons of the winner with the others.

    Its points have more rounds afterwards, and some of requests that come at random.
    """
    turns = ConfirmationRounds(run)
    for number in range(ATTEMPTS):
        order = run.order()
        if not order:
            return []
        if number and run.seconds_left() < COMPARED * run.round_seconds:
            break
        if turns.stays(_group(run, order)):
            break
    if (
        leader := winner_of(run.order(), run.trial)
    ) is not None and run.seconds_left() >= COMPARED * run.round_seconds:
        turns.measure(
            turns.loads(_group(run, [leader, *run.order()]))
        )  # nothing, where it was measured often enough
        leader = winner_of(run.order(), run.trial)
    if leader is None:
        return []
    winner, tied = choose(
        run.order(), run.trial, turns.compared(leader, _group(run, [leader, *run.order()]))
    )
    assert winner is not None
    at_random(run, winner)
    return turns.compared(winner, dict.fromkeys([*_group(run, [winner, *run.order()]), *tied]))


def _group(run: Measurer, order: Sequence[int]) -> list[int]:
    """The best, the next best, and the baseline, where it was measured."""
    first = run.first()
    return list(
        dict.fromkeys([*list(dict.fromkeys(order))[:2], *([] if first is None else [first])])
    )


@dataclass
class ConfirmationRounds:
    """What was measured in turn: `figures` has the throughput of each trial's load by the turn.
    Attempts share the turns that they have in common, so that a change of the best costs no more
    than what is new.
    """

    run: Measurer
    number: int = 0
    figures: defaultdict[tuple[int, str], dict[int, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def loads(self, group: Iterable[int]) -> dict[int, OfferedLoad]:
        return {at: load for at in group if (load := _best(self.run, at)) is not None}

    def stays(self, group: Sequence[int]) -> bool:
        """Measures them; whether the first, with its load, still is the best.

        Where that breaks the bounds, a lower one is tried.
        """
        best, loads = group[0], self.loads(group)
        load = loads[best]
        self.measure(loads)
        if self.run.trial(best).state == "measured" and not _holds(self.run, best, load):
            lower = _lower(self.run, best, load)
            if lower is not None:
                self.run.attempt(best, lower)
            return False
        return self.run.order()[:1] == [best] and _best(self.run, best) == load

    def measure(self, loads: dict[int, OfferedLoad]) -> None:
        """Until the winner, which is the first, is known well enough, no longer holds its bounds,
        or the time is over.
        """
        winner, begun = next(iter(loads)), self.number
        while not self._enough(winner, loads, self.number - begun):
            for at in (
                list(loads) if self.number % 2 == 0 else list(reversed(loads))
            ):  # so that a steady drift favours none of them
                if (
                    at == self.run.first() != winner
                    and winner in loads
                    and self._known(winner, at, loads)
                ):
                    continue
                if self.run.attempt(at, loads[at]):
                    last = _point(self.run, at, loads[at]).rounds[-1]
                    self._of(at, loads[at])[self.number] = last.throughput * correction(last)
                else:
                    del loads[at]
            self.number += 1
            if winner not in loads or (
                self.number > begun + 1 and not _holds(self.run, winner, loads[winner])
            ):
                return

    def compared(self, winner: int, others: Iterable[int]) -> list[PairedComparison]:
        """The winner with each of them, by the turns that both were measured in: one alone tells
        nothing, and no file holds infinity.
        """
        pairs = []
        for other in others:
            loads = _best(self.run, winner), _best(self.run, other)
            if other == winner or loads[0] is None or loads[1] is None:
                continue
            pairs_of = self._common(winner, other, {winner: loads[0], other: loads[1]})
            if len(pairs_of) > 1 and min(map(min, pairs_of)) > 0:
                found = real_difference(*zip(*pairs_of, strict=True))
                pairs.append(
                    PairedComparison(
                        first=winner,
                        second=other,
                        ratio=found.ratio,
                        low=found.low,
                        high=found.high,
                        real=found.real,
                    )
                )
        return pairs

    def _of(self, at: int, load: OfferedLoad) -> dict[int, float]:
        return self.figures[at, load.model_dump_json()]

    def _common(
        self, winner: int, at: int, loads: dict[int, OfferedLoad]
    ) -> list[tuple[float, float]]:
        mine, its = self._of(winner, loads[winner]), self._of(at, loads[at])
        return [(its[turn], mine[turn]) for turn in sorted(mine.keys() & its.keys())]

    def _known(self, winner: int, at: int, loads: dict[int, OfferedLoad]) -> bool:
        """Whether enough turns say that the winner is not as the baseline is."""
        pairs = self._common(winner, at, loads)
        return (
            len(pairs) >= self.run.options.rounds
            and len(pairs) > 1
            and real_difference(*zip(*pairs, strict=True)).real
        )

    def _enough(self, winner: int, loads: dict[int, OfferedLoad], turns: int) -> bool:
        left, first = self.run.seconds_left(), self.run.first()
        common = min(
            len(self._common(winner, at, loads))
            for at in loads
            if at == winner or at != first or not self._known(winner, at, loads)
        )
        if common < self.run.options.rounds:
            return left < len(loads) * self.run.round_seconds and (turns > 0 or common > 1)
        late = left < (len(loads) + AT_RANDOM) * self.run.round_seconds
        return (
            late
            or common >= MOST_ROUNDS
            or is_precise(_point(self.run, winner, loads[winner]).counted, self.run.options.width)
        )


def at_random(run: Measurer, at: int) -> None:
    """Open loops: a closed one spaces its requests by itself, clients do not.

    Where bounds break, a rate is looked for that holds them.
    """
    best = _best(run, at)
    if best is None or best.mode == "open":
        return
    most = _point(run, at, best).throughput.value

    def holds(share: float) -> bool | None:
        offered = OfferedLoad(mode="open", rate=three_digits(share * most), arrivals="poisson")
        if run.seconds_left() < run.round_seconds or not run.attempt(at, offered):
            return None
        return _holds(run, at, offered)

    bisected(holds, 0.0, 1.0, CALM, NEAR)


def _holds(run: Measurer, at: int, offered: OfferedLoad | None) -> bool:
    return any(point.holds for point in run.trial(at).points if point.offered == offered)


def _best(run: Measurer, at: int) -> OfferedLoad | None:
    """Its load with the most within the bounds; where nothing holds them, the one with the least
    latency.
    """
    points = run.trial(at).points
    position = confirmed_best(points)
    if position is None:
        position = min(
            range(len(points)), key=lambda each: points[each].latency.p99_ms, default=None
        )
    return None if position is None else points[position].offered


def _lower(run: Measurer, at: int, broken: OfferedLoad) -> OfferedLoad | None:
    """Lower by as much as the bounds were broken; None where that was measured already."""
    bounds = run.options.bounds
    slack = 1.0 if bounds is None else bounds.slack(_point(run, at, broken).latency.model_dump())
    share = min(max(AIM / slack, LEAST_STEP), MOST_STEP) if slack > 0 else MOST_STEP
    if broken.mode == "open":
        lower = broken.model_copy(update={"rate": float(f"{share * (broken.rate or 0.0):.3g}")})
    else:
        lower = broken.model_copy(update={"connections": int(share * broken.connections)})
    levels = [point.offered for point in run.trial(at).points]
    return None if lower in levels or lower.connections < 1 else lower


def _point(run: Measurer, at: int, offered: OfferedLoad) -> Point:
    return next(point for point in run.trial(at).points if point.offered == offered)


RAMP_FIRST, RAMP_STEP = 0.1, 1.5  # times the throughput of a closed loop, and times the rate before
LEAST_RATE = 0.01  # of that throughput: where even this rate does not hold, none is looked for
KNEE_NEAR = 0.05  # of a rate: rates that are closer are not told apart
RAMP_SHARE = 0.3  # of the time of a run, that is kept for its ramp
LOWERED = 5  # times at most that a rate is given up which no longer holds when it is measured again

Attempt = Callable[
    [float], Point | None
]  # one more round at a rate; None where there is no time left for it, or where it failed


def to_the_knee(attempt: Attempt, throughput: float, rounds: int = 3) -> None:
    """Measures the course of the latency up to the knee, then narrows the knee, and measures the
    highest rate that holds so many times.

    `throughput` is what a closed loop reached. The points that `attempt` has made tell the result:
    `points.knee_of`.
    """
    held, rate = 0.0, RAMP_FIRST * throughput
    while (point := attempt(three_digits(rate))) is not None and point.holds:
        held, rate = three_digits(rate), rate * RAMP_STEP
    if point is None:
        return
    broken = three_digits(rate)
    while held == 0 and broken > LEAST_RATE * throughput:
        if (point := attempt(three_digits(broken / 2))) is None:
            return
        held, broken = (
            (three_digits(broken / 2), broken) if point.holds else (0.0, three_digits(broken / 2))
        )
    if held == 0:
        return
    held, _ = bisected(
        lambda rate: _rate_holds(attempt, rate),
        held,
        broken,
        (held + broken) / 2,
        KNEE_NEAR * broken,
    )
    for _ in range(LOWERED):
        point = attempt(held)
        while point is not None and point.holds and len(point.counted) < rounds:
            point = attempt(held)
        if point is None or point.holds:
            return
        held = three_digits((1 - KNEE_NEAR) * held)


def _rate_holds(attempt: Attempt, rate: float) -> bool | None:
    point = attempt(rate)
    return None if point is None else point.holds


def ramp_of(run: Measurer, at: int) -> bool:
    """Of one configuration, as far as there is time left; whether the knee was found."""
    points = run.trial(at).points
    position = confirmed_best(points)
    if position is None:
        return False

    def at_rate(rate: float) -> Point | None:
        offered = OfferedLoad(mode="open", rate=rate, arrivals="poisson")
        if run.seconds_left() < run.round_seconds or not run.attempt(at, offered):
            return None
        return next(point for point in points if point.offered == offered)

    to_the_knee(at_rate, points[position].throughput.value, run.options.rounds)
    return knee_of(points).known(run.options.rounds)
