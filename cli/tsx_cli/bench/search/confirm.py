"""The end of a run: a comparison in turn, and the rate of random arrivals that the best sustains.

The best, the second-best and the baseline are measured in turn, so that disturbances affect all.
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
from tsx_cli.bench.search.ladder import TARGET_LATENCY_RATIO, bisect, three_digits
from tsx_cli.bench.search.machine import correction
from tsx_cli.bench.search.options import BenchOptions
from tsx_cli.bench.search.points import choose, confirmed_best, knee_of, winner_of

FULL_ROUND_S, SHORT_ROUND_S = 3.0, 1.0  # a round with enough time, and with little
ANSWERS_PER_ROUND = 300  # Fewer answers give no p99; `FULL_ROUND_S` still bounds a round.
ROUND_OVERHEAD_S = 0.6  # the generator's start, and the reading of metrics
COMPARED = 3  # the best, the next best and the baseline
MIN_COMPARISON_ROUNDS = 4  # two rounds of each of two
OPEN_LOOP_ROUNDS = 3
ROUND_SHARE = 0.025  # share of the remaining time for a round
# Share of the remaining time for curves with the loading of their models; none begins beyond it.
MAX_CURVES_SHARE = 0.3
CURVES_SHARE = 0.15  # share of the remaining time for all curves together
MAX_END_SHARE = 0.35  # share of the whole time for the comparison
MAX_CURVE_S = 20.0


def round_cost(seconds: float) -> float:
    """Return the seconds that a round takes with its warm-up and its overhead."""
    return seconds + min(MAX_AUTO_WARM_UP_S, seconds) + ROUND_OVERHEAD_S


def seconds_in_search(
    requested: float | None, throughput: float | None, remaining_s: float = math.inf
) -> float:
    """Return the seconds of a round for an expected throughput.

    A round is no longer than enough answers need. Little remaining time is for more configurations,
    not for longer rounds.
    """
    if requested is not None:
        return requested
    needed = FULL_ROUND_S if not throughput else ANSWERS_PER_ROUND / 2 / throughput
    return min(max(min(needed, remaining_s * ROUND_SHARE), SHORT_ROUND_S), FULL_ROUND_S)


def seconds_at_end(
    requested: float | None, rounds: int, remaining_s: float, starting: float
) -> float:
    """Return the seconds of a round, so that the whole comparison fits into the remaining time.

    Its servers take `starting` seconds to start.
    """
    if requested is not None:
        return requested
    round_s = (remaining_s - starting) / (COMPARED * rounds + OPEN_LOOP_ROUNDS)
    return min(max((round_s - ROUND_OVERHEAD_S) / 2, SHORT_ROUND_S), FULL_ROUND_S)


def reserved_for_end(requested: float | None, rounds: int, total_s: float, start: float) -> float:
    """Return the seconds that the search leaves of the total.

    A server takes `start` seconds to start.
    """
    needed = COMPARED * start + (COMPARED * rounds + OPEN_LOOP_ROUNDS) * round_cost(
        FULL_ROUND_S if requested is None else requested
    )
    return min(needed, MAX_END_SHARE * total_s)


def reserved_for_another(rounds: int, start: float) -> float:
    """Return the seconds to compare the winner with one found after the comparison."""
    return 2 * start + (2 * rounds + 1) * round_cost(SHORT_ROUND_S)


def curve_seconds(remaining_s: float, curves: int) -> float:
    """Return the seconds for each of so many curves."""
    return (
        MAX_CURVE_S
        if math.isinf(remaining_s)
        else min(MAX_CURVE_S, CURVES_SHARE * max(0.0, remaining_s) / curves)
    )


MAX_ATTEMPTS = 5  # A winner that no longer holds its bounds is replaced by another.
MAX_ROUNDS = 20
FIRST_RATE_SHARE = 0.8  # first tried rate of random arrivals, as a share of the maximum
# Next tried load after one that breaks the bounds, as a share of it.
MIN_STEP, MAX_STEP = 0.6, 0.9
RATE_RESOLUTION = 0.21  # smallest searched distance of rates, as a share of the maximum


class Measurer(Protocol):
    """The part of a run that the confirmation uses."""

    options: BenchOptions

    @property
    def round_seconds(self) -> float:
        """The seconds that a round takes."""

    def order(self) -> list[int]: ...

    def first(self) -> int | None: ...

    def trial(self, at: int) -> Trial: ...

    def attempt(self, at: int, offered: OfferedLoad) -> bool: ...

    def seconds_left(self) -> float: ...


def confirm(run: Measurer) -> list[PairedComparison]:
    """Measure the best configurations in turn; return the winner's comparisons with the others.

    Afterwards the winner has more rounds, and some with random arrivals.
    """
    turns = ConfirmationRounds(run)
    for number in range(MAX_ATTEMPTS):
        order = run.order()
        if not order:
            return []
        if number and run.seconds_left() < COMPARED * run.round_seconds:
            break
        if turns.is_still_best(_group(run, order)):
            break
    leader = winner_of(run.order(), run.trial)
    if leader is not None and run.seconds_left() >= COMPARED * run.round_seconds:
        # This measures nothing if the group was measured often enough.
        turns.measure(turns.loads(_group(run, [leader, *run.order()])))
        leader = winner_of(run.order(), run.trial)
    if leader is None:
        return []
    winner, tied = choose(
        run.order(), run.trial, turns.comparisons(leader, _group(run, [leader, *run.order()]))
    )
    assert winner is not None
    measure_open_loops(run, winner)
    return turns.comparisons(winner, dict.fromkeys([*_group(run, [winner, *run.order()]), *tied]))


def _group(run: Measurer, order: Sequence[int]) -> list[int]:
    """Return the best, the next best, and the baseline if it was measured."""
    first = run.first()
    return list(
        dict.fromkeys([*list(dict.fromkeys(order))[:2], *([] if first is None else [first])])
    )


@dataclass
class ConfirmationRounds:
    """Measurements in turn; `figures` has the throughput of each trial's load by the turn.

    Attempts share their common turns, so a change of the best costs only its new measurements.
    """

    run: Measurer
    number: int = 0
    figures: defaultdict[tuple[int, str], dict[int, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def loads(self, group: Iterable[int]) -> dict[int, OfferedLoad]:
        return {at: load for at in group if (load := _best(self.run, at)) is not None}

    def is_still_best(self, group: Sequence[int]) -> bool:
        """Measure a group; return whether its first is still the best with its load.

        If the load breaks the bounds, a lower one is tried.
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
        """Measure loads in turn until the figures of the winner, the first, are precise enough.

        It ends earlier if the winner breaks its bounds, or if no time remains.
        """
        winner, first_turn = next(iter(loads)), self.number
        while not self._is_complete(winner, loads, self.number - first_turn):
            # Alternating orders, so that a steady drift favours none of them.
            for at in list(loads) if self.number % 2 == 0 else list(reversed(loads)):
                if (
                    at == self.run.first() != winner
                    and winner in loads
                    and self._is_decided(winner, at, loads)
                ):
                    continue
                if self.run.attempt(at, loads[at]):
                    last = _point(self.run, at, loads[at]).rounds[-1]
                    self._figures_of(at, loads[at])[self.number] = last.throughput * correction(
                        last
                    )
                else:
                    del loads[at]
            self.number += 1
            if winner not in loads or (
                self.number > first_turn + 1 and not _holds(self.run, winner, loads[winner])
            ):
                return

    def comparisons(self, winner: int, rivals: Iterable[int]) -> list[PairedComparison]:
        """Return the comparisons of the winner with the rivals, by their common turns.

        A single turn shows nothing, and files cannot hold infinity.
        """
        pairs = []
        for rival in rivals:
            loads = _best(self.run, winner), _best(self.run, rival)
            if rival == winner or loads[0] is None or loads[1] is None:
                continue
            figure_pairs = self._common_figures(winner, rival, {winner: loads[0], rival: loads[1]})
            if len(figure_pairs) > 1 and min(map(min, figure_pairs)) > 0:
                difference = real_difference(*zip(*figure_pairs, strict=True))
                pairs.append(
                    PairedComparison(
                        first=winner,
                        second=rival,
                        ratio=difference.ratio,
                        low=difference.low,
                        high=difference.high,
                        real=difference.real,
                    )
                )
        return pairs

    def _figures_of(self, at: int, load: OfferedLoad) -> dict[int, float]:
        return self.figures[at, load.model_dump_json()]

    def _common_figures(
        self, winner: int, at: int, loads: dict[int, OfferedLoad]
    ) -> list[tuple[float, float]]:
        winner_figures = self._figures_of(winner, loads[winner])
        rival_figures = self._figures_of(at, loads[at])
        return [
            (rival_figures[turn], winner_figures[turn])
            for turn in sorted(winner_figures.keys() & rival_figures.keys())
        ]

    def _is_decided(self, winner: int, at: int, loads: dict[int, OfferedLoad]) -> bool:
        """Tell whether enough turns show a real difference of the winner and the baseline."""
        pairs = self._common_figures(winner, at, loads)
        return (
            len(pairs) >= self.run.options.rounds
            and len(pairs) > 1
            and real_difference(*zip(*pairs, strict=True)).real
        )

    def _is_complete(self, winner: int, loads: dict[int, OfferedLoad], turns: int) -> bool:
        remaining_s, first = self.run.seconds_left(), self.run.first()
        common = min(
            len(self._common_figures(winner, at, loads))
            for at in loads
            if at == winner or at != first or not self._is_decided(winner, at, loads)
        )
        if common < self.run.options.rounds:
            return remaining_s < len(loads) * self.run.round_seconds and (turns > 0 or common > 1)
        is_late = remaining_s < (len(loads) + OPEN_LOOP_ROUNDS) * self.run.round_seconds
        return (
            is_late
            or common >= MAX_ROUNDS
            or is_precise(_point(self.run, winner, loads[winner]).counted, self.run.options.width)
        )


def measure_open_loops(run: Measurer, at: int) -> None:
    """Measure open loops of a trial, whose requests a closed loop spaces by itself.

    If bounds break, a rate that holds them is searched.
    """
    best = _best(run, at)
    if best is None or best.mode == "open":
        return
    max_rate = _point(run, at, best).throughput.value

    def holds(share: float) -> bool | None:
        offered = OfferedLoad(mode="open", rate=three_digits(share * max_rate), arrivals="poisson")
        if run.seconds_left() < run.round_seconds or not run.attempt(at, offered):
            return None
        return _holds(run, at, offered)

    bisect(holds, 0.0, 1.0, FIRST_RATE_SHARE, RATE_RESOLUTION)


def _holds(run: Measurer, at: int, offered: OfferedLoad | None) -> bool:
    return any(point.holds for point in run.trial(at).points if point.offered == offered)


def _best(run: Measurer, at: int) -> OfferedLoad | None:
    """Return a trial's load with the most throughput within the bounds, or the quickest load."""
    points = run.trial(at).points
    position = confirmed_best(points)
    if position is None:
        position = min(
            range(len(points)), key=lambda index: points[index].latency.p99_ms, default=None
        )
    return None if position is None else points[position].offered


def _lower(run: Measurer, at: int, broken: OfferedLoad) -> OfferedLoad | None:
    """Return a load lower by the excess over the bounds, or None if that was measured."""
    bounds = run.options.bounds
    ratio = 1.0
    if bounds is not None:
        ratio = bounds.latency_ratio(_point(run, at, broken).latency.model_dump())
    share = min(max(TARGET_LATENCY_RATIO / ratio, MIN_STEP), MAX_STEP) if ratio > 0 else MAX_STEP
    if broken.mode == "open":
        lower = broken.model_copy(update={"rate": float(f"{share * (broken.rate or 0.0):.3g}")})
    else:
        lower = broken.model_copy(update={"connections": int(share * broken.connections)})
    levels = [point.offered for point in run.trial(at).points]
    return None if lower in levels or lower.connections < 1 else lower


def _point(run: Measurer, at: int, offered: OfferedLoad) -> Point:
    return next(point for point in run.trial(at).points if point.offered == offered)


RAMP_FIRST, RAMP_STEP = 0.1, 1.5  # first rate as a share of a closed loop's, and the growth
MIN_RATE_SHARE = 0.01  # lowest tried rate, as a share of a closed loop's throughput
KNEE_RESOLUTION = 0.05  # smallest searched distance of rates, as a share
RAMP_SHARE = 0.3  # share of a run's time that is reserved for its ramp
MAX_LOWERINGS = 5  # rates that are given up because they break the bounds when repeated

# One more round at a rate; None if it failed, or if no time remains.
Attempt = Callable[[float], Point | None]


def measure_knee(attempt: Attempt, throughput: float, rounds: int = 3) -> None:
    """Measure the latency up to the knee, narrow the knee, and repeat the highest rate that holds.

    `throughput` is that of a closed loop. The points of `attempt` hold the result; see
    `points.knee_of`.
    """
    held, rate = 0.0, RAMP_FIRST * throughput
    while (point := attempt(three_digits(rate))) is not None and point.holds:
        held, rate = three_digits(rate), rate * RAMP_STEP
    if point is None:
        return
    broken = three_digits(rate)
    while held == 0 and broken > MIN_RATE_SHARE * throughput:
        if (point := attempt(three_digits(broken / 2))) is None:
            return
        held, broken = (
            (three_digits(broken / 2), broken) if point.holds else (0.0, three_digits(broken / 2))
        )
    if held == 0:
        return
    held, _ = bisect(
        lambda rate: _rate_holds(attempt, rate),
        held,
        broken,
        (held + broken) / 2,
        KNEE_RESOLUTION * broken,
    )
    for _ in range(MAX_LOWERINGS):
        point = attempt(held)
        while point is not None and point.holds and len(point.counted) < rounds:
            point = attempt(held)
        if point is None or point.holds:
            return
        held = three_digits((1 - KNEE_RESOLUTION) * held)


def _rate_holds(attempt: Attempt, rate: float) -> bool | None:
    point = attempt(rate)
    return None if point is None else point.holds


def measure_ramp(run: Measurer, at: int) -> bool:
    """Measure the ramp of a configuration in the remaining time; return whether it has a knee."""
    points = run.trial(at).points
    position = confirmed_best(points)
    if position is None:
        return False

    def at_rate(rate: float) -> Point | None:
        offered = OfferedLoad(mode="open", rate=rate, arrivals="poisson")
        if run.seconds_left() < run.round_seconds or not run.attempt(at, offered):
            return None
        return next(point for point in points if point.offered == offered)

    measure_knee(at_rate, points[position].throughput.value, run.options.rounds)
    return knee_of(points).known(run.options.rounds)
